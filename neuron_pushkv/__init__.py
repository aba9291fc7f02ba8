"""Push a prefill engine's KV cache straight into the memory that a decode engine reserved.

The package imports no accelerator library and no vLLM at top level; ``docs/architecture.md`` is the map.
"""

__version__ = "0.1.0"

"""The transport over NIXL; ``nixl`` is the way in."""

from neuron_pushkv.transport.nixl.nixl import NixlTransport

__all__ = ["NixlTransport"]

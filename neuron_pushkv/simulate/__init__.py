"""A fleet's prefill, transfers and decode as a discrete-event model. Whatever comes out of it is simulated.

Needs SimPy (``pip install 'neuron-pushkv[simulate]'``). Only ``prefill``, ``decode`` and ``model`` know it; tables,
lengths, wires, memory, measures and break-even are plain arithmetic.
"""

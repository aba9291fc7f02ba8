"""libfabric: finding it, and the native core that talks to it.

The core (the C files here) owns the data path and never takes the GIL; ``core.h`` says which thread owns what.
"""

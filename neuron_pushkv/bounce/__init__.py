"""KV caches that the network can't be shown: their KV passes through a smaller cache in host memory.

``cache`` is that staging cache, which is what peers are told of instead of the device's; ``dense`` lays it out and
``copies`` says which bytes go where. ``copier`` moves them, ``sending`` and ``landing`` are the two ways through.
"""

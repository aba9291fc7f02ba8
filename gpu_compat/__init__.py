"""The accelerator seam for CUDA devices.

Reserved for the CUDA counterpart of :mod:`neuron_pushkv.device`. It holds no code yet: CUDA caches are refused by
:func:`neuron_pushkv.device.accelerator_for` with a sentence that says so.
"""

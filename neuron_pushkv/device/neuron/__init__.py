"""AWS Neuron devices, through the Neuron runtime's library, which is loaded at run time."""

from neuron_pushkv.device.neuron.accelerator import NeuronAccelerator
from neuron_pushkv.device.neuron.runtime import NeuronFacts

__all__ = ["NeuronAccelerator", "NeuronFacts"]

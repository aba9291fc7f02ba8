"""Fleets on this machine: from a fleet file to running processes, and nothing left of them afterwards."""

from neuron_pushkv.fleet.supervisor import Fleet, Progress, State

__all__ = ["Fleet", "Progress", "State"]

"""Authenticated control connections between workers, directories and routers."""

from neuron_pushkv.peers.handler import Connection, Handler
from neuron_pushkv.peers.node import Node

__all__ = ["Connection", "Handler", "Node"]

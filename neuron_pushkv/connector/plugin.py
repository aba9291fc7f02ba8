"""Entry point of group ``vllm.general_plugins``: makes the connector known to vLLM by name."""

from __future__ import annotations

import contextlib
import logging

NAME = "PushKVConnector"
_MODULE = "neuron_pushkv.connector.connector"


def register() -> None:
    """Register :data:`NAME`. vLLM calls this in every process, and may do so more than once in one of them."""
    follow_vllm_log()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # Registered already.
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)


def follow_vllm_log() -> None:
    """Let this package's log lines appear among vLLM's and like them: Python would drop or mangle them otherwise."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("neuron_pushkv")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = theirs.propagate
        ours.setLevel(theirs.level)

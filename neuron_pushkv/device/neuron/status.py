"""libnrt's status codes: a name, an exception and an advice for each."""

from __future__ import annotations

from neuron_pushkv.errors import (
    NeuronBusy,
    NeuronClosed,
    NeuronError,
    NeuronFault,
    NeuronInvalid,
    NeuronOutOfBounds,
    NeuronOutOfMemory,
    NeuronUninitialized,
)

SUCCESS, FAILURE, INVALID, RESOURCE, UNINITIALIZED, CLOSED = 0, 1, 2, 4, 13, 14

FORKED = (
    "this process was forked from one that had loaded the Neuron runtime, which can't be used on this side of a fork; "
    "start workers with 'spawn' (VLLM_WORKER_MULTIPROC_METHOD=spawn)"
)
_REPORT = "see the runtime's own log (NEURON_RT_LOG_LEVEL=INFO)"
_RESET = "the core needs a reset: end the processes that use it, and restart them"
_REPLACE = "the device is faulty: take the node out of service"

STATUSES: dict[int, tuple[str, type[NeuronError], str]] = {
    1: ("NRT_FAILURE", NeuronError, f"{_REPORT}; if this process was forked, start it with 'spawn' instead"),
    2: ("NRT_INVALID", NeuronInvalid, "the runtime rejects an argument; please report this"),
    3: ("NRT_INVALID_HANDLE", NeuronInvalid, "a tensor was used after it was freed; please report this"),
    4: ("NRT_RESOURCE", NeuronOutOfMemory, "free device memory: a smaller KV cache, or fewer processes on this core"),
    5: ("NRT_TIMEOUT", NeuronFault, f"the device has not answered in time; {_REPORT}"),
    6: ("NRT_HW_ERROR", NeuronFault, _REPLACE),
    7: ("NRT_QUEUE_FULL", NeuronBusy, "too much is under way on this core; try again"),
    9: ("NRT_LOAD_NOT_ENOUGH_NC", NeuronBusy, "too few cores: NEURON_RT_VISIBLE_CORES must name enough free ones"),
    10: ("NRT_UNSUPPORTED_NEFF_VERSION", NeuronInvalid, "use compiler and runtime of one Neuron release"),
    11: ("NRT_FAIL_HOST_MEM_ALLOC", NeuronOutOfMemory, "free host memory, or raise its limit (ulimit -l, hugepages)"),
    13: ("NRT_UNINITIALIZED", NeuronUninitialized, "initialise the Neuron runtime (nrt_init) before this is called"),
    14: ("NRT_CLOSED", NeuronClosed, "the runtime was closed, and a process can't open it twice; restart the process"),
    15: ("NRT_QUEUE_EMPTY", NeuronBusy, "nothing is there yet; try again"),
    101: ("NRT_EXEC_UNIT_UNRECOVERABLE", NeuronFault, _RESET),
    1002: ("NRT_EXEC_BAD_INPUT", NeuronInvalid, "a model was given input it was not compiled for"),
    1003: ("NRT_EXEC_COMPLETED_WITH_NUM_ERR", NeuronFault, "a model has computed NaN; look at its weights and input"),
    1004: ("NRT_EXEC_COMPLETED_WITH_ERR", NeuronFault, f"a model has failed on the device; {_REPORT}"),
    1005: ("NRT_EXEC_NC_BUSY", NeuronBusy, "another process uses this core: give each its own NEURON_RT_VISIBLE_CORES"),
    1006: ("NRT_EXEC_OOB", NeuronOutOfBounds, "an access lies outside its tensor; please report this"),
    1100: ("NRT_COLL_PENDING", NeuronBusy, "a collective is still under way; try again"),
    1200: ("NRT_EXEC_HW_ERR_COLLECTIVES", NeuronFault, "a collective hangs; look for a failed worker"),
    1201: ("NRT_EXEC_HW_ERR_HBM_UE", NeuronFault, _REPLACE),
    1202: ("NRT_EXEC_HW_ERR_NC_UE", NeuronFault, _RESET),
    1203: ("NRT_EXEC_HW_ERR_DMA_ABORT", NeuronFault, _RESET),
    1204: ("NRT_EXEC_SW_NQ_OVERFLOW", NeuronFault, _RESET),
    1205: ("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", NeuronFault, "reboot the instance: its memory repairs itself then"),
    1206: ("NRT_NETWORK_PROXY_FAILURE", NeuronFault, "a collective's network has failed; look at EFA and its peers"),
}
"""Code -> name, exception, what to do. Codes and their meanings: ``nrt/nrt_status.h``."""


def error_for(status: int, doing: str) -> NeuronError:
    """The exception for a call that has failed; ``doing`` names it ("nrt_init")."""
    name, kind, advice = STATUSES.get(status, (f"status {status}", NeuronError, _REPORT))
    return kind(status, f"{doing} failed with {name}: {advice}")

"""The CUDA driver's status codes: a name, and what to do, for each that can come."""

from __future__ import annotations

from gpu_compat.declarations import ffi
from neuron_pushkv.errors import DeviceError

SUCCESS, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED = 0, 1, 3, 801

FORKED = (
    "this process was forked from one that had initialised CUDA, which can't be used on this side of a fork; start "
    "workers with 'spawn' (VLLM_WORKER_MULTIPROC_METHOD=spawn)"
)
_REPORT = "look for the kernel's lines about it (dmesg, 'NVRM: Xid')"
_RESTART = f"what was computed is lost, and CUDA can't be used any more in this process; restart it; {_REPORT}"
_REPLACE = f"the device is faulty: restart, and take the node out of service if it comes again; {_REPORT}"
_DRIVER = "the driver's parts don't fit each other; install libcuda and kernel modules of one version, and reboot"
_OLD = "install a newer NVIDIA driver"
_CAPTURE = "a CUDA graph was being captured: push only what is launched outside of captures"

ADVICE: dict[int, str] = {
    1: "the driver rejects an argument; please report this",
    2: "free device memory: a smaller KV cache (--gpu-memory-utilization), or fewer processes on this device",
    3: "call cuInit first; if this process was forked, start it with 'spawn' instead",
    4: "this process is ending; push nothing any more",
    34: "the toolkit's stub was loaded instead of the driver; take its 'stubs' folder off LD_LIBRARY_PATH",
    36: _OLD,
    46: "another process has this device for itself; look at its compute mode (nvidia-smi -q -d COMPUTE)",
    100: "no device is to be seen; look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices",
    101: "there is no device of that number; look at CUDA_VISIBLE_DEVICES",
    201: "no usable context; please report this",
    205: "memory can't be mapped; give the device more BAR space, or map less",
    214: _REPLACE,
    220: _REPLACE,
    226: _RESTART,
    304: "the operating system refused; look at the limits of locked memory and open files (ulimit -l, ulimit -n)",
    400: "a stream or event was used after its end; please report this",
    500: "there is no such memory (any more); register KV caches after they were allocated, and not while asleep",
    600: "work is still under way; try again",
    **dict.fromkeys((700, 702, 709, 710, 714, 715, 716, 717, 718, 719), _RESTART),
    800: "the operation isn't permitted; look at the container's rights",
    801: "this device or driver can't do that",
    802: "the system isn't ready; look whether nvidia-fabricmanager is running",
    803: _DRIVER,
    804: "the container's CUDA is newer than this device's driver can be made to fit; " + _OLD,
    **dict.fromkeys((900, 901, 906), _CAPTURE),
    911: _RESTART,
    999: f"the driver doesn't say why; {_REPORT}",
}
"""Code -> what to do. Codes and their meanings: ``CUresult`` in ``cuda.h``."""

NAMES: dict[int, str] = ffi.typeof("CUresult").elements


def error_for(status: int, doing: str) -> DeviceError:
    """The exception for a call that has failed; ``doing`` names it ("cuInit")."""
    return DeviceError(f"{doing} failed with {NAMES.get(status, f'status {status}')}: {ADVICE.get(status, _REPORT)}")

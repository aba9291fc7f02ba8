"""Checks of environment variables, which libraries read once and silently. See also ``device/neuron/order.py``."""

from __future__ import annotations

from collections.abc import Mapping

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.doctor.configuration import neuron_cores
from neuron_pushkv.doctor.findings import Finding, Id, error, fine, warning
from neuron_pushkv.transport.choosing import wants_nixl

_FALSE = ("0", "no", "false", "off")
_FABRIC = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_HMEM_DISABLE_P2P", "FI_HMEM", "FI_EFA_IFACE")
MAPPING = "NEURON_RT_MAP_HBM"
"""With 1 device memory has addresses, which the network can be shown."""
_NEURON = (
    MAPPING,
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_VISIBLE_DEVICES",
    "NEURON_RT_NUM_CORES",
    "NEURON_LOGICAL_NC_CONFIG",
)


def accelerator(environment: Mapping[str, str], device: str) -> Finding:
    """What the device's runtime, or torch's allocator for it, is told."""
    check = Id.ACCELERATOR_ENVIRONMENT
    if device == "neuron":
        seen = _those(environment, _NEURON)
        if environment.get(MAPPING) != "1":
            return warning(
                check,
                f"{MAPPING} is {environment.get(MAPPING, 'not set')}: device memory has no "
                "address, and all KV goes through host memory",
                "set it to 1 before the engine starts",
                **seen,
            )
        if not neuron_cores(environment) and environment.get("NEURON_RT_NUM_CORES", "0") == "0":
            return warning(
                check,
                "no cores are named (NEURON_RT_VISIBLE_CORES, NEURON_VISIBLE_DEVICES) or counted "
                "(NEURON_RT_NUM_CORES): the first process claims every core",
                "give each engine cores of its own",
                **seen,
            )
        return fine(check, "HBM is mapped, and cores are named", **seen)
    if device == "cuda":
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        seen = _those(environment, (*names, "CUDA_VISIBLE_DEVICES", "VLLM_KV_CACHE_LAYOUT"))
        for name in names:
            if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
                return error(
                    check,
                    f"{name} turns on expandable segments, whose memory can't be registered with a network card",
                    f"take expandable_segments out of {name}",
                    **seen,
                )
        return fine(check, "torch's allocator gives memory that can be registered", **seen)
    return fine(check, "host memory needs no settings")


def fabric(environment: Mapping[str, str], settings: ConnectorSettings, device: str) -> Finding:
    """What libfabric is told behind our back."""
    seen = _those(environment, _FABRIC)
    provider = "efa" if settings.provider.startswith("efa") else settings.provider
    check = Id.FABRIC_ENVIRONMENT
    wanted = environment.get("FI_PROVIDER", "")
    if wanted and not wanted.startswith("^") and provider not in wanted.replace(";", ",").split(","):
        what = f"FI_PROVIDER is '{wanted}', which hides provider '{provider}', the one that is asked for"
        return error(check, what, "unset it, or set 'provider' to the same", **seen)
    if provider == "efa" and environment.get("FI_EFA_USE_DEVICE_RDMA", "1").lower() in _FALSE:
        what = "FI_EFA_USE_DEVICE_RDMA is 0: writes are taken apart into messages, and copied by the receiver's CPU"
        return error(check, what, "unset it", **seen)
    device = shown(environment, settings, device)
    if device != "cpu" and environment.get("FI_HMEM_DISABLE_P2P", "0").lower() not in (*_FALSE, ""):
        what = "FI_HMEM_DISABLE_P2P is set, so no card may touch device memory"
        return error(check, what, "unset it", **seen)
    kinds = environment.get("FI_HMEM", "")
    if device != "cpu" and kinds and device not in kinds.replace(";", ",").split(","):
        return error(check, f"FI_HMEM is '{kinds}', which leaves out '{device}' memory", "unset it", **seen)
    return fine(check, "nothing there stands in the way of libfabric", **seen)


def shm(environment: Mapping[str, str], settings: ConnectorSettings, device: str) -> Finding:
    """Shared memory between ranks of one machine: with device memory it says "written" and writes nothing."""
    name = "FI_EFA_ENABLE_SHM_TRANSFER"
    seen = _those(environment, (name,))
    nixl = wants_nixl(settings, device)
    device = shown(environment, settings, device)
    if device == "cpu":
        return fine(Id.FABRIC_SHM, "host memory may go through shared memory", **seen)
    if settings.provider == "shm" and not nixl and device == "neuron":
        what = "provider 'shm' copies by the CPU, which can't read Neuron's memory"
        return error(Id.FABRIC_SHM, what, "set 'provider' to 'efa'", **seen)
    if settings.provider.startswith("efa") and environment.get(name, "1").lower() not in _FALSE:
        if not nixl:
            # fabric/core.py sets the variable, and fabric/endpoint.c the option of libfabric 1.21 and later.
            return fine(Id.FABRIC_SHM, "shared memory between ranks of one machine is turned off by us", **seen)
        what = (
            f"{name} is {environment.get(name, 'not set')}: EFA may use shared memory between ranks of one machine, "
            "which loses writes to device memory without an error"
        )
        return warning(Id.FABRIC_SHM, what, f"set {name}=0 on every engine", **seen)
    return fine(Id.FABRIC_SHM, "device memory stays out of shared memory", **seen)


def shown(environment: Mapping[str, str], settings: ConnectorSettings, device: str) -> str:
    """Whose memory the network gets to see, where KV lies in that ``device``'s: "cpu" if it goes through the host's.

    See ``transport/choosing.py``, which asks the memory itself, once there is some.
    """
    unmapped = device == "neuron" and environment.get(MAPPING) != "1"
    return "cpu" if settings.bounce == "always" or unmapped else device


def _those(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: environment[name] for name in names if name in environment}

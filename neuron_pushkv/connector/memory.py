"""The engine's KV cache in slabs of our own, which register better: on CPUs, where vLLM lets us allocate it (0.32).

vLLM asks torch for one tensor of zeros and lays all layers into it. That one call is answered here.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from neuron_pushkv.device.base import Accelerator, Memory
from neuron_pushkv.errors import DeviceError

logger = logging.getLogger(__name__)


class SlabContext(TorchFunctionMode):
    """While it is entered, a flat int8 tensor of zeros on the CPU is memory of ``accelerator``.

    A slab lives as long as a tensor's storage lies in it: the storage holds the accelerator, which nobody else may
    close. Where a slab is not to be had, or vLLM allocates in another way, all is as it would be without this; the log
    says so.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._slabs: list[Memory] = []
        self._asked = False

    def bytes_of(self, memory: Sequence[Memory]) -> int:
        """How many bytes of ``memory`` lie in slabs."""
        return sum(
            max(0, min(one.address + one.length, slab.address + slab.length) - max(one.address, slab.address))
            for one in memory
            for slab in self._slabs
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Torch's functions, called by anyone on this thread."""
        kwargs = kwargs or {}
        length = _bytes_asked_for(args, kwargs) if func is torch.zeros else 0
        if not length:
            return func(*args, **kwargs)
        self._asked = True
        try:
            return self._zeros(length)
        except (DeviceError, RuntimeError) as error:
            logger.warning("the KV cache lies in vLLM's own memory and not in slabs: %s", error)
            return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self._asked and error[0] is None:
            logger.warning("vLLM allocates its KV cache in a way that is not known here; it does not lie in slabs")

    def _zeros(self, length: int) -> Any:
        memory = self._accelerator.allocate(length)
        slab = (ctypes.c_int8 * length).from_address(memory.address)
        # torch keeps the buffer that a storage is made from; and with it what the buffer's memory belongs to.
        slab.accelerator = self._accelerator  # type: ignore[attr-defined]
        tensor = torch.frombuffer(slab, dtype=torch.int8)
        # Pages are taken by the thread that vLLM has bound to the right cores, and now, as with vLLM's own.
        tensor.zero_()
        self._slabs.append(memory)
        return tensor


def _bytes_asked_for(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The length of a flat int8 tensor on the CPU; 0 if it is another one that is wanted."""
    if len(args) != 1 or type(args[0]) is not int or kwargs.keys() != {"dtype", "device"}:
        return 0
    fits = kwargs["dtype"] is torch.int8 and torch.device(kwargs["device"]).type == "cpu"
    return args[0] if fits else 0

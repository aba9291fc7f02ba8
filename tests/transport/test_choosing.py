"""What the settings and the memory make of a transport."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_pushkv.config import ConnectorSettings
from neuron_pushkv.device.base import Memory, MemoryKind
from neuron_pushkv.device.host import HostAccelerator
from neuron_pushkv.transport import fabric
from neuron_pushkv.transport.choosing import bounces, open_transport
from tests.transport.conftest import first_library

MAPPED = Memory(1 << 20, 4096, MemoryKind.NEURON, 0)
HIDDEN = Memory(1 << 20, 4096, MemoryKind.NEURON, 0, mapped=False)


class Flushing(HostAccelerator):
    """A device that must be flushed."""

    name = "neuron"
    needs_flush = True


@pytest.mark.parametrize(
    ("bounce", "memory", "bounced"),
    [
        ("auto", [MAPPED], False),
        ("auto", [MAPPED, HIDDEN], True),
        ("always", [MAPPED], True),
        ("always", [], False),
    ],
)
def test_memory_that_only_the_host_sees_needs_no_flush(bounce: str, memory: list[Memory], bounced: bool) -> None:
    settings = ConnectorSettings.model_validate({"provider": "tcp", "bounce": bounce, "libfabric": first_library()})
    assert bounces(settings, memory) == bounced
    transport = open_transport(settings, Flushing(), memory)
    try:
        assert transport.flushes == (not bounced)
    finally:
        transport.close()


class Near(HostAccelerator):
    """A device next to a card."""

    def nics(self, memory: Memory) -> tuple[str, ...]:
        return ("rdmap201s0",)


def test_the_nearest_cards_are_no_more_than_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(fabric, "FabricTransport", lambda *_, **options: opened.append(options))
    open_transport(ConnectorSettings.model_validate({"provider": "efa"}), Near(), [MAPPED])
    assert [(options["nics"], options["preferred"]) for options in opened] == [(("rdmap201s0",), True)]

"""Long prompts in small chunks through a small cache, with preemptions in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from neuron_pushkv import engine
from neuron_pushkv.orders import StepOrders
from neuron_pushkv.transport.base import Transport
from neuron_pushkv.transport.fabric import FabricTransport
from neuron_pushkv.transport.fates import Delay
from neuron_pushkv.transport.faults import FaultyTransport
from neuron_pushkv.transport.loopback import LoopbackNetwork
from tests.engine.sides import BLOCK_BYTES, BLOCKS, LAYERS, Side, until

NewSide = Callable[..., Side]
CHUNK, TOKENS = 64, 1000
COUNT = -(-TOKENS // 16)
WHOLE = COUNT * LAYERS * BLOCK_BYTES


class Prefill:
    """One prompt at the sender, computed chunk by chunk into blocks that are taken as they are needed."""

    def __init__(self, sender: Side, number: int, free: list[int]) -> None:
        self.sender, self.number, self.free = sender, number, free
        self.blocks: list[int] = []
        self.done = 0
        sender.offer(f"p{number}", number, TOKENS, f"t{number}")

    def step(self) -> bool:
        """Whether there was room for it."""
        self.done = min(self.done + CHUNK, TOKENS)
        needed = -(-self.done // 16) - len(self.blocks)
        if needed > len(self.free):
            self.done -= CHUNK
            return False
        self.blocks += [self.free.pop() for _ in range(needed)]
        self.sender.fill(self.number, self.blocks)
        self.sender.advance(f"p{self.number}", self.done, self.blocks)
        return True

    def preempt(self) -> None:
        """Its blocks are another's at once, who writes to them."""
        self.sender.step(StepOrders(preempted=(f"p{self.number}",)))
        self.sender.fill(9_000 + self.number, self.blocks)
        self.free += self.blocks
        self.blocks, self.done = [], 0


@pytest.mark.parametrize("network_", ["loopback", "tcp", "slow"])
def test_long_prompts_in_small_chunks(
    new_side: NewSide, network: LoopbackNetwork, network_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F28: chunks of 64, prompts of 1,000, two of which do not fit: bytes are right, and sent once if not preempted."""
    monkeypatch.setattr(engine, "DRAIN_SECONDS", 5.0)  # On a busy machine, writes may take longer than we'd wait.
    made: dict[str, Callable[[], Transport]] = {
        "loopback": network.transport,
        "tcp": lambda: FabricTransport(provider="tcp"),
        "slow": lambda: FaultyTransport(network.transport(), Delay(0, 0.03, share=0.3), seed=1),
    }
    chance = random.Random(28)
    sender = new_side("sender", transport=made[network_](), keep_delivered_seconds=0)
    receiver = new_side("receiver", transport=made["loopback" if network_ == "slow" else network_]())
    free, preempted = list(range(BLOCKS - 28)), 0
    chance.shuffle(free)
    for pair in range(2):
        target = random.Random(pair).sample(range(BLOCKS), 2 * COUNT)
        numbers = [2 * pair, 2 * pair + 1]
        running = [Prefill(sender, number, free) for number in numbers]
        for index, number in enumerate(numbers):
            receiver.receive(f"d{number}", number, TOKENS, target[COUNT * index :][:COUNT], sender, f"t{number}")
        until(lambda: len(sender.engine._outbound) == 2, "both registrations")
        first, second = running
        moved = sender.stats.get("bytes", {}).get("out", 0)
        while first.done < TOKENS:
            if not first.step():
                second.preempt()  # vLLM takes the one that came last.
                preempted += 1
            elif second.done < TOKENS:
                second.step()
        assert receiver.await_report(f"d{first.number}")
        sender.finish(f"p{first.number}")
        until(lambda: (sender.step(), sender.freed)[1], "its blocks")
        assert sender.stats["bytes"]["out"] - moved == WHOLE, "sent once"
        free += first.blocks
        sender.fill(8_000, first.blocks)
        while second.done < TOKENS:
            assert second.step()
        assert receiver.await_report(f"d{second.number}")
        for index, number in enumerate(numbers):
            assert receiver.holds(number, target[COUNT * index :][:COUNT])
        sender.finish(f"p{second.number}")
        until(lambda: (sender.step(), len(sender.freed) == 2)[1], "all blocks")
        free += second.blocks
        sender.freed.clear()
    assert preempted >= 2
    assert sorted(free) == list(range(BLOCKS - 28))
    assert sender.stats["transfers"] == {"out:completed": 4}
    assert sender.stats["bytes"]["out"] >= 4 * WHOLE

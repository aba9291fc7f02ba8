"""A vLLM worker extension that damages KV blocks on demand. Loaded into the decode engine by the end-to-end tests."""

from __future__ import annotations

from typing import Any

import torch


class Corruption:
    """Methods that vLLM adds to its worker; called over HTTP with ``/collective_rpc``, arguments as strings."""

    model_runner: Any
    remembered_blocks: torch.Tensor

    def remember_blocks(self) -> None:
        """Remember what all blocks hold."""
        self.remembered_blocks = self._fingerprints()

    def changed_blocks(self) -> list[int]:
        """Ids of the blocks whose content differs from what was remembered."""
        changed = torch.nonzero(self._fingerprints() != self.remembered_blocks)
        return [int(block) for block in changed.flatten()]

    def negate_block(self, block: str) -> None:
        """Damage one block in all layers; doing it twice repairs it."""
        for cache in self.model_runner.kv_caches:
            cache[int(block)].neg_()

    def _fingerprints(self) -> torch.Tensor:
        layers = [cache.flatten(1).double() for cache in self.model_runner.kv_caches]
        weights = torch.linspace(1, 2, layers[0].shape[1], dtype=torch.float64)
        return torch.stack([layer @ weights for layer in layers]).sum(0)

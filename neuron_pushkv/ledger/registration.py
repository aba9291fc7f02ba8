"""What a sender checks of a registration before it believes any of it."""

from __future__ import annotations

from neuron_pushkv.errors import Reason
from neuron_pushkv.layout import Layout
from neuron_pushkv.transport.base import EPOCHS, SLOTS
from neuron_pushkv.wire import Register


def fault(message: Register, layout: Layout, peer_blocks: int) -> tuple[Reason, str] | None:
    """What is wrong with it by itself, if anything. ``peer_blocks``: how many blocks the receiver's cache has."""
    size = layout.block_size
    if message.block_size != size:
        return Reason.LAYOUT_MISMATCH, f"block size is {size} at the sender, {message.block_size} at the receiver"
    if not (0 <= message.slot < SLOTS and 0 <= message.epoch < EPOCHS):
        return Reason.BAD_RANGE, f"slot {message.slot}, epoch {message.epoch}"
    if not 0 <= message.start_token < message.end_token or message.start_token % size:
        return Reason.BAD_RANGE, f"tokens {message.start_token} to {message.end_token} with blocks of {size}"
    if len(message.blocks) != 1:
        return Reason.UNSUPPORTED, f"{len(message.blocks)} KV cache groups; one is supported"
    blocks = message.blocks[0]
    needed = layout.blocks_for(message.start_token, message.end_token)
    if len(blocks) != needed or len(set(blocks)) != needed:
        return Reason.BAD_BLOCKS, f"{needed} different blocks are needed, {len(set(blocks))} of {len(blocks)} came"
    if min(blocks) < 0 or max(blocks) >= peer_blocks:
        return Reason.BAD_BLOCKS, f"block ids {min(blocks)} to {max(blocks)} in a cache of {peer_blocks} blocks"
    return None

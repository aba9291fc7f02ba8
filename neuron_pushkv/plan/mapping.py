"""Which two layouts can be mapped onto each other, and which of their regions correspond. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from neuron_pushkv.errors import LayoutError
from neuron_pushkv.layout import ROWS, Layout, Region
from neuron_pushkv.plan.shares import Heads


def check(ours: Layout, theirs: Layout) -> None:
    """Refuse two layouts of which no share of one can go into the other.

    Sizes of tensor and pipeline parallelism, block sizes of plain rows, orders and addresses may differ. Raises
    :class:`LayoutError`, which names both values and says what to do.
    """
    for whose, layout in (("our", ours), ("the peer's", theirs)):
        _check_alone(whose, layout)
    if ours.heads != theirs.heads:
        raise _unlike("number of KV heads", ours.heads, theirs.heads, "serve the same model")
    mine, others = [[group.window for group in layout.groups] for layout in (ours, theirs)]
    if mine != others:
        what, same = "KV cache groups", "serve the same model with the same attention settings"
        raise _unlike(what, _groups(ours), _groups(theirs), same)
    if ours.kernel != theirs.kernel:
        same = "use the same attention backend, on the same kind of processor"
        raise _unlike("KV kernel", ours.kernel, theirs.kernel, f"{same}, on both sides")
    here, there = _by_layer(ours), _by_layer(theirs)
    for layer, regions in here.items():
        if layer in there:
            _check_layer(ours, theirs, regions, there[layer])
    for index, (group, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        if group.block_size != other.block_size and (_opaque(ours, index) or _opaque(theirs, index)):
            what = f"block size of the KV kernel {ours.kernel}, which keeps tokens in an order of its own,"
            raise _unlike(what, group.block_size, other.block_size, "start both engines with the same --block-size")


def units(ours: Layout, theirs: Layout) -> tuple[int, ...]:
    """Per group: how many tokens move together, so that they lie in one block on either side."""
    return tuple(
        gcd(group.block_size, other.block_size) for group, other in zip(ours.groups, theirs.groups, strict=True)
    )


def matching(ours: Layout, theirs: Layout, heads: Heads) -> Iterator[tuple[int, int]]:
    """Indices of the regions that hold the same part of the same layer. ``heads`` must lie in both of them.

    Raises :class:`LayoutError` if they don't.
    """
    first, end = heads
    numbers = {region.name: index for index, region in enumerate(theirs.regions)}
    for index, region in enumerate(ours.regions):
        number = numbers.get(region.name)
        if number is None:
            continue
        for who, held in (("sender", region), ("receiver", theirs.regions[number])):
            if not held.first_head <= first < end <= held.end_head:
                raise LayoutError(
                    f"heads {first} to {end} of {region.name} are asked for where the {who} holds {held.first_head} to "
                    f"{held.end_head}; ask each rank for heads that both sides hold"
                )
        yield index, number


def described(layout: Layout) -> str:
    """For people: a layout's kernel, block sizes and, of its first region, heads and strides."""
    sizes = "+".join(str(group.block_size) for group in layout.groups)
    name = f"{layout.kernel} in blocks of {sizes} tokens"
    if not layout.regions:
        return name
    region = layout.regions[0]
    held = f"heads {region.first_head} to {region.end_head} of {layout.heads}"
    return f"{name} ({held}, {region.head_stride} bytes apart, tokens {region.token_stride})"


def _unlike(what: str, here: object, there: object, remedy: str) -> LayoutError:
    return LayoutError(f"{what} differs: {here} here, {there} there; {remedy}")


def _groups(layout: Layout) -> str:
    groups = [f"window of {group.window}" if group.window else "full attention" for group in layout.groups]
    return f"{len(groups)} ({', '.join(groups)})"


def _opaque(layout: Layout, group: int) -> bool:
    """Whether a block of that group can only be copied whole."""
    return layout.kernel != ROWS or any(not region.token_stride for region in layout.regions if region.group == group)


def _by_layer(layout: Layout) -> dict[str, list[Region]]:
    layers: dict[str, list[Region]] = {}
    for region in layout.regions:
        layers.setdefault(region.layer, []).append(region)
    return layers


def _check_layer(ours: Layout, theirs: Layout, here: list[Region], there: list[Region]) -> None:
    mine, others = [{region.part: region for region in regions} for regions in (here, there)]
    layer = here[0].layer
    if mine.keys() != others.keys():
        same = "use the same attention backend on both sides"
        raise _unlike(f"what is kept of {layer}", "+".join(sorted(mine)), "+".join(sorted(others)), same)
    for part, region in mine.items():
        other = others[part]
        if region.group != other.group:
            same = "serve the same model with the same attention settings"
            raise _unlike(f"KV cache group of {region.name}", region.group, other.group, same)
        sizes = ours.groups[region.group].block_size, theirs.groups[region.group].block_size
        if bool(region.token_stride) != bool(other.token_stride):
            orders = ["rows" if held.token_stride else "its kernel's own" for held in (region, other)]
            same = "use the same attention backend on both sides"
            raise _unlike(f"order of tokens in {region.name}", orders[0], orders[1], same)
        if region.row_bytes != other.row_bytes and (region.token_stride or sizes[0] == sizes[1]):
            what = f"bytes of {region.name} for a {'token' if region.token_stride else 'block'} and head"
            raise _unlike(what, region.row_bytes, other.row_bytes, "serve the same model with the same KV cache dtype")


def _check_alone(whose: str, layout: Layout) -> None:
    names = set()
    for region in layout.regions:
        if region.name in names:
            raise LayoutError(f"{whose} layout has {region.name} twice; describe each part of a layer once")
        names.add(region.name)
        if region.group >= len(layout.groups):
            raise LayoutError(
                f"{whose} layout puts {region.name} in group {region.group} of {len(layout.groups)}; describe it"
            )
        if region.end_head > layout.heads:
            raise LayoutError(
                f"{whose} layout gives {region.name} heads {region.first_head} to {region.end_head} of {layout.heads}; "
                f"number heads over the whole model"
            )
        if layout.span(region) >= 1 << 63:
            raise LayoutError(f"{whose} layout has {region.name} in more bytes than there are; check its strides")
        if region.heads > 1 and not region.head_stride:
            raise LayoutError(f"{whose} layout gives {region.name} {region.heads} heads in one place; give its stride")
        if region.part == "latent" and layout.heads != 1:
            raise LayoutError(
                f"{whose} layout has the latent {region.name} in a model of {layout.heads} KV heads; a model with both "
                f"can't be split over ranks, so describe it with one head"
            )

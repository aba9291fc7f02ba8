"""What two engines must have in common. Asked by ``pushkv doctor`` and by the router's ``/ready`` alike."""

from __future__ import annotations

from neuron_pushkv.doctor.findings import Finding, Id, error, fine, warning
from neuron_pushkv.errors import LayoutError
from neuron_pushkv.plan.mapping import check
from neuron_pushkv.wire import EngineStatus, Identity


def workers(name: str, status: EngineStatus) -> Finding:
    """Whether all of an engine's workers are up. ``name`` is what people call it."""
    about = {"engine_id": status.engine_id, "ranks": status.ranks, "kept_requests": status.kept_requests}
    if not status.ready:
        what = f"{name}: not all of its {status.ranks} workers are up"
        return error(Id.PEER_ENGINE, what, "wait until it has loaded, or look at its log", **about)
    return fine(Id.PEER_ENGINE, f"{name} is engine {status.engine_id}; its {status.ranks} workers are up", **about)


def providers(one: str, ours: str, other: str, theirs: str) -> Finding:
    """Whether the same kind of network is used on both sides, by the effective providers' names."""
    about = {"ours": ours, "theirs": theirs}
    if ours != theirs:
        what = f"{one} uses provider {ours or 'none'} and {other} {theirs or 'none'}"
        return error(Id.PEER_PROVIDER, what, "set the same one for both", **about)
    return fine(Id.PEER_PROVIDER, f"both use provider {ours}", **about)


def releases(one: str, ours: EngineStatus, other: str, theirs: EngineStatus) -> Finding:
    """Whether both run the same software."""
    about = {
        name: {"neuron-pushkv": side.release, "vllm": side.vllm, "library": side.library}
        for name, side in (("ours", ours), ("theirs", theirs))
    }
    if ours.release != theirs.release:
        what = f"{one} runs neuron-pushkv {ours.release or '(unknown)'} and {other} {theirs.release or '(unknown)'}"
        return warning(Id.PEER_VERSIONS, what, "install the same release on both sides", **about)
    if theirs.provider.startswith("efa") and ours.library and theirs.library and ours.library != theirs.library:
        what = f"{one} uses {ours.library} and {other} {theirs.library}: EFA may take writes apart into messages then"
        return warning(Id.PEER_VERSIONS, what, "install the same EFA software on both sides", **about)
    vllms = " and ".join(side.vllm or "none" for side in (ours, theirs))
    return fine(Id.PEER_VERSIONS, f"both run neuron-pushkv {ours.release}; vLLM is {vllms}", **about)


def caches(ours: Identity | None, theirs: Identity) -> Finding:
    """Whether KV of one rank's cache can be put into the other's. Without ours, only what theirs is like."""
    layout = theirs.layout
    if layout is None:
        what = f"engine {theirs.engine_id} describes no KV cache"
        return warning(Id.PEER_LAYOUT, what, "run the same release of neuron-pushkv on both sides")
    sizes = sorted({group.block_size for group in layout.groups})
    about = {
        "model": theirs.model,
        "kernel": layout.kernel,
        "block_sizes": sizes,
        "blocks": layout.blocks,
        "layers": len({region.layer for region in layout.regions}),
        "heads": layout.heads,
    }
    if ours is None or ours.layout is None:
        what = f"blocks of {' and '.join(map(str, sizes))} tokens, kept as '{layout.kernel}'; none here to compare with"
        return fine(Id.PEER_LAYOUT, what, **about)
    if ours.model != theirs.model:
        what = f"the models differ: {ours.model} here, {theirs.model} there"
        return error(Id.PEER_LAYOUT, what, "serve the same weights and dtype", **about)
    try:
        check(ours.layout, layout)
    except LayoutError as failure:
        return error(Id.PEER_LAYOUT, str(failure), "let both engines keep their KV alike", **about)
    return fine(Id.PEER_LAYOUT, f"the KV caches of {ours.engine_id} and {theirs.engine_id} fit each other", **about)

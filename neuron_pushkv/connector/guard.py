"""Keeps an exception in a scheduler-side hook from ending vLLM's engine core."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

HOOK_ERROR = "hook_error"
"""Event that is counted for every hook that raised."""

logger = logging.getLogger(__name__)


class Counting(Protocol):
    """Whatever owns guarded methods counts events by name."""

    def count(self, event: str) -> None:
        """One more of ``event``."""


Owner = TypeVar("Owner", bound=Counting)
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def guarded(
    safe: Callable[Concatenate[Owner, Arguments], Answer],
) -> Callable[[Callable[Concatenate[Owner, Arguments], Answer]], Callable[Concatenate[Owner, Arguments], Answer]]:
    """If the method raises: log it with its traceback, count it, and answer what ``safe`` answers to the same call.

    ``safe`` leaves the owner as if the hook had decided to compute locally; it must not raise.
    """

    def decorate(
        hook: Callable[Concatenate[Owner, Arguments], Answer],
    ) -> Callable[Concatenate[Owner, Arguments], Answer]:
        @functools.wraps(hook)
        def guarded_hook(owner: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            try:
                return hook(owner, *args, **kwargs)
            except Exception:
                logger.exception("%s failed; this request is computed locally", hook.__qualname__)
                owner.count(HOOK_ERROR)
                return safe(owner, *args, **kwargs)

        return guarded_hook

    return decorate

"""A decode engine's KV memory in tokens: what requests hold, and what is parked for a conversation's next turn."""

from __future__ import annotations

from collections.abc import Callable


class Memory:
    """Room for ``capacity`` tokens, or without end if None. Parked KV gives way, oldest first, unless it is pinned."""

    def __init__(self, capacity: int | None, changed: Callable[[int, int], None]) -> None:
        self._capacity = capacity
        self._changed = changed
        """Told how many tokens are held and how many parked after each change."""
        self._held = 0
        self._parked: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._parkings = 0
        self._stay: dict[int, int] = {}
        self.evicted = 0
        """Conversations whose parked KV had to give way."""

    def take(self, tokens: int, conversation: int) -> bool:
        """Room for a request, into which its conversation's parked KV goes. False, and nothing done, if there isn't."""
        own = self._parked.get(conversation, 0)
        if self._capacity is not None:
            firm = self._held + sum(self._parked[pinned] for pinned in self._pinned if pinned != conversation)
            if firm + tokens > self._capacity:
                return False
            for oldest in [each for each in self._parked if each not in self._pinned and each != conversation]:
                if self._held + sum(self._parked.values()) - own + tokens <= self._capacity:
                    break
                self._drop(oldest)
                self.evicted += 1
        self._drop(conversation)
        self._held += tokens
        self._tell()
        return True

    def release(self, tokens: int) -> None:
        """A request has ended."""
        self._held -= tokens
        self._tell()

    def park(self, tokens: int, conversation: int) -> int:
        """A request has ended and its KV stays. The number of this stay, for :meth:`expire`."""
        self._held -= tokens
        self._parked[conversation] = tokens
        self._parkings += 1
        self._stay[conversation] = self._parkings
        self._tell()
        return self._parkings

    def pin(self, conversation: int) -> bool:
        """The conversation goes on: nothing may take its KV. False if it is not there any more."""
        if conversation not in self._parked:
            return False
        self._pinned.add(conversation)
        return True

    def expire(self, conversation: int, stay: int) -> None:
        """Its time is up, unless the conversation has gone on since."""
        if self._stay.get(conversation) == stay and conversation not in self._pinned:
            self._drop(conversation)
            self._tell()

    def _drop(self, conversation: int) -> None:
        self._parked.pop(conversation, None)
        self._stay.pop(conversation, None)
        self._pinned.discard(conversation)

    def _tell(self) -> None:
        self._changed(self._held, sum(self._parked.values()))

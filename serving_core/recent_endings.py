"""What ended a short while ago, so that a repeated message gets the answer its first copy got. Bounded in time and number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentEndings(Generic[K, V]):
    """Maps a key to how it ended, for ``keep_s`` seconds and at most ``max_entries`` keys; the oldest go first."""

    def __init__(self, *, keep_s: float, max_entries: int) -> None:
        assert max_entries >= 1
        self._keep_s = keep_s
        self._max_entries = max_entries
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, key: K, ending: V, now: float) -> None:
        self._entries[key] = (now + self._keep_s, ending)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries or next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)

    def get(self, key: K, now: float) -> V | None:
        forget_at, ending = self._entries.get(key, (now, None))
        return ending if forget_at > now else None

"""Finds stop strings in a text that arrives in pieces. Knows neither tokens nor requests.

The outcome does not depend on where the pieces are cut: the match is the one that is complete first, and among those complete
at the same character the longest. Text is held back only while it is the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A request's stop strings (none empty), prepared once for all its answers. Immutable."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._patterns = tuple(_Pattern(stop) for stop in sorted(stops, key=len, reverse=True))

    def search(self) -> StopSearch:
        """A search of one text, from its beginning."""
        return StopSearch(self._patterns)


class StopSearch:
    """Looks for a request's stop strings in one text. A character costs amortised constant time a stop string."""

    def __init__(self, patterns: Sequence[_Pattern]) -> None:
        self._matchers = [_Matcher(pattern) for pattern in patterns]
        self._held = ""
        self.is_matched = False

    def push(self, text: str) -> str:
        """Take the next piece; returns what can be given out now. After a match that is the text before it, and the last."""
        assert not self.is_matched
        if not self._matchers:
            return text
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # Each matcher has to see every character, so all advance before any is asked.
            num_matched = [matcher.advance(character) for matcher in self._matchers]
            for matcher, length in zip(self._matchers, num_matched, strict=True):
                if length == len(matcher.pattern.stop):
                    self.is_matched = True
                    self._held = ""
                    return buffer[: end - length]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """The text still held back, which no more text can complete to a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth, Morris and Pratt's table of one stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.fallback = _fallback_table(stop)


class _Matcher:
    """Their automaton: ``num_matched`` is the longest beginning of the stop string that the text ends with."""

    def __init__(self, pattern: _Pattern) -> None:
        self.pattern = pattern
        self.num_matched = 0

    def advance(self, character: str) -> int:
        stop, fallback = self.pattern.stop, self.pattern.fallback
        length = self.num_matched
        while length and stop[length] != character:
            length = fallback[length]
        if stop[length] == character:
            length += 1
        self.num_matched = length
        return length


def _fallback_table(stop: str) -> list[int]:
    """Entry i: the longest proper beginning of ``stop[:i]`` that is also its end."""
    table = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = table[length]
        if stop[length] == character:
            length += 1
        table.append(length)
    return table

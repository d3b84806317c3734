from __future__ import annotations

from serving_core.recent_endings import RecentEndings


def test_an_ending_is_known_for_its_time_and_no_longer() -> None:
    endings: RecentEndings[str, int] = RecentEndings(keep_s=6.0, max_entries=8)
    endings.remember("a", 1, now=0.0)
    assert endings.get("a", now=5.9) == 1
    assert endings.get("a", now=6.0) is None
    assert endings.get("b", now=0.0) is None


def test_what_is_over_makes_room_for_what_comes() -> None:
    endings: RecentEndings[str, int] = RecentEndings(keep_s=6.0, max_entries=8)
    endings.remember("a", 1, now=0.0)
    endings.remember("b", 2, now=7.0)
    assert len(endings) == 1


def test_the_oldest_goes_when_there_are_too_many() -> None:
    endings: RecentEndings[str, int] = RecentEndings(keep_s=6.0, max_entries=2)
    for index, key in enumerate("abac"):
        endings.remember(key, index, now=float(index))
    assert endings.get("b", now=3.0) is None
    assert endings.get("a", now=3.0) == 2
    assert endings.get("c", now=3.0) == 3

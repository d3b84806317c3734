from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What is given out, piece by piece, up to a match or with what is flushed at the end."""
    finder = StopStrings(stops).search()
    out: list[str] = []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.is_matched:
            return out, True
    return [*out, finder.finish()], False


def brute_force(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


@st.composite
def cut_text(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text("abc", max_size=4), max_size=12))


@given(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), cut_text())
def test_the_outcome_is_that_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    out, is_matched = run(stops, pieces)
    assert ("".join(out), is_matched) == brute_force(stops, "".join(pieces))


def test_searches_know_nothing_of_one_another() -> None:
    stops = StopStrings(["ab"])
    first, second = stops.search(), stops.search()
    assert (first.push("xa"), second.push("b")) == ("x", "b")
    assert first.push("b") == ""
    assert (first.is_matched, second.is_matched) == (True, False)


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4), cut_text())
def test_only_the_beginning_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    finder = StopStrings(stops).search()
    taken = given_out = ""
    for piece in pieces:
        taken += piece
        given_out += finder.push(piece)
        if finder.is_matched:
            return
        held = taken.removeprefix(given_out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "GHI", "JKL"], ["ABC", "", "", ""]),
        (["DEFGHIJ"], ["ABC", "DEF", "X"], ["ABC", "", "DEFX", ""]),
        (["seZZZ"], ["plea", "se"], ["plea", "", "se"]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),
        (["b", "abc"], ["a", "bc"], ["", "a"]),
        (["Human:", "\n\nHuman:"], ["ok\n", "\nHuman", ": hi"], ["ok", "", ""]),
        ([], ["a", "b"], ["a", "b", ""]),
        (["🙂"], ["a🙂b"], ["a"]),
    ],
)
def test_examples(stops: list[str], pieces: list[str], expected: list[str]) -> None:
    assert run(stops, pieces)[0] == expected

"""Known answers, published by the algorithm's authors with their Random123 library (kat_vectors, philox4x32 with 10 rounds)."""

from __future__ import annotations

import pytest

from llm_engine.philox import Words, philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter: Words, key: tuple[int, int], expected: Words) -> None:
    assert philox4x32(counter, key) == expected


def test_a_uniform_number_takes_53_bits_of_the_first_two_words() -> None:
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniform(seed=0, output_index=0, choice_index=0) == expected


def test_every_part_of_the_place_matters() -> None:
    places = [(seed, index, choice) for seed in (0, 1, 2**32, 2**64 - 1) for index in range(50) for choice in range(4)]
    numbers = {uniform(seed=seed, output_index=index, choice_index=choice) for seed, index, choice in places}
    assert len(numbers) == len(places)
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_numbers_are_spread_evenly() -> None:
    numbers = [uniform(seed=7, output_index=index, choice_index=0) for index in range(4000)]
    counts = [sum(low <= number * 10 < low + 1 for number in numbers) for low in range(10)]
    assert all(330 < count < 470 for count in counts)

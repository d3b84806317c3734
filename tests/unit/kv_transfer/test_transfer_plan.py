"""Whatever the page sizes and heads at either end, every byte of a destination page comes exactly once, and from its place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.transfer_plan import TransferPlan
from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVDType, KVPageLayout

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=3, head_dim=8, page_size=4, dtype=KVDType.BFLOAT16)
PAGE_SIZES = (1, 3, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt, its ranks at the sender and one rank at the receiver."""

    source: KVPageLayout
    destination: KVPageLayout
    num_tokens: int
    sources_heads: tuple[range, ...]
    destination_heads: range
    max_segment_bytes: int

    @property
    def plans(self) -> list[TransferPlan]:
        """Of the ranks that have something to give."""
        return [
            TransferPlan.between_heads(
                self.source.with_num_kv_heads(len(heads)),
                heads,
                self.destination.with_num_kv_heads(len(self.destination_heads)),
                self.destination_heads,
            )
            for heads in self.sources_heads
            if set(heads) & set(self.destination_heads)
        ]

    @property
    def row_bytes(self) -> int:
        """Of one head's numbers in a slot, which are more than its scale."""
        return self.source.head_dim * self.source.dtype.num_bytes

    def prompt(self) -> list[NDArray[np.uint32]]:
        """Numbers and, where there are, scales in words of four bytes, each [num_layers, 2, num_tokens, num heads of the model,
        num words of a row]: no word twice, no zero."""
        rows = (self.source.num_layers, 2, self.num_tokens, self.sources_heads[-1].stop)
        num_number_words = self.row_bytes // 4
        num_words = num_number_words + int(self.source.dtype.has_scales)
        words = np.arange(1, np.prod(rows) * num_words + 1, dtype=np.uint32).reshape(*rows, num_words)
        return [part for part in np.split(words, [num_number_words], axis=-1) if part.size]


def pages_of(prompt: Sequence[NDArray[np.uint32]], page_size: int, heads: range) -> list[bytes]:
    """The reference: the prompt's pages, in each one array after another, [num_layers, 2, page_size, num heads, num words],
    with zeros behind the prompt's end."""
    num_tokens = prompt[0].shape[2]
    num_pages = -(-num_tokens // page_size)
    padding = ((0, 0), (0, 0), (0, num_pages * page_size - num_tokens), (0, 0), (0, 0))
    padded = [np.pad(part[:, :, :, heads.start : heads.stop], padding) for part in prompt]
    slots = [slice(number * page_size, (number + 1) * page_size) for number in range(num_pages)]
    return [b"".join(part[:, :, of_page].tobytes() for part in padded) for of_page in slots]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_heads = draw(st.integers(1, 6))
    cuts = sorted(draw(st.sets(st.integers(1, num_heads - 1)))) if num_heads > 1 else []
    bounds = [0, *cuts, num_heads]
    first = draw(st.integers(0, num_heads - 1))
    layout = KVPageLayout(
        num_layers=draw(st.integers(1, 2)),
        num_kv_heads=num_heads,
        head_dim=4 * draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        dtype=draw(st.sampled_from(KVDType)),
    )
    return Case(
        source=layout,
        destination=replace(layout, page_size=draw(st.sampled_from(PAGE_SIZES))),
        num_tokens=draw(st.integers(1, 70)),
        sources_heads=tuple(range(start, stop) for start, stop in itertools.pairwise(bounds)),
        destination_heads=range(first, draw(st.integers(first + 1, num_heads))),
        max_segment_bytes=draw(st.integers(1, 4096)),
    )


@given(cases())
def test_every_byte_comes_once_and_from_its_place(case: Case) -> None:
    expected = pages_of(case.prompt(), case.destination.page_size, case.destination_heads)
    for ordinal, reference in enumerate(expected):
        page = np.zeros(len(reference), dtype=np.uint8)
        num_writes = np.zeros(len(reference), dtype=np.uint8)
        for plan in case.plans:
            pages = pages_of(case.prompt(), case.source.page_size, plan.source_heads)
            payload = np.frombuffer(plan.payload(ordinal, case.num_tokens, ReadOnly(pages)), dtype=np.uint8)
            num_carried = 0
            for piece in plan.pieces(case.max_segment_bytes):
                assert piece.start == num_carried, "the payload is cut without a gap"
                num_carried += piece.num_bytes
                places = places_of(
                    piece.offset,
                    piece.num_bytes,
                    piece.stride.run_bytes if piece.stride else piece.num_bytes,
                    piece.stride.step_bytes if piece.stride else 0,
                )
                page[places] = payload[piece.start : piece.start + piece.num_bytes]
                np.add.at(num_writes, places, 1)
                assert piece.num_bytes <= max(case.max_segment_bytes, len(plan.heads) * case.row_bytes)
            assert num_carried == len(payload) == plan.num_bytes_per_page
        assert (num_writes == 1).all()
        assert page.tobytes() == reference


class ReadOnly:
    """A source's pages, as its pool gives them."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def __call__(self, ordinal: int) -> memoryview:
        return memoryview(self._pages[ordinal])


def places_of(offset: int, num_bytes: int, run_bytes: int, step_bytes: int) -> NDArray[np.intp]:
    starts = offset + step_bytes * np.arange(num_bytes // run_bytes)
    return (starts[:, None] + np.arange(run_bytes)).ravel()


@given(st.sampled_from(PAGE_SIZES), st.sampled_from(PAGE_SIZES), st.integers(1, 100))
def test_a_page_is_ready_as_soon_as_all_of_its_tokens_are(source_size: int, size: int, num_tokens: int) -> None:
    source, destination = replace(LAYOUT, page_size=source_size), replace(LAYOUT, page_size=size)
    plan = TransferPlan.between(source, destination)
    for num_source_pages in range(source.num_pages_for(num_tokens) + 1):
        num_ready = plan.num_ready_pages(num_source_pages, num_tokens)
        needed = [
            max(span.source_ordinal for span in plan.spans(o, num_tokens)) for o in range(destination.num_pages_for(num_tokens))
        ]
        assert num_ready == sum(last < num_source_pages for last in needed)


def test_three_heads_on_two_ranks() -> None:
    # Two tokens a page, two bytes a head: a page is [4 planes, 2 slots, 3 heads, 2 bytes].
    layout = KVPageLayout(num_layers=2, num_kv_heads=3, head_dim=1, page_size=2, dtype=KVDType.BFLOAT16)
    one = TransferPlan.between_heads(layout.with_num_kv_heads(2), range(2), layout, range(3))
    other = TransferPlan.between_heads(layout.with_num_kv_heads(1), range(2, 3), layout, range(3))
    assert [(p.offset, p.num_bytes, p.stride.run_bytes, p.stride.step_bytes) for p in one.pieces(12) if p.stride] == [
        (0, 12, 4, 6),
        (18, 12, 4, 6),
        (36, 8, 4, 6),
    ]
    assert [(p.offset, p.num_bytes, p.stride.run_bytes, p.stride.step_bytes) for p in other.pieces(100) if p.stride] == [
        (4, 16, 2, 6)
    ]
    assert one.num_bytes_per_page + other.num_bytes_per_page == layout.page_bytes


def test_scales_are_a_part_of_their_own_behind_the_numbers() -> None:
    # Two tokens a page, two numbers of a byte and a scale a head: [4 planes, 2 slots, 3 heads] of 2 bytes, then of 4.
    layout = KVPageLayout(num_layers=2, num_kv_heads=3, head_dim=2, page_size=2, dtype=KVDType.INT8)
    plan = TransferPlan.between_heads(layout.with_num_kv_heads(1), range(1, 2), layout, range(3))
    pieces = [(p.start, p.num_bytes, p.offset, p.stride.run_bytes, p.stride.step_bytes) for p in plan.pieces(100) if p.stride]
    assert pieces == [(0, 16, 2, 2, 6), (16, 32, 48 + 4, 4, 12)]
    assert plan.num_bytes_per_page == 16 + 32


@given(st.integers(1, 2 * LAYOUT.page_bytes))
def test_equal_pages_are_sent_as_they_are(max_segment_bytes: int) -> None:
    plan = TransferPlan.between(LAYOUT, LAYOUT)
    memory = memoryview(bytes(LAYOUT.page_bytes))
    assert plan.payload(0, 3, lambda ordinal: memory) is memory
    pieces = plan.pieces(max_segment_bytes)
    assert all(piece.stride is None and piece.start == piece.offset for piece in pieces)
    assert len(pieces) == -(-LAYOUT.page_bytes // max_segment_bytes)


def test_bytes_behind_the_prompt_are_zeros_whatever_the_source_holds_there() -> None:
    plan = TransferPlan.between(LAYOUT, replace(LAYOUT, page_size=8))
    payload = np.frombuffer(plan.payload(0, 5, lambda ordinal: memoryview(b"\xff" * LAYOUT.page_bytes)), dtype=np.uint8)
    by_slot = payload.reshape(4, 8, -1)
    assert (by_slot[:, :5] == 255).all()
    assert not by_slot[:, 5:].any()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(LAYOUT, num_layers=3), "num_layers is 2 at the sender and 3 at the receiver"),
        (replace(LAYOUT, num_kv_heads=1), "num_kv_heads is 3 at the sender and 1 at the receiver"),
        (replace(LAYOUT, head_dim=16), "head_dim is 8 at the sender and 16 at the receiver"),
        (replace(LAYOUT, page_size=2**31), "the receiver's pages have 412316860416 bytes, above 268435456"),
        (replace(LAYOUT, dtype=KVDType.FLOAT32, page_size=8), "dtype is bfloat16 at the sender and float32 at the receiver"),
        (replace(LAYOUT, dtype=KVDType.INT8), "dtype is bfloat16 at the sender and int8 at the receiver"),
    ],
)
def test_layouts_that_no_plan_covers_are_refused_in_one_sentence(other: KVPageLayout, words: str) -> None:
    with pytest.raises(Refused) as refused:
        TransferPlan.between(LAYOUT, other)
    assert refused.value.code is RefusalCode.LAYOUT_MISMATCH
    assert str(refused.value) == f"No transfer plan covers these page layouts: {words}."


def test_ranks_without_a_common_head_are_refused() -> None:
    rank = LAYOUT.with_num_kv_heads(1)
    with pytest.raises(Refused, match="holds heads 0 to 0 and the receiver 1 to 1") as refused:
        TransferPlan.between_heads(rank, range(1), rank, range(1, 2))
    assert refused.value.code is RefusalCode.LAYOUT_MISMATCH
    with pytest.raises(Refused, match="head_dim"):
        TransferPlan.between_heads(rank, range(1), replace(LAYOUT, head_dim=4), range(3))

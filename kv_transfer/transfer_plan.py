"""How a prompt's pages at the sender become pages at the receiver. Made for a pair of layouts, applied page by page; it knows
neither pools nor transports.

The unit is the destination page: it is sent once, as soon as all of its tokens are computed, whatever the number of source
pages they lie in. All of its bytes belong to the plan, in the last page also those behind the prompt's last token, which are
zeros: so every byte of a page that decode reads was written for this sequence.

A rank of a tensor-parallel worker holds an interval of the model's key-value heads. Several sources then fill one destination
page, each the heads that both ends hold, and these lie in the page as runs at equal distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kv_transfer.page_part import PagePart, parts_of_page
from serving_core.byte_stride import ByteStride
from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVPageLayout

MAX_PAGE_BYTES = 256 << 20
"""Of a destination page: the number comes from a peer, and a page is assembled in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePiece:
    """What one segment carries: the ``num_bytes`` bytes of a page's payload from ``start`` on, which belong ``offset`` bytes
    from the destination page's start, in one run or, with a ``stride``, in several."""

    start: int
    num_bytes: int
    offset: int
    stride: ByteStride | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpan:
    """``num_slots`` consecutive tokens, from a slot of the source page with this ordinal to one of the destination page."""

    source_ordinal: int
    source_slot: int
    destination_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The way from ``source`` to ``destination``. ``source_heads`` and ``destination_heads`` are the intervals of the model's
    key-value heads that their pages hold.

    Invariant: of all sources whose intervals together hold each destination head once, the pieces cover every byte of a
    destination page exactly once.
    """

    source: KVPageLayout
    destination: KVPageLayout
    source_heads: range
    destination_heads: range

    def __post_init__(self) -> None:
        for layout, heads in ((self.source, self.source_heads), (self.destination, self.destination_heads)):
            assert heads.step == 1
            assert len(heads) == layout.num_kv_heads
        assert self.heads

    @classmethod
    def between(cls, source: KVPageLayout, destination: KVPageLayout) -> TransferPlan:
        """The plan for two workers that each hold all heads.

        Raises ``Refused`` (LAYOUT_MISMATCH) for a pair that no plan covers.
        """
        if obstacle := _obstacle(source, destination):
            raise _no_plan(obstacle)
        return cls.between_heads(source, range(source.num_kv_heads), destination, range(destination.num_kv_heads))

    @classmethod
    def between_heads(
        cls, source: KVPageLayout, source_heads: range, destination: KVPageLayout, destination_heads: range
    ) -> TransferPlan:
        """The plan for two ranks that hold these intervals of the model's key-value heads.

        Raises ``Refused`` (LAYOUT_MISMATCH) for a pair that no plan covers.
        """
        if obstacle := _obstacle(source, destination.with_num_kv_heads(source.num_kv_heads)):
            raise _no_plan(obstacle)
        if destination.page_bytes > MAX_PAGE_BYTES:
            raise _no_plan(f"the receiver's pages have {destination.page_bytes} bytes, above {MAX_PAGE_BYTES}")
        if not _common(source_heads, destination_heads):
            raise _no_plan(f"the sender holds heads {_words(source_heads)} and the receiver {_words(destination_heads)}")
        return cls(source=source, destination=destination, source_heads=source_heads, destination_heads=destination_heads)

    @property
    def heads(self) -> range:
        """Those that both ends hold."""
        return _common(self.source_heads, self.destination_heads)

    @property
    def num_bytes_per_page(self) -> int:
        """Bytes that this source gives to each destination page."""
        return self.destination.page_bytes // self.destination.num_kv_heads * len(self.heads)

    def num_ready_pages(self, num_source_pages: int, num_tokens: int) -> int:
        """How many destination pages are complete, from ordinal 0, once so many source pages are, of a prompt of
        ``num_tokens`` tokens. A prompt's last page, in part, is complete with its last token."""
        num_ready_tokens = min(num_source_pages * self.source.page_size, num_tokens)
        if num_ready_tokens == num_tokens:
            return self.destination.num_pages_for(num_tokens)
        return num_ready_tokens // self.destination.page_size

    def spans(self, ordinal: int, num_tokens: int) -> Iterator[SlotSpan]:
        """Where the tokens of the destination page ``ordinal`` come from, in order, for a prompt of ``num_tokens`` tokens."""
        first = ordinal * self.destination.page_size
        stop = min(first + self.destination.page_size, num_tokens)
        position = first
        while position < stop:
            source_ordinal, source_slot = divmod(position, self.source.page_size)
            num_slots = min(self.source.page_size - source_slot, stop - position)
            yield SlotSpan(
                source_ordinal=source_ordinal,
                source_slot=source_slot,
                destination_slot=position - first,
                num_slots=num_slots,
            )
            position += num_slots

    def payload(self, ordinal: int, num_tokens: int, source_page: Callable[[int], memoryview]) -> memoryview:
        """The bytes of this source for the destination page ``ordinal``, as ``pieces`` cuts them: the page's parts one after
        another, each [num_planes, num_slots, num common heads, item_bytes].

        ``source_page`` gives the bytes of a source page by its ordinal. Between equal pages the payload is that memory itself,
        with what the source holds behind the prompt's last token: zeros, since an engine clears each page that it enters.
        """
        if self._is_copy:
            return source_page(ordinal)
        payload = np.zeros(self.num_bytes_per_page, dtype=np.uint8)
        targets = self._payload_parts()
        ours = slice(self.heads.start - self.source_heads.start, self.heads.stop - self.source_heads.start)
        for span in self.spans(ordinal, num_tokens):
            page = np.frombuffer(source_page(span.source_ordinal), dtype=np.uint8)
            source_slots = slice(span.source_slot, span.source_slot + span.num_slots)
            target_slots = slice(span.destination_slot, span.destination_slot + span.num_slots)
            for part, target in zip(parts_of_page(self.source), targets, strict=True):
                target.view(payload)[:, target_slots] = part.view(page)[:, source_slots, ours]
        return payload.data

    def pieces(self, max_segment_bytes: int) -> tuple[PagePiece, ...]:
        """The payload of one page cut into segments of at most ``max_segment_bytes`` bytes, but at least one run each."""
        assert max_segment_bytes >= 1
        if len(self.heads) == self.destination.num_kv_heads:
            return tuple(_cut(self.num_bytes_per_page, max_segment_bytes))
        parts = zip(parts_of_page(self.destination), self._payload_parts(), strict=True)
        return tuple(piece for part, given in parts for piece in self._cut_strided(part, given, max_segment_bytes))

    def _cut_strided(self, part: PagePart, given: PagePart, max_segment_bytes: int) -> Iterator[PagePiece]:
        stride = ByteStride(run_bytes=given.num_heads * part.item_bytes, step_bytes=part.num_heads * part.item_bytes)
        first = part.offset + (self.heads.start - self.destination_heads.start) * part.item_bytes
        piece_bytes = max(1, max_segment_bytes // stride.run_bytes) * stride.run_bytes
        for start in range(0, given.num_bytes, piece_bytes):
            yield PagePiece(
                start=given.offset + start,
                num_bytes=min(piece_bytes, given.num_bytes - start),
                offset=first + start // stride.run_bytes * stride.step_bytes,
                stride=stride,
            )

    def _payload_parts(self) -> tuple[PagePart, ...]:
        """A destination page's parts with the common heads alone: those of the payload."""
        return parts_of_page(self.destination.with_num_kv_heads(len(self.heads)))

    @property
    def _is_copy(self) -> bool:
        return self.source == self.destination and self.source_heads == self.destination_heads


def _cut(num_bytes: int, max_segment_bytes: int) -> Iterator[PagePiece]:
    for start in range(0, num_bytes, max_segment_bytes):
        yield PagePiece(start=start, num_bytes=min(max_segment_bytes, num_bytes - start), offset=start, stride=None)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _words(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"


def _obstacle(source: KVPageLayout, destination: KVPageLayout) -> str:
    return source.obstacle_to(destination, own_place="at the sender", other_place="at the receiver")


def _no_plan(difference: str) -> Refused:
    return Refused(RefusalCode.LAYOUT_MISMATCH, f"No transfer plan covers these page layouts: {difference}.")

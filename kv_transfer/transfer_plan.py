"""Which bytes of a source page become which bytes of a destination page. Computed once per pair of layouts, applied per page;
it knows neither pools nor transports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serving_core.errors import RefusalCode, Refused
from serving_core.kv_page_layout import KVPageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRun:
    """``num_bytes`` consecutive bytes, from ``source_offset`` in a source page to ``destination_offset`` in a destination
    page."""

    source_offset: int
    destination_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """How one page is copied from ``source`` to ``destination``.

    Invariants: ``runs`` are sorted by ``destination_offset``, cover every byte of a destination page exactly once, and read
    inside a source page.
    """

    source: KVPageLayout
    destination: KVPageLayout
    runs: tuple[ByteRun, ...]

    def __post_init__(self) -> None:
        covered = 0
        for run in self.runs:
            assert run.num_bytes >= 1
            assert run.destination_offset == covered, "every destination byte is covered exactly once"
            assert 0 <= run.source_offset <= self.source.page_bytes - run.num_bytes
            covered += run.num_bytes
        assert covered == self.destination.page_bytes, "every destination byte is covered exactly once"

    @classmethod
    def between(cls, source: KVPageLayout, destination: KVPageLayout) -> TransferPlan:
        """The plan for this pair of layouts. Equal layouts are copied byte for byte.

        Raises ``Refused`` (LAYOUT_MISMATCH) for a pair that no plan covers.
        """
        if source != destination:
            differences = source.differences(destination, own_place="at the sender", other_place="at the receiver")
            raise Refused(
                RefusalCode.LAYOUT_MISMATCH, f"Pages can only be handed over between equal page layouts, but {differences}."
            )
        whole_page = ByteRun(source_offset=0, destination_offset=0, num_bytes=source.page_bytes)
        return cls(source=source, destination=destination, runs=(whole_page,))

    def cut(self, max_segment_bytes: int) -> tuple[ByteRun, ...]:
        """The runs in order, cut into pieces of at most ``max_segment_bytes``: what one page is sent as."""
        assert max_segment_bytes >= 1
        return tuple(piece for run in self.runs for piece in _cut_run(run, max_segment_bytes))


def _cut_run(run: ByteRun, max_segment_bytes: int) -> Iterator[ByteRun]:
    for start in range(0, run.num_bytes, max_segment_bytes):
        yield ByteRun(
            source_offset=run.source_offset + start,
            destination_offset=run.destination_offset + start,
            num_bytes=min(max_segment_bytes, run.num_bytes - start),
        )

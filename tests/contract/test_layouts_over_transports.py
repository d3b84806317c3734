"""Hand-offs over every transport between pages that differ in size, and from the ranks of a tensor-parallel worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer.outgoing_handoff import OutgoingHandoff
from kv_transfer.transfer_plan import TransferPlan
from serving_core.clock import MonotonicClock
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from tests.contract.page_path import PagePath, make_ticket, until

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=3, head_dim=4, page_size=16, dtype=KVDType.FLOAT32)
WITH_SCALES = replace(LAYOUT, head_dim=16, dtype=KVDType.INT8)  # numbers of a head have as many bytes as those of LAYOUT


def pages_of(layout: KVPageLayout, num_tokens: int, heads: range, first_page: int = 0) -> list[bytes]:
    """Pages of a prompt in which no four bytes come twice, from ``first_page`` on, with zeros behind its end."""
    num_pages = layout.num_pages_for(num_tokens)
    shape = (layout.num_layers, 2, num_tokens, LAYOUT.num_kv_heads, 4 + int(layout.dtype.has_scales))
    prompt: NDArray[np.uint32] = np.arange(1, np.prod(shape) + 1, dtype=np.uint32).reshape(shape)
    padded = np.pad(prompt, ((0, 0), (0, 0), (0, num_pages * layout.page_size - num_tokens), (0, 0), (0, 0)))
    by_page = padded[:, :, :, heads.start : heads.stop].reshape(
        layout.num_layers, 2, num_pages, layout.page_size, len(heads), -1
    )
    pages = [by_page[:, :, ordinal] for ordinal in range(first_page, num_pages)]
    return [page[..., :4].tobytes() + page[..., 4:].tobytes() for page in pages]


class ListSource:
    """A pool whose page ids are the prompt's ordinals."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def page_memory(self, page_id: PageId) -> memoryview:
        return memoryview(self._pages[page_id])


class Acknowledging:
    """A committer that keeps the commits and acknowledges each."""

    def __init__(self) -> None:
        self.commits: list[HandoffCommit] = []

    async def commit(self, commit: HandoffCommit) -> None:
        self.commits.append(commit)


async def until_received(path: PagePath, ticket: TransferTicket, num_bytes: int) -> None:
    await until(lambda: path.sink.num_bytes_received(ticket) == num_bytes)


@pytest.mark.parametrize("num_tokens", [63, 64, 65])
@pytest.mark.parametrize(
    ("source_size", "size", "num_cached_tokens"),
    [(8, 32, 0), (16, 32, 32), (32, 8, 40), (32, 16, 0), (16, 16, 16), (24, 16, 16)],
)
async def test_pages_of_any_size_arrive(
    path: PagePath, source_size: int, size: int, num_tokens: int, num_cached_tokens: int
) -> None:
    source, destination = replace(LAYOUT, page_size=source_size), replace(LAYOUT, page_size=size)
    plan = TransferPlan.between(source, destination)
    ticket = make_ticket(
        address=path.address, num_prompt_tokens=num_tokens, num_cached_tokens=num_cached_tokens, layout=destination
    )
    path.sink.reserve(ticket)
    heads = range(LAYOUT.num_kv_heads)
    pages = pages_of(source, num_tokens, heads)
    committer = Acknowledging()
    handoff = OutgoingHandoff(
        ticket=ticket,
        plan=plan,
        source=ListSource(pages),
        transport=path.transport,
        committer=committer,
        clock=MonotonicClock(),
        max_segment_bytes=700,
    )
    run = asyncio.create_task(handoff.run())
    # 1. Source pages come one by one; what they complete at the receiver goes at once.
    for ordinal in range(num_cached_tokens // source_size, len(pages)):
        handoff.offer([(ordinal, PageId(ordinal))])
        num_ready = plan.num_ready_pages(ordinal + 1, num_tokens) - ticket.first_page
        await until_received(path, ticket, num_ready * destination.page_bytes)
    # 2. The commit claims the receiver's bytes.
    handoff.finish(42, None)
    await run
    assert path.sink.is_complete(ticket)
    assert [commit.num_bytes_sent for commit in committer.commits] == [path.sink.num_bytes_received(ticket)]
    expected = pages_of(destination, num_tokens, heads, ticket.first_page)
    assert [bytes(page) for page in path.sink.pages[ticket.reservation_id].values()] == expected


@pytest.mark.parametrize("layout", [LAYOUT, WITH_SCALES], ids=lambda layout: layout.dtype.value)
async def test_two_ranks_fill_the_pages_of_one_receiver(path: PagePath, layout: KVPageLayout) -> None:
    destination = replace(layout, page_size=32)
    ticket = make_ticket(address=path.address, num_prompt_tokens=65, layout=destination)
    path.sink.reserve(ticket)
    for heads in (range(2), range(2, 3)):
        assert not path.sink.is_complete(ticket)
        source = layout.with_num_kv_heads(len(heads))
        pages = pages_of(source, 65, heads)
        handoff = OutgoingHandoff(
            ticket=ticket,
            plan=TransferPlan.between_heads(source, heads, destination, range(3)),
            source=ListSource(pages),
            transport=path.transport,
            committer=Acknowledging(),
            clock=MonotonicClock(),
            max_segment_bytes=700,
        )
        handoff.offer([(ordinal, PageId(ordinal)) for ordinal in range(len(pages))])
        handoff.finish(42, None)
        await handoff.run()
    assert path.sink.is_complete(ticket)
    assert [bytes(page) for page in path.sink.pages[ticket.reservation_id].values()] == pages_of(destination, 65, range(3))

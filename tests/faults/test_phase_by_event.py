"""Every event in every phase of a request, between real processes over links with faults: what the table in docs/reliability.md
says. A run of all tests takes some cells; ``make faults`` takes them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import httpx
import pytest
import pytest_asyncio

from serving_core.worker_status import PhaseName
from tests.e2e.streams import Stream, run_generation
from tests.faults.cluster import ROUTER, STEP_S, FaultyCluster, is_at_rest, num_in_line, until, wait_ready
from tests.faults.network import Network, why_no_network
from tests.tiny_model import write_tiny_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())]

PREFILL, DECODE = "prefill-0", "decode-0"
LEASE_S = 2.0
PROMPT = [3 + (7 * index) % 256 for index in range(390)]  # 25 chunks and as many pages
NUM_TOKENS = 40
CHUNK_REACHED = 6
OUTAGE_S = 3.0
"""Longer than a ping may stay unanswered."""
MAX_HANG_S = 5.0
"""How much later than undisturbed a stream may end, counted from when the worker or the link is back."""
ABORT_S = 0.5
"""A release over links that work: between two steps, at most."""
FREED_S = LEASE_S + 1.0
"""Whatever was lost: a lease, and a step."""
SLOW_RATE = "1mbit"
"""At which the prompt's 200 KB take twice as long as their computation."""
LONG_STEP_S = 0.5


class Phase(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    COMMITTED = "committed"
    DECODING = "decoding"


class Event(StrEnum):
    ABORT = "abort"
    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    LINK_DOWN = "link-down"
    LINK_STALL = "link-stall"
    PREFILL_DOWN = "prefill-down"
    PREFILL_STALL = "prefill-stall"
    DECODE_DOWN = "decode-down"
    DECODE_STALL = "decode-stall"
    SLOW_PEER = "slow-peer"


_HANDOFF_LINK = (PREFILL, DECODE)
_LINKS = {
    Event.LINK_DOWN: (_HANDOFF_LINK,),
    Event.LINK_STALL: (_HANDOFF_LINK,),
    Event.PREFILL_DOWN: (_HANDOFF_LINK, (PREFILL, ROUTER)),
    Event.PREFILL_STALL: (_HANDOFF_LINK, (PREFILL, ROUTER)),
    Event.DECODE_DOWN: (_HANDOFF_LINK, (DECODE, ROUTER)),
    Event.DECODE_STALL: (_HANDOFF_LINK, (DECODE, ROUTER)),
}
_STALLS = {Event.LINK_STALL, Event.PREFILL_STALL, Event.DECODE_STALL}
_VICTIMS = {Event.KILL_PREFILL: PREFILL, Event.KILL_DECODE: DECODE}

IN_EVERY_RUN = {
    (Phase.QUEUED, Event.KILL_PREFILL),
    (Phase.PREFILLING, Event.LINK_DOWN),
    (Phase.TRANSFERRING, Event.ABORT),
    (Phase.TRANSFERRING, Event.LINK_STALL),
    (Phase.COMMITTED, Event.DECODE_DOWN),
    (Phase.DECODING, Event.KILL_DECODE),
}
CELLS = [
    pytest.param(phase, event, id=f"{phase}-{event}", marks=() if (phase, event) in IN_EVERY_RUN else pytest.mark.slow)
    for phase in Phase
    for event in Event
]

Asked: TypeAlias = tuple[Stream, "asyncio.Task[Stream]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What the request is answered when nothing happens, and in what time."""

    token_ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A cluster at rest, and a client of it."""

    cluster: FaultyCluster
    client: httpx.AsyncClient
    undisturbed: Undisturbed

    def num_steps(self, name: str) -> int:
        """Steps that the worker's engine has begun."""
        return self.cluster.paces[name].num_begun.value

    async def reach(self, phase: Phase) -> list[Asked]:
        """Ask, and return when the last request asked is in ``phase``: by what can be seen from outside, not by the clock."""
        prefill_before, decode_before = self.num_steps(PREFILL), self.num_steps(DECODE)
        if phase is Phase.TRANSFERRING:
            self.cluster.network.slow(PREFILL, DECODE, SLOW_RATE)
        if phase is Phase.COMMITTED:
            self.cluster.paces[DECODE].step_s.value = LONG_STEP_S
        asked = [ask(self.client)]
        stream, _ = asked[0]
        match phase:
            case Phase.QUEUED:
                await until(lambda: self.num_steps(PREFILL) > prefill_before, MAX_HANG_S, "the request before it")
                asked.append(ask(self.client))
                await until(lambda: num_in_line(self.client), MAX_HANG_S, "the line")
            case Phase.PREFILLING:
                num_steps = prefill_before + CHUNK_REACHED
                await until(lambda: self.num_steps(PREFILL) >= num_steps, MAX_HANG_S, f"chunk {CHUNK_REACHED}")
                assert stream.num_tokens == 0
            case Phase.TRANSFERRING:
                await until(lambda: stream.num_tokens > 0, MAX_HANG_S, "the early copy of token 0")
                assert self.num_steps(DECODE) == decode_before, "it was committed already"
            case Phase.COMMITTED:
                await until(lambda: self.num_steps(DECODE) > decode_before, MAX_HANG_S, "decode's first step to begin")
                assert stream.num_tokens <= 1
            case Phase.DECODING:
                await until(lambda: stream.num_tokens >= 5, MAX_HANG_S, "five tokens")
        assert not any(task.done() for _, task in asked)
        return asked

    async def befall(self, event: Event) -> None:
        """Returns once the fault is over: the worker is back, or the link."""
        cluster = self.cluster
        if event in _VICTIMS:
            cluster.kill(_VICTIMS[event])
            cluster.restart(_VICTIMS[event])
            await wait_ready(self.client, (PREFILL, DECODE))
        elif event in _LINKS:
            for one, other in _LINKS[event]:
                cluster.network.heal(one, other)  # of what may slow it now
                (cluster.network.stall if event in _STALLS else cluster.network.cut)(one, other)
            await asyncio.sleep(OUTAGE_S)
            self.heal()
        elif event is Event.SLOW_PEER:
            await cluster.falter((PREFILL, DECODE), OUTAGE_S)
        self.heal()

    def heal(self) -> None:
        for one, other in (_HANDOFF_LINK, (PREFILL, ROUTER), (DECODE, ROUTER)):
            self.cluster.network.heal(one, other)
        self.cluster.paces[DECODE].step_s.value = STEP_S[PhaseName.DECODE]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    folder = tmp_path_factory.mktemp("faults")
    model = write_tiny_gguf(folder / "tiny.gguf")
    with (
        Network([ROUTER, PREFILL, DECODE]) as network,
        FaultyCluster(network, model, folder, names=(PREFILL, DECODE), lease_s=LEASE_S) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def undisturbed(cluster: FaultyCluster) -> Undisturbed:
    return asyncio.run(read_undisturbed(cluster, (PREFILL, DECODE)))


@pytest_asyncio.fixture
async def scene(cluster: FaultyCluster, undisturbed: Undisturbed) -> AsyncIterator[Scene]:
    async with cluster.client() as client:
        await wait_ready(client, (PREFILL, DECODE))
        await until(lambda: is_at_rest(client), FREED_S, "pages at rest in the beginning")
        scene = Scene(cluster=cluster, client=client, undisturbed=undisturbed)
        try:
            yield scene
        finally:
            scene.heal()


@pytest.mark.parametrize(("phase", "event"), CELLS)
async def test_cell(scene: Scene, phase: Phase, event: Event) -> None:
    # 1. the request is there
    asked = await scene.reach(phase)
    if event is Event.ABORT:
        # 2. its client leaves, and nobody holds anything for it; who asked before it is not concerned
        _, left = asked.pop()
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        scene.heal()
        if not asked:
            seconds = await until(lambda: is_at_rest(scene.client), ABORT_S + LONG_STEP_S, "the abort to free every page")
            print(f"every page was free {1000 * seconds:.0f} ms after the abort")
    else:
        # 2. the event comes and goes
        await scene.befall(event)
    # 3. the client notices no more than a pause
    await assert_undisturbed(asked, scene.undisturbed)
    # 4. nothing is held any more, and the next request is served
    seconds = await until(lambda: is_at_rest(scene.client), FREED_S, "every page to be free or cached")
    print(f"every page was free {1000 * seconds:.0f} ms after the end")
    await assert_undisturbed([ask(scene.client)], scene.undisturbed)


@pytest.mark.slow
async def test_a_release_that_is_lost_costs_one_lease(scene: Scene) -> None:
    ((_, left),) = await scene.reach(Phase.DECODING)
    scene.cluster.network.stall(DECODE, ROUTER)
    left.cancel()
    with suppress(asyncio.CancelledError):
        await left
    await asyncio.sleep(FREED_S)
    scene.heal()
    await wait_ready(scene.client, (PREFILL, DECODE))
    assert await is_at_rest(scene.client)
    await assert_undisturbed([ask(scene.client)], scene.undisturbed)


@pytest.mark.slow
async def test_a_hand_off_link_that_stays_down_ends_the_request(scene: Scene) -> None:
    """Router and both workers see one another, so that no lease and no ping ends it."""
    scene.cluster.network.cut(PREFILL, DECODE)
    stream, task = ask(scene.client)
    async with asyncio.timeout(40):
        await task
    assert stream.error is not None
    assert "tried 8 times" in stream.error["message"]
    await until(lambda: is_at_rest(scene.client), FREED_S, "every page to be free or cached")
    scene.heal()
    await assert_undisturbed([ask(scene.client)], scene.undisturbed)


@pytest.mark.parametrize("is_stall", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["down", "stall"])
async def test_another_decode_worker_takes_what_cannot_reach_the_first(
    tmp_path_factory: pytest.TempPathFactory, is_stall: bool
) -> None:
    folder, names = tmp_path_factory.mktemp("faults"), (PREFILL, DECODE, "decode-1")
    model = write_tiny_gguf(folder / "tiny.gguf")
    with Network([ROUTER, *names]) as network, FaultyCluster(network, model, folder, names=names, lease_s=LEASE_S) as cluster:
        undisturbed = await read_undisturbed(cluster, names)
        async with cluster.client() as client:
            (network.stall if is_stall else network.cut)(PREFILL, DECODE)
            # one goes to either decode worker, and their prompts are computed one after the other
            asked = [ask(client), ask(client)]
            await assert_undisturbed(asked, Undisturbed(token_ids=undisturbed.token_ids, seconds=3 * undisturbed.seconds))
            await until(lambda: is_at_rest(client), FREED_S, "every page to be free or cached")
            assert cluster.paces["decode-1"].num_begun.value >= NUM_TOKENS


async def read_undisturbed(cluster: FaultyCluster, names: tuple[str, ...]) -> Undisturbed:
    async with cluster.client() as client:
        await wait_ready(client, names)
        began = time.monotonic()
        stream, task = ask(client)
        await task
        assert (stream.error, stream.finish_reason, len(stream.token_ids)) == (None, "length", NUM_TOKENS)
        return Undisturbed(token_ids=stream.token_ids, seconds=time.monotonic() - began)


async def assert_undisturbed(asked: list[Asked], undisturbed: Undisturbed) -> None:
    began = time.monotonic()
    async with asyncio.timeout(MAX_HANG_S + undisturbed.seconds):
        await asyncio.gather(*(task for _, task in asked))
    print(f"{len(asked)} ended {time.monotonic() - began:.1f} s after the fault; undisturbed: {undisturbed.seconds:.1f} s")
    assert [stream.error for stream, _ in asked] == [None] * len(asked)
    assert [stream.token_ids for stream, _ in asked] == [undisturbed.token_ids] * len(asked)


def ask(client: httpx.AsyncClient) -> Asked:
    """The request; a salt of its own keeps it from beginning with the pages that others have left."""
    stream = Stream()
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "cache_salt": f"{time.monotonic_ns()}"}
    return stream, asyncio.create_task(run_generation(client, stream, PROMPT, **options))

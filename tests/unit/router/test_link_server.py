"""Registration, refusals, renewals and the end of links, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from router.worker_directory import WorkerState
from serving_core.errors import RefusalCode
from serving_core.kv_page_layout import KVDType
from serving_core.rpc.channel import open_channel
from serving_core.rpc.convert import hello_to_pb, refusal_from_pb
from serving_core.rpc.v1 import router_link_pb2, router_link_pb2_grpc
from serving_core.worker_status import PhaseName
from tests.unit.router.fake_worker import LAYOUT, OTHER_LAYOUT, FakeWorker, make_hello, make_key, make_status
from tests.unit.router.pair import LEASE_S, Pair, collect, make_request

PREFILL, DECODE = PhaseName.PREFILL, PhaseName.DECODE


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    workers: list[FakeWorker] = []
    yield workers
    for worker in workers:
        await worker.die()


def state_of(pair: Pair, worker_id: str) -> WorkerState:
    (entry,) = [entry for entry in pair.directory.entries() if entry.worker_id == worker_id]
    return pair.directory.state_of(entry)


async def reached(pair: Pair, worker_id: str, state: WorkerState) -> None:
    async with asyncio.timeout(5):
        await pair.directory.wait_until(lambda: state_of(pair, worker_id) is state)


async def test_worker_is_taken_in_and_lost(pair: Pair, workers: list[FakeWorker]) -> None:
    worker = await FakeWorker("decode-0", DECODE).join(pair.address)
    workers.append(worker)
    assert worker.was_welcome
    await reached(pair, "decode-0", WorkerState.READY)
    worker.say(make_status(is_draining=True))
    await reached(pair, "decode-0", WorkerState.DRAINING)
    await worker.hang_up()
    await reached(pair, "decode-0", WorkerState.SUSPECT)
    await worker.join(pair.address)
    await reached(pair, "decode-0", WorkerState.READY)


@pytest.mark.parametrize(
    ("fields", "code", "values"),
    [
        ({"model_name": "other"}, RefusalCode.MODEL_MISMATCH, ("'other'", "'tiny'")),
        ({"model_print": "print-b"}, RefusalCode.MODEL_MISMATCH, ("print-b", "print-a")),
        (
            {"layout": OTHER_LAYOUT},
            RefusalCode.LAYOUT_MISMATCH,
            (OTHER_LAYOUT.layout_print, "num_layers is 3 at decode-0 and 2 at prefill-0"),
        ),
        (
            {"layout": replace(LAYOUT, dtype=KVDType.INT8, page_size=32)},
            RefusalCode.LAYOUT_MISMATCH,
            ("prefill-0, whose layout is", ": dtype is int8 at decode-0 and float32 at prefill-0."),
        ),
    ],
)
async def test_worker_that_does_not_match_is_refused(
    pair: Pair, workers: list[FakeWorker], fields: dict[str, object], code: RefusalCode, values: tuple[str, ...]
) -> None:
    workers.append(await FakeWorker("prefill-0", PREFILL).join(pair.address))
    worker = await FakeWorker("decode-0", DECODE, **fields).join(pair.address)
    workers.append(worker)
    assert worker.refused is not None
    assert worker.refused.code is code
    assert all(value in str(worker.refused) for value in values)
    await worker.link_ended()
    assert [entry.worker_id for entry in pair.directory.entries()] == ["prefill-0"]


async def test_workers_of_a_phase_must_compute_alike(pair: Pair, workers: list[FakeWorker]) -> None:
    # 1. Prefill and decode may differ, and so may two workers that share no phase with each other.
    workers.append(await FakeWorker("decode-0", DECODE, decode_arithmetic="native auto").join(pair.address))
    workers.append(await FakeWorker("prefill-0", PREFILL, decode_arithmetic="").join(pair.address))
    assert all(worker.was_welcome for worker in workers)

    # 2. A second decode worker with other kernels would go on with other bits.
    other = await FakeWorker("decode-1", DECODE, decode_arithmetic="torch bfloat16").join(pair.address)
    workers.append(other)
    assert other.refused is not None
    assert other.refused.code is RefusalCode.MODEL_MISMATCH
    assert "Worker decode-1 computes decode with 'torch bfloat16' but the others" in str(other.refused)
    assert "Unlike processors also need --enforce-eager; GPUs must be of one kind" in str(other.refused)

    # 3. So would one that takes the place of the first.
    await workers[0].hang_up()
    heir = await FakeWorker("decode-0", DECODE, decode_arithmetic="native int8").join(pair.address)
    workers.append(heir)
    assert heir.refused is not None
    assert "'native auto'" in str(heir.refused)


async def test_layouts_of_one_phase_may_differ(pair: Pair, workers: list[FakeWorker]) -> None:
    workers.append(await FakeWorker("decode-0", DECODE).join(pair.address))
    workers.append(await FakeWorker("decode-1", DECODE, layout=OTHER_LAYOUT).join(pair.address))
    assert workers[1].was_welcome


async def test_page_sizes_may_differ_between_the_phases(pair: Pair, workers: list[FakeWorker]) -> None:
    workers.append(await FakeWorker("decode-0", DECODE).join(pair.address))
    workers.append(await FakeWorker("prefill-0", PREFILL, layout=replace(LAYOUT, page_size=16)).join(pair.address))
    assert workers[1].was_welcome


async def test_phase_that_nobody_knows_is_refused(pair: Pair, workers: list[FakeWorker]) -> None:
    class Odd:
        value = "embedding"

    worker = FakeWorker("odd-0")
    worker.phases = {Odd()}  # type: ignore[arg-type]
    workers.append(await worker.join(pair.address))
    assert worker.refused is not None
    assert worker.refused.code is RefusalCode.MALFORMED
    assert "embedding" in str(worker.refused)


async def test_new_incarnation_ends_the_old_link(pair: Pair, workers: list[FakeWorker]) -> None:
    workers.append(await FakeWorker("prefill-0", PREFILL).join(pair.address))
    old = await FakeWorker("decode-0", DECODE, incarnation="old").join(pair.address)
    workers.append(old)
    generation = await pair.generator.start(make_request())
    prefill = workers[0]
    prefill.token(make_request().key, 0)
    old.token(make_request().key, 0)
    old.token(make_request().key, 1)
    events = aiter(generation)
    assert [(await anext(events)).index for _ in range(2)] == [0, 1]
    # 1. the new one registers; what the old one held goes on there, and the old one's link is ended
    new = await FakeWorker("decode-0", DECODE, incarnation="new").join(pair.address)
    workers.append(new)
    await new.saw(lambda worker: len(worker.reserves) == 1)
    await old.link_ended()
    await generation.aclose()
    # 2. the old one wakes up and is refused; the new one stays
    await old.join(pair.address)
    assert old.refused is not None
    assert "replaced" in str(old.refused)
    assert state_of(pair, "decode-0") is WorkerState.READY


async def test_message_that_makes_no_sense_ends_the_link(pair: Pair, workers: list[FakeWorker]) -> None:
    worker = await FakeWorker("decode-0", DECODE).join(pair.address)
    workers.append(worker)
    worker.send(router_link_pb2.WorkerMessage())
    await worker.link_ended()
    await reached(pair, "decode-0", WorkerState.SUSPECT)


async def test_bytes_that_are_no_message_are_refused_in_one_line(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    hello = router_link_pb2.WorkerMessage(hello=hello_to_pb(make_hello("decode-0", {DECODE}))).SerializeToString()
    channel = open_channel(pair.address)
    connect: Any = channel.stream_stream("/twinpool.v1.RouterLink/Connect")
    # 1. instead of the hello
    (answer,) = [router_link_pb2.RouterMessage.FromString(raw) async for raw in connect(iter((b"\xff" * 9,)))]
    assert refusal_from_pb(answer.refusal).code is RefusalCode.MALFORMED
    # 2. after it: the link is cut
    answers = [router_link_pb2.RouterMessage.FromString(raw) async for raw in connect(iter((hello, b"\xff" * 9)))]
    assert answers[0].WhichOneof("message") == "welcome"
    assert answers[-1].WhichOneof("message") != "refusal"
    await reached(pair, "decode-0", WorkerState.SUSPECT)
    await channel.close()
    assert [record.getMessage().count("The 9 bytes sent to") for record in caplog.records] == [1, 1]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("fields", [{"worker_id": ""}, {"address": "unix:/tmp/x"}, {"num_pages": 0}, {"incarnation": ""}])
async def test_a_hello_that_breaks_the_contract_is_refused(pair: Pair, fields: dict[str, object]) -> None:
    message = hello_to_pb(make_hello("decode-0", {DECODE}))
    for name, value in fields.items():
        setattr(message, name, value)
    channel = open_channel(pair.address)
    call = router_link_pb2_grpc.RouterLinkStub(channel).Connect(iter((router_link_pb2.WorkerMessage(hello=message),)))
    (answer,) = [answer async for answer in call]
    assert refusal_from_pb(answer.refusal).code is RefusalCode.MALFORMED
    assert pair.directory.entries() == []
    await channel.close()


async def test_renewals_name_exactly_what_is_wanted(pair: Pair, workers: list[FakeWorker]) -> None:
    prefill = await FakeWorker("prefill-0", PREFILL).join(pair.address)
    decode = await FakeWorker("decode-0", DECODE).join(pair.address)
    workers += [prefill, decode]
    a, b = make_request("a"), make_request("b")
    # 1. nothing is wanted yet, and that is said as well
    await decode.saw(lambda worker: worker.renewals == [frozenset()])
    # 2. both sequences are wanted on both sides
    first, second = await pair.generator.start(a), await pair.generator.start(b)
    for worker in (prefill, decode):
        await worker.saw(lambda worker: worker.renewals[-1] == {a.key, b.key})
    # 3. the early copy changes nothing; after the hand-off prefill's lease may run down
    prefill.token(a.key, 0)
    await anext(aiter(first))
    num_renewals = len(prefill.renewals)
    await prefill.saw(lambda worker: len(worker.renewals) > num_renewals + 1)
    assert prefill.renewals[-1] == {a.key, b.key}
    decode.token(a.key, 0)
    await prefill.saw(lambda worker: worker.renewals[-1] == {b.key})
    assert decode.renewals[-1] == {a.key, b.key}
    # 4. what ended is named nowhere
    decode.token(a.key, 1, last=True)
    assert await collect(first) == [101]
    await decode.saw(lambda worker: worker.renewals[-1] == {b.key})
    await second.aclose()
    for worker in (prefill, decode):
        await worker.saw(lambda worker: worker.renewals[-1] == frozenset())


async def test_renewals_come_three_times_a_lease(pair: Pair, workers: list[FakeWorker]) -> None:
    worker = await FakeWorker("decode-0", DECODE).join(pair.address)
    workers.append(worker)
    began = asyncio.get_running_loop().time()
    await worker.saw(lambda worker: len(worker.renewals) == 4)
    assert asyncio.get_running_loop().time() - began < 2 * LEASE_S


async def test_events_of_unknown_sequences_create_nothing(pair: Pair, workers: list[FakeWorker]) -> None:
    worker = await FakeWorker("decode-0", DECODE).join(pair.address)
    workers.append(worker)
    worker.token(make_key("unknown"), 0)
    worker.say(make_status(is_draining=True))
    await reached(pair, "decode-0", WorkerState.DRAINING)
    pair.assert_no_leaks()

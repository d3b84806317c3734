"""The page path's port against anything that can be sent to it: a refusal each time, no crash, nothing written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from kv_transfer.grpc_page_service import METHOD, SERVICE, GrpcPageService
from kv_transfer.page_answer import decode_answer
from kv_transfer.page_frame import HEADER_BYTES, MAX_FRAME_BYTES, encode_frame
from kv_transfer.page_transport import Segment
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import ReservationId
from serving_core.rpc.channel import make_server, open_channel
from tests.contract.page_path import GrpcPath, RecordingSink, cut_page, make_ticket

TICKET = make_ticket()


class RawSender:
    """Sends frames with no regard to credits or answers."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)

    async def send(self, *frames: bytes) -> int:
        """The number of accepted segments in the last answer; raises like ``decode_answer``."""
        call: grpc.aio.StreamStreamCall[bytes, bytes] = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        writing = asyncio.create_task(_write_all(call, frames))
        try:
            num_accepted = 0
            while isinstance(answer := await call.read(), bytes):
                num_accepted = decode_answer(answer)
            return num_accepted
        finally:
            call.cancel()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def _write_all(call: grpc.aio.StreamStreamCall[bytes, bytes], frames: Sequence[bytes]) -> None:
    for frame in frames:
        await call.write(frame)
    await call.done_writing()


@pytest_asyncio.fixture
async def sender(grpc_path: GrpcPath) -> AsyncIterator[RawSender]:
    raw = RawSender(grpc_path.address)
    yield raw
    await raw.channel.close()


def page_frames(attempt: int = 1, ordinals: Sequence[int] = (0, 1, 2, 3)) -> list[bytes]:
    ticket = make_ticket(attempt=attempt)
    return [encode_frame(segment) for ordinal in ordinals for segment in cut_page(ticket, ordinal)]


async def refusal_of(sender: RawSender, *frames: bytes) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        await sender.send(*frames)
    return refused.value.code


async def test_whole_pages_are_accepted_in_bounded_batches(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    frames = page_frames()
    assert await sender.send(*frames) == len(frames)
    grpc_path.sink.assert_pages_equal_source(TICKET)
    assert max(grpc_path.sink.batch_sizes) <= 4
    assert not grpc_path.service.num_refused_writes


async def test_what_waits_goes_in_one_batch(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    grpc_path.sink.gate.clear()
    sending = asyncio.create_task(sender.send(*page_frames()))
    await asyncio.sleep(0.1)
    grpc_path.sink.gate.set()
    await sending
    assert 4 in grpc_path.sink.batch_sizes


async def test_random_bytes(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    chance = random.Random(20240)
    for _ in range(100):
        assert await refusal_of(sender, chance.randbytes(chance.choice([0, 1, HEADER_BYTES, 300]))) is RefusalCode.MALFORMED
    assert grpc_path.service.num_refused_writes == {RefusalCode.MALFORMED: 100}
    grpc_path.sink.assert_untouched(TICKET)


async def test_truncated_lengthened_and_flipped_frames(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    chance = random.Random(20241)
    frame = page_frames()[0]
    bad = (RefusalCode.MALFORMED, RefusalCode.CHECKSUM_MISMATCH)
    for _ in range(50):
        assert await refusal_of(sender, frame[: chance.randrange(len(frame))]) in bad
        assert await refusal_of(sender, frame + chance.randbytes(3)) in bad
        flipped = bytearray(frame)
        flipped[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        assert await refusal_of(sender, bytes(flipped)) in bad
    grpc_path.sink.assert_untouched(TICKET)
    # The port still serves.
    assert await sender.send(*page_frames()) == 16


async def test_frames_before_a_bad_one_are_accepted_and_those_after_it_are_not(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    frames = page_frames()
    assert await refusal_of(sender, *frames[:3], b"?", *frames[3:]) is RefusalCode.MALFORMED
    assert grpc_path.sink.num_copies == 3


async def test_replayed_frames_of_the_attempt_change_nothing(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    frames = page_frames()
    await sender.send(*frames)
    await sender.send(*frames, *frames)
    assert grpc_path.sink.num_copies == len(frames)


async def test_replayed_frames_of_an_earlier_attempt_are_refused_and_counted(grpc_path: GrpcPath, sender: RawSender) -> None:
    renewed = make_ticket(attempt=2)
    grpc_path.sink.reserve(renewed)
    for _ in range(3):
        assert await refusal_of(sender, *page_frames(attempt=1)) is RefusalCode.STALE_ATTEMPT
    assert grpc_path.service.num_refused_writes == {RefusalCode.STALE_ATTEMPT: 3}
    grpc_path.sink.assert_untouched(renewed)


async def test_two_attempts_on_one_stream_are_refused(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    other = make_ticket(reservation_id=ReservationId("ee" * 16))
    grpc_path.sink.reserve(other)
    stray = encode_frame(next(cut_page(other, 0)))
    assert await refusal_of(sender, page_frames()[0], stray) is RefusalCode.MALFORMED
    assert grpc_path.sink.num_bytes_received(other) == 0


async def test_an_oversized_message_is_refused_by_grpc_before_it_is_read(grpc_path: GrpcPath, sender: RawSender) -> None:
    grpc_path.sink.reserve(TICKET)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await sender.send(bytes(MAX_FRAME_BYTES + 1))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    grpc_path.sink.assert_untouched(TICKET)
    assert await sender.send(*page_frames()) == 16


async def test_an_oversized_frame_is_refused_by_the_service_where_the_server_lets_it_through() -> None:
    sink = RecordingSink()
    service = GrpcPageService(sink)
    server = make_server()
    service.add_to_server(server)
    sender = RawSender(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    assert await refusal_of(sender, bytes(MAX_FRAME_BYTES + 1)) is RefusalCode.MALFORMED
    await sender.channel.close()
    await server.stop(None)


async def test_a_stream_without_frames_ends_after_the_idle_time() -> None:
    sink = RecordingSink()
    service = GrpcPageService(sink, max_idle_s=0.1)
    server = make_server()
    service.add_to_server(server)
    channel = open_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
    async with asyncio.timeout(3):
        assert await call.read() is grpc.aio.EOF
    await channel.close()
    await server.stop(None)


class StoppedSink:
    """Of a worker whose engine has stopped, or never comes to it."""

    def __init__(self, *, is_stuck: bool) -> None:
        self._is_stuck = is_stuck

    async def accept(self, segments: Sequence[Segment]) -> None:
        if self._is_stuck:
            await asyncio.Event().wait()
        raise WorkerLost("The engine of this worker has stopped.")


@pytest.mark.parametrize(
    ("is_stuck", "code"), [(False, grpc.StatusCode.UNAVAILABLE), (True, grpc.StatusCode.DEADLINE_EXCEEDED)]
)
async def test_a_sink_that_cannot_take_frames_ends_the_stream_with_a_status(is_stuck: bool, code: grpc.StatusCode) -> None:
    service = GrpcPageService(StoppedSink(is_stuck=is_stuck), max_wait_s=0.1)
    server = make_server()
    service.add_to_server(server)
    sender = RawSender(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    async with asyncio.timeout(3):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await sender.send(page_frames()[0])
    assert error.value.code() is code
    await sender.channel.close()
    await server.stop(None)


async def test_a_refused_sender_that_stays_is_left_after_the_linger_time() -> None:
    service = GrpcPageService(RecordingSink(), linger_s=0.1)
    server = make_server()
    service.add_to_server(server)
    channel = open_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
    await call.write(b"?")
    async with asyncio.timeout(3):
        assert await call.read() is not grpc.aio.EOF
        assert await call.read() is grpc.aio.EOF
    await channel.close()
    await server.stop(None)


async def test_a_sender_that_ignores_credits_is_held_by_flow_control(grpc_path: GrpcPath, sender: RawSender) -> None:
    """A stalled sink stops the sender; what it had sent is dropped with the stream."""
    grpc_path.sink.reserve(TICKET)
    grpc_path.sink.gate.clear()
    big = [encode_frame(segment) for segment in cut_page(TICKET, 0, max_segment_bytes=4096)] * 2000
    sending = asyncio.create_task(sender.send(*big))
    await asyncio.sleep(0.3)
    assert not sending.done()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    grpc_path.sink.assert_untouched(TICKET)

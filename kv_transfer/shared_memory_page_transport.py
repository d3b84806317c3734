"""The sending end of the page path over shared memory: payloads in a ring, headers and answers on a Unix socket.

It owns connections and rings, never pages: a segment is copied into its slot before ``write`` returns. Connections are pooled,
because new memory costs more than what is mostly sent through it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kv_transfer.page_answer import MAX_ANSWER_BYTES, decode_answer
from kv_transfer.page_frame import encode_header
from kv_transfer.page_socket import is_same_user, new_socket, proof_for, send_hello, socket_name
from kv_transfer.page_transport import PageStream, Segment
from kv_transfer.shared_ring import SharedRing
from kv_transfer.stream_credits import StreamCredits
from kv_transfer.stream_pool import Receiver, StreamPool
from serving_core.errors import Refused, WorkerLost
from serving_core.rpc.cluster_token import OPEN, ClusterToken
from serving_core.transfer_ticket import TransferTicket


class SharedMemoryPageTransport:
    """``PageTransport`` to decode workers on this host. Lives on one event loop.

    ``max_unanswered_segments`` are the credits of a stream, and its ring's slots. ``stall_timeout_s`` bounds every wait for the
    receiver, ``connect_timeout_s`` that for its welcome. At most ``max_idle`` connections wait for another attempt.
    """

    name = "shared_memory"

    def __init__(
        self,
        *,
        token: ClusterToken = OPEN,
        max_unanswered_segments: int = 8,
        stall_timeout_s: float = 5.0,
        connect_timeout_s: float = 1.0,
        max_idle: int = 4,
    ) -> None:
        self._token = token
        self._max_unanswered_segments = max_unanswered_segments
        self._stall_timeout_s = stall_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._pool = StreamPool(self._connect, max_idle=max_idle)

    @asynccontextmanager
    async def open(self, ticket: TransferTicket) -> AsyncIterator[PageStream]:
        """A stream to the ticket's decode worker, connected when the context is entered: raises ``WorkerLost`` with the reason
        when the worker cannot be reached this way. Nothing was sent then."""
        async with self._pool.use(ticket) as stream:
            yield stream

    async def close(self) -> None:
        """Release every connection; streams still open raise ``WorkerLost``. Idempotent."""
        await self._pool.close()

    async def _connect(self, ticket: TransferTicket) -> _SharedMemoryStream:
        receiver = Receiver.of(ticket)
        name = socket_name(receiver.address, receiver.incarnation)
        try:
            connection = new_socket()
        except OSError as error:
            raise _unreachable(ticket, f"{error.strerror}") from error
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                ring = await _greet(connection, name, self._max_unanswered_segments, self._token)
        except TimeoutError:
            connection.close()
            raise _unreachable(ticket, f"it did not answer within {self._connect_timeout_s:g} s") from None
        except (OSError, Refused, _Unfit) as error:
            connection.close()
            raise _unreachable(ticket, error.strerror if isinstance(error, OSError) else str(error)) from error
        except BaseException:
            connection.close()
            raise
        stream_credits = StreamCredits(
            receiver.address,
            max_unanswered_segments=self._max_unanswered_segments,
            stall_timeout_s=self._stall_timeout_s,
        )
        return _SharedMemoryStream(receiver, connection, ring, stream_credits, self._stall_timeout_s)


class _SharedMemoryStream:
    """One connection. A task of its own reads answers, so that a refusal is known however many writes are under way."""

    def __init__(
        self,
        receiver: Receiver,
        connection: socket.socket,
        ring: SharedRing,
        stream_credits: StreamCredits,
        stall_timeout_s: float,
    ) -> None:
        self.receiver = receiver
        self._connection = connection
        self._ring = ring
        self._credits = stream_credits
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.create_task(self._read_answers())

    @property
    def num_accepted(self) -> int:
        return self._credits.num_accepted

    @property
    def is_settled(self) -> bool:
        """See ``StreamCredits``: fit for another attempt."""
        return self._credits.is_settled

    async def write(self, segment: Segment) -> None:
        await self._credits.wait_for_credit()
        self._ring.write(self._credits.num_written, segment.payload)
        header = encode_header(segment)  # after the copy, which has brought the payload into the cache
        self._credits.use()
        try:
            await self._send(header)
        except TimeoutError:
            self._credits.end_stalled()
        except OSError:
            # The other end is gone, so the reader is about to know why; it may be a refusal, which outranks the broken write.
            await asyncio.wait((self._reader,))
            self._credits.raise_error()

    async def flush(self) -> None:
        await self._credits.wait_until_accepted()

    async def release(self) -> None:
        """Close the connection, whatever is under way. Idempotent, returns at once."""
        self._credits.end(WorkerLost("The page stream was released."))
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        self._connection.close()
        self._ring.close()

    async def _send(self, header: bytes) -> None:
        with suppress(BlockingIOError):  # mostly there is room, and a timer would cost more than the call
            self._connection.send(header)
            return
        async with asyncio.timeout(self._stall_timeout_s):
            await self._loop.sock_sendall(self._connection, header)

    async def _read_answers(self) -> None:
        try:
            while answer := await self._loop.sock_recv(self._connection, MAX_ANSWER_BYTES):
                self._credits.take_answer(answer)
            self._credits.end(WorkerLost("The decode worker ended the page connection."))
        except Refused as refusal:
            self._credits.end(refusal)
        except OSError as error:
            self._credits.end(WorkerLost(f"The page connection broke ({error.strerror})."))


class _Unfit(Exception):
    """Who listens is not who should."""


async def _greet(connection: socket.socket, name: str, num_slots: int, token: ClusterToken) -> SharedRing:
    """Connect and have the receiver take a new ring. Raises ``OSError``, ``Refused`` or ``_Unfit``."""
    connection.connect(name)  # on this host, it succeeds or fails at once
    if not is_same_user(connection):
        raise _Unfit("it runs as another user")
    ring, file = SharedRing.create(num_slots)
    try:
        try:
            send_hello(connection, file, num_slots, proof_for(name, token))
        finally:
            os.close(file)
        answer = await asyncio.get_running_loop().sock_recv(connection, MAX_ANSWER_BYTES)
        if not answer:
            raise _Unfit("it ended the connection")
        decode_answer(answer)
    except BaseException:
        ring.close()
        raise
    return ring


def _unreachable(ticket: TransferTicket, reason: str | None) -> WorkerLost:
    return WorkerLost(
        f"{ticket.decode_worker_id} at {ticket.decode_address} cannot be reached through shared memory: {reason}."
    )

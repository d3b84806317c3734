"""The receiving end of the page path over shared memory: copies segments out of a sender's ring, checks the copies, hands them
to the sink, answers. It owns no page.

One connection carries attempt after attempt: 1. hello, with the ring; 2. a frame's header arrives on the socket and is
checked; 3. the payload is copied from the slot whose turn it is into a buffer of the connection's own, and its checksum is
taken there, so that what a sender changes afterwards changes nothing; 4. the sink takes all that are there, while the next
ones are copied; 5. the answer says how many were accepted, in order, which gives their slots back; 6. the first refusal is
answered and ends the connection. No place in memory comes from the wire: slots follow one another, and a length is checked
before anything is touched.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from itertools import groupby

from kv_transfer.page_answer import encode_accepted, encode_refused
from kv_transfer.page_frame import HEADER_BYTES, FrameHeader
from kv_transfer.page_socket import NO_PROOF, accept_connection, is_same_user, new_socket, proof_for, receive_hello, socket_name
from kv_transfer.page_transport import PageSink, Segment
from kv_transfer.segment_inbox import SegmentInbox
from kv_transfer.shared_ring import SLOT_BYTES, SharedRing
from serving_core.errors import RefusalCode, Refused, WorkerLost
from serving_core.ids import Incarnation
from serving_core.rpc.cluster_token import OPEN, ClusterToken

ACCEPT_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class SharedMemoryPageService:
    """Serves one decode worker's ``sink`` to senders of the same user on the same host who know ``token``. Lives on one event
    loop.

    ``max_connections`` bounds descriptors and buffers: senders above that wait unanswered, and take another way. A hello must
    come within ``hello_timeout_s``, and the sink must take segments within ``max_wait_s``; ``linger_s`` bounds the wait for a
    refused sender to leave. A connection that is idle stays, since it ends with its sender's process.
    """

    def __init__(
        self,
        sink: PageSink,
        *,
        token: ClusterToken = OPEN,
        max_connections: int = 128,
        hello_timeout_s: float = 2.0,
        max_wait_s: float = 30.0,
        linger_s: float = 1.0,
    ) -> None:
        self._sink = sink
        self._token = token
        self._proof = NO_PROOF
        self._hello_timeout_s = hello_timeout_s
        self._max_wait_s = max_wait_s
        self._linger_s = linger_s
        self._has_room = asyncio.Semaphore(max_connections)
        self._num_refused_writes: Counter[RefusalCode] = Counter()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def num_refused_writes(self) -> Mapping[RefusalCode, int]:
        """Connections ended by a refusal, by its code; 0 for a code that never came. Only grows."""
        return self._num_refused_writes

    def start(self, address: str, incarnation: Incarnation) -> None:
        """Listen for the senders that hold tickets of this incarnation. Raises ``OSError``."""
        assert self._listener is None
        name = socket_name(address, incarnation)
        self._proof = proof_for(name, self._token)
        listener = new_socket()
        try:
            listener.bind(name)
            listener.listen()
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Stop listening and end every connection. Idempotent; ``start`` may follow."""
        tasks = [*self._serving, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._listener = self._accepting = None

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._has_room.acquire()
            try:
                connection = await accept_connection(listener)
            except OSError as error:  # out of descriptors: nothing tells when there are some again
                _log.warning("page connections over shared memory wait: %s", error)
                self._has_room.release()
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            except BaseException:
                self._has_room.release()
                raise
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        # Not in the task itself, which never runs when it is cancelled at once.
        connection.close()
        self._serving.discard(task)
        self._has_room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a page connection over shared memory broke", exc_info=error)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            if not is_same_user(connection):
                raise Refused(RefusalCode.MALFORMED, "Pages are taken from processes of the same user only.")
            async with asyncio.timeout(self._hello_timeout_s):
                ring = await receive_hello(connection, self._proof)
            with closing(ring):
                await self._answer(connection, encode_accepted(0))
                await _Connection(connection, ring, self._sink, self._max_wait_s).serve()
        except Refused as refusal:
            self._num_refused_writes[refusal.code] += 1
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._linger_s):
                    await self._answer(connection, encode_refused(refusal))
                    await _wait_for_end(connection)
        except (OSError, TimeoutError, WorkerLost) as error:
            _log.debug("a page connection over shared memory ended: %s", error)

    async def _answer(self, connection: socket.socket, answer: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, answer)


class _Connection:
    """One sender's, once it has its ring."""

    def __init__(self, connection: socket.socket, ring: SharedRing, sink: PageSink, max_wait_s: float) -> None:
        self._connection = connection
        self._ring = ring
        self._sink = sink
        self._max_wait_s = max_wait_s
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(mmap.mmap(-1, ring.num_slots * SLOT_BYTES))  # a page of it exists once it is written to
        self._inbox = SegmentInbox(ring.num_slots)
        self._num_read = 0
        self._num_accepted = 0

    async def serve(self) -> None:
        """Returns when the sender has left. Raises ``Refused``, ``OSError``, ``TimeoutError`` or ``WorkerLost``."""
        reader = asyncio.create_task(self._read())
        try:
            while batch := await self._inbox.take():
                async with asyncio.timeout(self._max_wait_s):
                    await self._accept(batch)
            await reader  # raises what ended the connection early
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _accept(self, batch: list[Segment]) -> None:
        for _, segments in groupby(batch, lambda segment: (segment.reservation_id, segment.attempt)):
            of_one_attempt = list(segments)
            await self._sink.accept(of_one_attempt)
            self._num_accepted += len(of_one_attempt)
        await self._loop.sock_sendall(self._connection, encode_accepted(self._num_accepted))

    async def _read(self) -> None:
        try:
            while header := await self._loop.sock_recv(self._connection, HEADER_BYTES + 1):
                await self._inbox.put(self._take(header))
        finally:
            self._inbox.end()

    def _take(self, header: bytes) -> Segment:
        """Copy and check the next segment. Here and not in a thread, since a change of threads costs more than the copy."""
        frame = FrameHeader.decode(header)
        if self._num_read - self._num_accepted == self._ring.num_slots:
            raise Refused(RefusalCode.MALFORMED, f"More than {self._ring.num_slots} segments came before an answer.")
        start = self._num_read % self._ring.num_slots * SLOT_BYTES
        copy = self._buffer[start : start + frame.num_bytes]
        self._ring.read(self._num_read, copy)
        self._num_read += 1
        return frame.check(copy)


async def _wait_for_end(connection: socket.socket) -> None:
    # Closed while something is unread, the socket would report an error to its other end, and drop the refusal.
    while await asyncio.get_running_loop().sock_recv(connection, HEADER_BYTES):
        pass

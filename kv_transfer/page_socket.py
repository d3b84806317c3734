"""The Unix socket beside a shared ring: how the two ends of a host find, know and greet each other.

A decode worker listens on an abstract name that follows from its address and incarnation, both in every ticket. So a sender
needs no other news: whoever can connect is on the same host and in the same network namespace, and whoever cannot has to take
another way. An abstract name is no file: nothing is left of it when its owner is killed. The kernel tells who is at the other
end (SO_PEERCRED), and only the same user is talked to, in both directions.

    hello:  magic "TWKS", version (u32), number of slots (u32), proof of the cluster's token (32 bytes), little-endian, with the
            ring's descriptor (SCM_RIGHTS)

The proof is for this socket's name alone: whoever listens on a name that is not his cannot use it elsewhere. The receiver
answers as on every page path (``page_answer``), first with 0 accepted segments once it has the ring.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kv_transfer.shared_ring import SharedRing
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation
from serving_core.rpc.cluster_token import OPEN, PROOF_BYTES, ClusterToken

T = TypeVar("T")

VERSION = 2
_MAGIC = b"TWKS"
_HELLO = struct.Struct(f"<4sII{PROOF_BYTES}s")
NO_PROOF = OPEN.proof(b"")
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def is_supported() -> bool:
    """Whether this system has what shared memory needs; all of it is Linux's."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")


def socket_name(address: str, incarnation: Incarnation) -> str:
    """The abstract name on which that incarnation listens. Of one length, whatever the address, and not to be guessed by
    those who do not know the incarnation. Another version of the protocol is under another name."""
    print_ = hashlib.sha256(f"{address} {incarnation}".encode()).hexdigest()
    return f"\0twinpool-pages-{VERSION}-{print_}"


def proof_for(name: str, token: ClusterToken) -> bytes:
    """What a member shows to whom it meets on the socket ``name``."""
    return token.proof(name.encode())


def new_socket() -> socket.socket:
    """A socket that keeps the bounds of messages and never blocks."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end ran as our user when it connected or began to listen."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def send_hello(connection: socket.socket, file: int, num_slots: int, proof: bytes = NO_PROOF) -> None:
    """The first message of a sender; a fresh connection has room for it. Raises ``OSError``."""
    socket.send_fds(connection, [_HELLO.pack(_MAGIC, VERSION, num_slots, proof)], [file])


async def receive_hello(connection: socket.socket, proof: bytes = NO_PROOF) -> SharedRing:
    """Wait for a sender's first message. Raises ``Refused`` (MALFORMED) for one that is no hello or does not show ``proof``,
    ``OSError``. The ring of such a sender is not looked at."""
    message, files = await _receive_files(connection)
    try:
        if len(message) != _HELLO.size or len(files) != 1:
            raise _malformed(f"A hello has {_HELLO.size} bytes and one descriptor, not {len(message)} and {len(files)}.")
        magic, version, num_slots, shown = _HELLO.unpack(message)
        if (magic, version) != (_MAGIC, VERSION):
            raise _malformed(f"A hello starts with {magic!r} and version {version}, not {_MAGIC!r} and {VERSION}.")
        if not hmac.compare_digest(shown, proof):
            raise _malformed("The hello does not show this cluster's token.")
        return SharedRing.open(files[0], num_slots)
    finally:
        for file in files:
            os.close(file)


async def accept_connection(listener: socket.socket) -> socket.socket:
    """The next one that comes, as ``new_socket`` makes them. Raises ``OSError``."""
    connection, _ = await _when_readable(listener, listener.accept)
    connection.setblocking(False)
    return connection


async def _receive_files(connection: socket.socket) -> tuple[bytes, list[int]]:
    def receive() -> tuple[bytes, list[int]]:
        # With room for one descriptor the kernel drops any more.
        message, files, _, _ = socket.recv_fds(connection, _HELLO.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        return message, files

    return await _when_readable(connection, receive)


async def _when_readable(readable: socket.socket, read: Callable[[], T]) -> T:
    """What ``read`` returns once it need not block. Whoever waits here and is cancelled loses nothing: asyncio's own functions
    may have read already, and then drop it."""
    loop = asyncio.get_running_loop()
    has_news = asyncio.Event()
    loop.add_reader(readable, has_news.set)
    try:
        while True:
            with suppress(BlockingIOError):
                return read()
            has_news.clear()
            await has_news.wait()
    finally:
        loop.remove_reader(readable)


def _malformed(message: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, message)

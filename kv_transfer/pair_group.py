"""Two ranks of torch.distributed, and the slots whose bytes travel between them. The only file here that knows torch.

The group is built by hand on a store of its own, without the process's global one, so that pairs come and go unnoticed by
anybody else: over gloo between pages in host memory, over NCCL between GPUs. Every call blocks, for the time-out at most, lets
go of the interpreter meanwhile, and belongs on the pair's thread. NCCL's watchdog, which would end this process for what a peer
does, is told to leave it alone: here every operation is waited for.

Life: 1. both ``allocate``; 2. the receiver calls ``listen``, the sender ``join`` once it has been told of that; 3. both
``connect``; 4. ``send`` and ``receive``, in the same order with the same lengths at both ends; 5. ``close``, from any state.
The first failure breaks the group for good: torch.distributed can neither take an operation back nor wait for it a second time.
"""

from __future__ import annotations

import enum
import hmac
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from kv_transfer.page_frame import MAX_PAYLOAD_BYTES
from serving_core.errors import WorkerLost

SLOT_BYTES = MAX_PAYLOAD_BYTES
"""Of a slot's memory only what was once written is ever there."""
MAX_SLOTS = 64
_NUM_THREADS = 1
"""Of gloo, for collectives. Sending and receiving take none of them."""
_MAX_CAUSE_LENGTH = 200
_distributed: Any = torch.distributed  # torch's stubs lack much of what its bindings have


def missing_backend(device: str) -> str | None:
    """The library that pairs on ``device`` need and this torch was built without, if any."""
    if not torch.distributed.is_available():
        return "torch.distributed"
    if device.startswith("cuda"):
        return None if torch.distributed.is_nccl_available() else "NCCL"
    return None if torch.distributed.is_gloo_available() else "gloo"


class Rank(enum.IntEnum):
    """Who is who in a pair."""

    RECEIVER = 0
    SENDER = 1

    @property
    def peer(self) -> Rank:
        return Rank.SENDER if self is Rank.RECEIVER else Rank.RECEIVER


class PairGroup:
    """One end of a pair. ``device`` is torch's word for where the bytes cross, ``cpu`` or a CUDA device; the slots are host
    memory either way. ``connect_timeout_s`` bounds ``listen``, ``join`` and ``connect`` each, ``timeout_s`` every message."""

    def __init__(self, rank: Rank, *, device: str, num_slots: int, connect_timeout_s: float, timeout_s: float) -> None:
        assert 1 <= num_slots <= MAX_SLOTS
        self.num_slots = num_slots
        self._rank = rank
        self._device = torch.device(device)
        self._connect_timeout = timedelta(seconds=connect_timeout_s)
        self._timeout = timedelta(seconds=timeout_s)
        self._slots: torch.Tensor  # from ``allocate`` on, as are the next two
        self._bytes: npt.NDArray[np.uint8]
        self._on_device: torch.Tensor
        self._store: Any = None
        self._group: Any = None
        self._is_broken = False

    def allocate(self) -> None:
        """Make the slots. Raises ``WorkerLost`` when there is no memory for them."""
        with self._failing("allocate the slots of a pair"):
            slots = torch.from_numpy(np.zeros((self.num_slots, SLOT_BYTES), dtype=np.uint8))  # the kernel's, page by page
            self._slots = slots.pin_memory() if self._is_cuda else slots
            self._bytes = self._slots.numpy()
            self._on_device = torch.empty_like(self._slots, device=self._device) if self._is_cuda else self._slots

    def slot(self, number: int, num_bytes: int) -> memoryview:
        """Memory of the slot of the ``number``-th message, counted from 0. Any thread."""
        assert 0 <= num_bytes <= SLOT_BYTES
        return self._bytes[number % self.num_slots, :num_bytes].data

    def fill(self, number: int, payload: memoryview) -> None:
        """Copy ``payload`` into its slot. Any thread; lets go of the interpreter meanwhile."""
        np.copyto(self._bytes[number % self.num_slots, : payload.nbytes], np.frombuffer(payload, dtype=np.uint8))

    def listen(self, host: str) -> int:
        """Open the store at ``host``, and nowhere else, for the sender to come. Returns its port. Raises ``WorkerLost``."""
        with self._failing("open a store"):
            listener = socket.create_server((host, 0))
            port: int = listener.getsockname()[1]
            self._store = self._open_store(host, port, listener.detach())
        return port

    def join(self, host: str, port: int) -> None:
        """Find the store that the receiver has opened. Raises ``WorkerLost``."""
        with self._failing("reach the receiver's store"):
            self._store = self._open_store(host, port, None)

    def connect(self, host: str, name: str) -> None:
        """Meet the other end under ``name``, which the two know alone; ``host`` is the address to be reached at. Raises
        ``WorkerLost``."""
        assert self._store is not None
        with self._failing("meet the other end"):
            store = _distributed.PrefixStore(name, self._store)
            self._group = self._new_nccl_group(store) if self._is_cuda else self._new_gloo_group(store, host)

    def prove(self, proof: bytes, expected: bytes) -> None:
        """Show ``proof`` to the other end and be shown ``expected``. Raises ``WorkerLost`` when it was something else: somebody
        else has come to the meeting."""
        if self._rank is Rank.SENDER:
            self.fill(0, memoryview(proof))
            self.send(0, (len(proof),))
        self.receive(0, (len(expected),))
        if not hmac.compare_digest(self.slot(0, len(expected)), expected):
            self._is_broken = True
            raise WorkerLost("Who came to the meeting over torch.distributed does not know its secret.")
        if self._rank is Rank.RECEIVER:
            self.fill(0, memoryview(proof))
            self.send(0, (len(proof),))

    def send(self, first: int, lengths: Sequence[int]) -> None:
        """Send the messages from the ``first``-th on, whose slots are filled. Returns once none of the memory is needed any
        more. Raises ``WorkerLost``."""
        works: list[Any] = []
        with self._failing("send"):
            try:
                for number, num_bytes in enumerate(lengths, first):
                    self._to_device(number, num_bytes)
                    works.append(self._group.send([self._message(number, num_bytes)], self._rank.peer, 0))
                self._wait(works)
            finally:
                works.clear()  # or an error's traceback would keep them, and they gloo's threads

    def receive(self, first: int, lengths: Sequence[int]) -> None:
        """Receive the messages from the ``first``-th on into their slots. Raises ``WorkerLost``."""
        works: list[Any] = []
        with self._failing("receive"):
            try:
                for number, num_bytes in enumerate(lengths, first):
                    # Over gloo a whole slot is offered, because a message longer than the memory offered to it would end this
                    # process. NCCL wants equal lengths.
                    offered = num_bytes if self._is_cuda else SLOT_BYTES
                    works.append(self._group.recv([self._message(number, offered)], self._rank.peer, 0))
                self._wait(works)
            finally:
                works.clear()
            for number, num_bytes in enumerate(lengths, first):
                self._from_device(number, num_bytes)

    def close(self) -> None:
        """Give up sockets, store and torch's threads. Idempotent."""
        self._is_broken = True
        if self._is_cuda and self._group is not None:
            self._group.abort()  # ends its kernels on the GPU, which would wait for ever
        self._group = self._store = None

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _open_store(self, host: str, port: int, listener: int | None) -> Any:
        # Given a listening socket it stays at that address; opened by itself it would listen at all of them.
        return _distributed.TCPStore(
            host,
            port,
            is_master=listener is not None,
            timeout=self._connect_timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _new_gloo_group(self, store: Any, host: str) -> Any:
        gloo = _distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._threads = _NUM_THREADS
        options._timeout = self._connect_timeout
        return gloo(store, int(self._rank), len(Rank), options)

    def _new_nccl_group(self, store: Any) -> Any:
        nccl = _distributed.ProcessGroupNCCL
        torch.cuda.set_device(self._device)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(store, int(self._rank), len(Rank), options)

    def _message(self, number: int, num_bytes: int) -> torch.Tensor:
        return self._on_device[number % self.num_slots, :num_bytes]

    def _to_device(self, number: int, num_bytes: int) -> None:
        if self._is_cuda:
            self._message(number, num_bytes).copy_(self._slots[number % self.num_slots, :num_bytes])

    def _from_device(self, number: int, num_bytes: int) -> None:
        if self._is_cuda:
            self._slots[number % self.num_slots, :num_bytes].copy_(self._message(number, num_bytes))

    def _wait(self, works: list[Any]) -> None:
        while works:
            if not works.pop(0).wait(self._timeout):
                raise RuntimeError("the operation was aborted")

    @contextmanager
    def _failing(self, task: str) -> Iterator[None]:
        if self._is_broken:
            raise WorkerLost("The pair over torch.distributed is broken.")
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._is_broken = True
            cause = str(error).partition("\n")[0][:_MAX_CAUSE_LENGTH]
            raise WorkerLost(f"torch.distributed could not {task} ({cause}).") from None

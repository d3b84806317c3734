"""The one error tree. Foreign errors (gRPC, Ray, torch, file formats) are mapped into it once, at the edge.

TwinpoolError
├── InvalidRequest        the client asked for something that can never be served (HTTP 400)
├── ConfigError           a flag or a combination of flags cannot work (exit status 2)
├── ModelFileError        a model file is missing, truncated or of an unsupported kind
├── BrokenContract        a value breaks an invariant of the contract's types: a bug, ours or a peer's
├── Refused               a peer declined one operation, for the reason in its ``code``
├── OutOfPages            the page pool cannot satisfy an allocation now
├── WorkerLost            the worker behind a sequence is gone or silent
├── NoCapacity            nothing can take the request in time (HTTP 503 or 429)
└── PlacementFailed       the cluster cannot place a worker
"""

from __future__ import annotations

import enum


class TwinpoolError(Exception):
    """Base of every error that Twinpool raises on purpose. Its text is one sentence fit for a user."""


class InvalidRequest(TwinpoolError):
    """A request that no retry can make right.

    ``param`` is the offending parameter as the client spelled it, or None when it concerns the whole body;
    ``code`` is a short machine-readable word such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(TwinpoolError):
    """A configuration that cannot work; the text names the flag, its value and what would be right."""


class ModelFileError(TwinpoolError):
    """A model file that cannot be served; the text names the file and what is wrong with it."""


class BrokenContract(TwinpoolError):
    """A value that breaks an invariant of the contract's types. From a peer's message it becomes a refusal (MALFORMED)."""


class RefusalCode(enum.Enum):
    """Why a peer declined one operation. The values are the wire's words (see ``common.proto``)."""

    RESOURCE_EXHAUSTED = 1
    """No pages now and the waiting list is full; try again or elsewhere."""
    TOO_LARGE = 2
    """Can never fit this worker's pool."""
    STALE_ATTEMPT = 3
    """A newer attempt of the same sequence has been issued."""
    UNKNOWN_RESERVATION = 4
    """Never issued here, released, or issued by an earlier incarnation."""
    LEASE_EXPIRED = 5
    """No router named the sequence for one lease."""
    CHECKSUM_MISMATCH = 6
    """The bytes are not those that were sent."""
    MALFORMED = 7
    """The frame or message breaks its format."""
    INCOMPLETE = 8
    """A commit arrived before every byte of its plan."""
    TOKEN_MISMATCH = 9
    """A second commit of the same attempt names another token."""
    LAYOUT_MISMATCH = 10
    """No transfer plan covers this pair of page layouts."""
    MODEL_MISMATCH = 11
    """Worker and router, or the two workers, hold different models."""
    DRAINING = 12
    """The worker takes no new work."""


class Refused(TwinpoolError):
    """A peer declined one operation; nothing changed on its side."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class OutOfPages(TwinpoolError):
    """An allocation is larger than the number of free pages; nothing was allocated."""

    def __init__(self, *, num_requested: int, num_free: int) -> None:
        super().__init__(f"{num_requested} pages were requested and {num_free} are free")
        self.num_requested = num_requested
        self.num_free = num_free


class WorkerLost(TwinpoolError):
    """The worker that held the sequence died, was restarted or stopped answering."""


class NoCapacity(TwinpoolError):
    """Nothing can take the request in the time allowed. ``retry_after_s`` is a hint for the client; ``is_queue_full`` says that
    it was turned away at once, because as many are waiting as may (HTTP 429 instead of 503)."""

    def __init__(self, message: str, *, retry_after_s: float, is_queue_full: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_queue_full = is_queue_full


class PlacementFailed(TwinpoolError):
    """The cluster lacks a resource that a worker needs; the text names it and what the cluster has."""

"""Chooses workers for one sequence. Pure: a function of loads, without clock, network or memory of earlier choices."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.generation import Path
from serving_core.ids import WorkerId
from serving_core.page_demand import PageDemand
from serving_core.worker_status import PhaseName


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One registered worker as placement sees it, by the router's own count of what it assigned.

    ``can_take_work``: ready, and not held back after a refusal. Pages are of the worker's own pool and ``page_size`` tokens;
    ``num_free_pages`` is below zero where sequences have grown beyond the pool and some will have to go.
    ``num_queued_prefill_tokens``: prompt tokens assigned to it whose token 0 has not been seen.
    """

    worker_id: WorkerId
    phases: frozenset[PhaseName]
    can_take_work: bool
    page_size: int
    num_free_pages: int
    num_running: int
    max_num_seqs: int
    num_queued_prefill_tokens: int
    max_prefill_tokens_per_step: int

    def can_hold(self, demand: PageDemand) -> bool:
        """Whether a decode slot and the pages for ``demand`` are free."""
        return self.num_running < self.max_num_seqs and demand.num_pages(self.page_size) <= self.num_free_pages

    @property
    def can_start_at_once(self) -> bool:
        """What is queued fits one prefill step, so a new prompt begins with the next one."""
        return self.num_queued_prefill_tokens <= self.max_prefill_tokens_per_step


class Reason(enum.Enum):
    """Why a path was taken. The values are those of ``x-twinpool-reason`` and of ``pd_decision_total``."""

    TWO_POOLS = "two_pools"
    """Prefill and decode run on different workers."""
    COLOCATED = "colocated"
    """The decode worker has prefill mounted as well."""
    RETRY = "retry"
    """An earlier attempt of the same sequence failed."""
    EVICTION = "eviction"
    """The sequence had to leave a worker that ran out of pages."""


class NotNow(enum.Enum):
    """Why no placement exists at this moment; any change of a load may lift it."""

    NO_DECODE_WORKER = "no_decode_worker"
    NO_PREFILL_WORKER = "no_prefill_worker"
    DECODE_FULL = "decode_full"
    PREFILL_BUSY = "prefill_busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Both legs of one attempt. On the local path they name the same worker."""

    decode: WorkerId
    prefill: WorkerId
    path: Path
    reason: Reason


def place(loads: Sequence[WorkerLoad], *, demand: PageDemand, avoid: frozenset[WorkerId] = frozenset()) -> Placement | NotNow:
    """Where a sequence that holds nothing should go.

    A decode worker needs pages for ``demand``; among those, the one with the fewest sequences, then the most free pages.
    Its prefill worker must be able to start at once, since pages reserved earlier would lie idle. Workers to ``avoid`` are
    taken only where there is no other.
    """
    decoders = [load for load in loads if PhaseName.DECODE in load.phases and load.can_take_work]
    if not decoders:
        return NotNow.NO_DECODE_WORKER
    if not any(PhaseName.PREFILL in load.phases and load.can_take_work for load in loads):
        return NotNow.NO_PREFILL_WORKER
    with_room = [load for load in decoders if load.can_hold(demand)]
    if not with_room:
        return NotNow.DECODE_FULL
    for decode in sorted(with_room, key=lambda load: _decode_preference(load, avoid)):
        prefill = _idlest((load for load in _prefill_candidates(decode, loads) if load.can_start_at_once), avoid)
        if prefill is not None:
            return _placement(decode, prefill)
    return NotNow.PREFILL_BUSY


def place_again(
    loads: Sequence[WorkerLoad],
    *,
    demand: PageDemand,
    keep_decode: WorkerId | None,
    keep_prefill: WorkerId | None,
    avoid: frozenset[WorkerId] = frozenset(),
) -> Placement | NotNow:
    """Where the next attempt of a sequence should go, staying with the workers that still hold something for it.

    ``keep_decode`` and ``keep_prefill`` name those workers, or are None where nothing is held. A kept worker needs no fresh
    room and may be draining. A new prefill worker may be busy: the client has been waiting already, and the decode pages are
    taken in any case. Workers to ``avoid`` are taken only where there is no other.
    """
    by_id = {load.worker_id: load for load in loads}
    if keep_decode is not None:
        decoders = [by_id[keep_decode]]
    else:
        ready = (load for load in loads if PhaseName.DECODE in load.phases and load.can_take_work)
        decoders = sorted((load for load in ready if load.can_hold(demand)), key=lambda load: _decode_preference(load, avoid))
    if not decoders:
        return NotNow.NO_DECODE_WORKER
    decode = decoders[0]
    if keep_prefill is not None and (PhaseName.PREFILL not in decode.phases or keep_prefill == decode.worker_id):
        prefill: WorkerLoad | None = by_id[keep_prefill]
    else:
        prefill = _idlest(_prefill_candidates(decode, loads), avoid)
    if prefill is None:
        return NotNow.NO_PREFILL_WORKER
    return _placement(decode, prefill, reason=Reason.RETRY)


def _decode_preference(load: WorkerLoad, avoid: frozenset[WorkerId]) -> tuple[bool, int, int, WorkerId]:
    return load.worker_id in avoid, load.num_running, -load.num_free_pages, load.worker_id


def _prefill_candidates(decode: WorkerLoad, loads: Sequence[WorkerLoad]) -> list[WorkerLoad]:
    if PhaseName.PREFILL in decode.phases:
        return [decode] if decode.can_take_work else []
    return [load for load in loads if PhaseName.PREFILL in load.phases and load.can_take_work]


def _idlest(loads: Iterable[WorkerLoad], avoid: frozenset[WorkerId]) -> WorkerLoad | None:
    return min(loads, key=lambda load: (load.worker_id in avoid, load.num_queued_prefill_tokens, load.worker_id), default=None)


def _placement(decode: WorkerLoad, prefill: WorkerLoad, *, reason: Reason | None = None) -> Placement:
    is_local = decode.worker_id == prefill.worker_id
    return Placement(
        decode=decode.worker_id,
        prefill=prefill.worker_id,
        path=Path.LOCAL if is_local else Path.PAIR,
        reason=reason or (Reason.COLOCATED if is_local else Reason.TWO_POOLS),
    )

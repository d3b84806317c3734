"""What must hold of a worker's pages between any two steps, whatever went before: who owns which, and what they contain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from decode_worker.decode_phase import DecodePhase
from decode_worker.decode_sequence import DecodeState
from llm_engine.page_hash import page_hashes
from llm_engine.page_pool import PagePool
from llm_engine.step_plan import StepPlan
from prefill_worker.prefill_phase import PrefillPhase
from prefill_worker.prefill_sequence import PrefillSequence
from serving_core.ids import PageId
from serving_core.page_state import PageOwner, PageState
from tests.phases import DecodeSide, FakeCache, PrefillSide

Claim = tuple[PageOwner, Sequence[PageId]]


def audit_decode(side: DecodeSide, salts: Iterable[bytes]) -> None:
    """Owners are the living sequences, and both their pages and the index's hold the texts that they should."""
    audit_owners(side.pool, side.phase)
    _audit_index(side.pool, side.cache, salts)
    for sequence in side.phase._held._sequences.values():
        if sequence.state is DecodeState.DECODING:
            assert sequence.reservation is not None
            text = [*sequence.request.prompt_token_ids, *sequence.output_token_ids[: sequence.num_cached_outputs]]
            held = side.cache.keys(sequence.reservation.page_ids, len(text))
            assert held == text, f"decode's pages of {sequence.key} hold another text"


def audit_prefill(side: PrefillSide, salts: Iterable[bytes]) -> None:
    """As ``audit_decode``."""
    audit_owners(side.pool, side.phase)
    _audit_index(side.pool, side.cache, salts)
    for sequence in _prefill_sequences(side.phase):
        if sequence.page_ids and not sequence.is_local:
            held = side.cache.keys(sequence.page_ids, sequence.num_computed)
            text = sequence.request.prompt_token_ids[: sequence.num_computed]
            assert held == list(text), f"prefill's pages of {sequence.key} hold another text"


def assert_nothing_shared_is_written(pool: PagePool, plan: StepPlan) -> None:
    """A step's rows write into pages that belong to their sequences alone and that no index knows."""
    for row in plan.rows:
        for page_id in row.page_ids[row.start_position // pool.page_size :]:
            assert len(set(pool.owners(page_id))) == 1, f"page {page_id} is written and shared"
            assert page_id not in pool._index, f"page {page_id} is written and in the prefix index"


def audit_owners(pool: PagePool, *phases: DecodePhase | PrefillPhase) -> None:
    """States sum to the pool, its index agrees with it, and what is neither free nor cached belongs to sequences that these
    phases hold, as they say themselves."""
    pool.check()
    snapshot = pool.snapshot()
    assert snapshot.is_sum_ok
    expected: dict[PageId, Counter[PageOwner]] = defaultdict(Counter)
    for owner, page_ids in (claim for phase in phases for claim in _claims(phase)):
        for page_id in page_ids:
            expected[page_id][owner] += 1
    for record in snapshot.pages:
        claimed = expected.pop(record.page_id, Counter())
        assert Counter(record.owners) == claimed, f"page {record.page_id}: {record.owners}, held by {claimed}"
        assert record.owners or record.state is PageState.CACHED, f"page {record.page_id} is {record.state} and nobody's"
    assert not expected, f"living sequences hold pages that are free: {dict(expected)}"


def _audit_index(pool: PagePool, cache: FakeCache, salts: Iterable[bytes]) -> None:
    size = pool.page_size
    for page_id, entry in pool._index._entries.items():
        keys = cache.keys([page_id], size)
        if entry.parent is None:
            hashes = {page_hashes(keys, page_size=size, salt=salt)[0] for salt in salts}
        else:
            hashes = {page_hashes([0] * size + keys, page_size=size, salt=b"", known=[entry.parent])[1]}
        assert entry.page_hash in hashes, f"page {page_id} holds another text than the index says"


def _claims(phase: DecodePhase | PrefillPhase) -> Iterator[Claim]:
    if isinstance(phase, DecodePhase):
        for held in phase._held._sequences.values():
            if held.reservation is not None:
                yield held.owner, held.reservation.page_ids
        for row in (row for rows in phase._under_way for row in rows):
            yield row.owner, row.written_page_ids
        return
    for sequence in _prefill_sequences(phase):
        if not sequence.is_local:  # lent pages are decode's
            yield sequence.owner, sequence.page_ids


def _prefill_sequences(phase: PrefillPhase) -> list[PrefillSequence]:
    """The held ones, and those that a hand-off still reads."""
    sequences = (*phase._sequences.values(), *phase._by_open_handoff.values())
    return list({id(sequence): sequence for sequence in sequences}.values())

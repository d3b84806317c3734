from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serving_core.ids import RequestId, SequenceKey
from serving_core.lease_table import LeaseTable

A, B, C = (SequenceKey(RequestId(name)) for name in "abc")


def test_a_lease_ends_after_its_length_and_is_reported_once() -> None:
    leases = LeaseTable(6.0)
    leases.grant(A, 10.0)
    assert leases.expired(15.9) == []
    assert leases.expired(16.0) == [A]
    assert leases.expired(99.0) == []
    assert A not in leases
    assert leases.next_deadline is None


def test_only_those_named_are_extended() -> None:
    leases = LeaseTable(6.0)
    leases.grant(A, 0.0)
    leases.grant(B, 0.0)
    leases.renew([B], 4.0)
    assert leases.next_deadline == 6.0
    assert leases.expired(6.0) == [A]
    assert leases.next_deadline == 10.0
    assert leases.expired(10.0) == [B]


def test_naming_an_unknown_sequence_creates_no_state() -> None:
    leases = LeaseTable(6.0)
    leases.renew([A], 0.0)
    leases.drop(A)
    assert len(leases) == 0
    assert leases.expired(1000.0) == []


def test_a_lease_granted_again_after_a_drop_runs_its_full_length() -> None:
    leases = LeaseTable(6.0)
    leases.grant(A, 0.0)
    leases.drop(A)
    leases.grant(A, 5.0)
    assert leases.expired(6.0) == []
    assert leases.expired(11.0) == [A]


def test_the_oldest_deadline_comes_first() -> None:
    leases = LeaseTable(6.0)
    for now, key in ((0.0, C), (1.0, A), (2.0, B)):
        leases.grant(key, now)
    assert leases.expired(50.0) == [C, A, B]


class LeaseTableMachine(RuleBasedStateMachine):
    """Any order of calls against a plain dict of deadlines."""

    keys = st.sampled_from([SequenceKey(RequestId(f"r{number}")) for number in range(5)])

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leases = LeaseTable(6.0)
        self.model: dict[SequenceKey, float] = {}

    @rule(key=keys)
    def grant(self, key: SequenceKey) -> None:
        self.leases.grant(key, self.now)
        self.model[key] = self.now + 6.0

    @rule(keys=st.frozensets(keys))
    def renew(self, keys: frozenset[SequenceKey]) -> None:
        self.leases.renew(keys, self.now)
        for key in keys & self.model.keys():
            self.model[key] = self.now + 6.0

    @rule(key=keys)
    def drop(self, key: SequenceKey) -> None:
        self.leases.drop(key)
        self.model.pop(key, None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 5.5, 6.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        over = {key for key, deadline in self.model.items() if deadline <= self.now}
        expired = self.leases.expired(self.now)
        assert sorted(expired) == sorted(over)
        assert [self.model[key] for key in expired] == sorted(self.model[key] for key in expired)
        for key in over:
            del self.model[key]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.leases) == len(self.model)
        assert self.leases.next_deadline == min(self.model.values(), default=None)


TestLeaseTableMachine = LeaseTableMachine.TestCase
TestLeaseTableMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

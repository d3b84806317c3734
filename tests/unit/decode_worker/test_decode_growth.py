"""Pages are taken as sequences grow; when none are left the youngest goes, and nobody goes for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from decode_worker.admission_check import AdmissionCheck
from llm_engine.token_rules import TokenRules
from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import RequestId, SequenceKey, WorkerId
from serving_core.page_state import PageOwner, PageState
from serving_core.token_event import SequenceEvicted
from serving_core.transfer_ticket import TransferTicket
from tests.pages import assert_no_leaks
from tests.phases import (
    LAYOUT,
    MAX_MODEL_LEN,
    NUM_TOKENS,
    DecodeSide,
    expected_tokens,
    make_commit,
    make_request,
    next_token,
    prompt_segments,
)


def code_of(call: Callable[[], object]) -> RefusalCode:
    with pytest.raises(Refused) as refused:
        call()
    return refused.value.code


def long(name: str, num_prompt_tokens: int = 3, *, max_tokens: int = 13) -> GenerateRequest:
    """One page at first; with 13 tokens four at its longest."""
    return make_request(num_prompt_tokens, name=name, max_tokens=max_tokens)


def resumed(decode: DecodeSide, request: GenerateRequest) -> GenerateRequest:
    """The request as its router asks for it again: with all that decode sent."""
    return replace(request, output_token_ids=tuple(decode.token_ids(request.key, 1)))


def answer_of(request: GenerateRequest) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)


def test_pages_are_taken_as_the_sequence_grows() -> None:
    decode = DecodeSide()
    request = long("a")
    decode.begin(request)
    num_pages = [decode.pool.counts()[PageState.USED]]
    while decode.step() is not None:
        num_pages.append(decode.pool.counts()[PageState.USED])
    assert num_pages == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 0]  # the thirteenth token is never computed with
    assert decode.token_ids(request.key) == answer_of(request)
    assert_no_leaks(decode.pool)


def test_each_sequence_that_may_grow_keeps_one_page_free_of_newcomers() -> None:
    decode = DecodeSide(num_pages=5)
    # 1. Two that may grow have a page each; of the three that are free, one more may take one.
    decode.begin(long("a"))
    decode.begin(long("b"))
    large = decode.ask(make_request(6, name="large", max_tokens=2))
    assert large == []
    decode.phase.abort(make_request(name="large").key, 1)
    decode.begin(make_request(3, name="small", max_tokens=1))
    # 2. One that has all it can need keeps nothing free.
    decode = DecodeSide(num_pages=3)
    decode.begin(make_request(6, name="whole", max_tokens=2))
    assert decode.reserve(make_request(3, name="small", max_tokens=1))


def test_the_youngest_goes_when_pages_run_out_and_the_others_do_not_notice() -> None:
    decode = DecodeSide(num_pages=6)
    old, middle, young = (long(name) for name in ("old", "middle", "young"))
    for request in (old, middle, young):
        decode.begin(request)
    # 1. Each has two pages when the oldest needs a third.
    while not decode.sink.evictions:
        assert decode.step() is not None
        decode.pool.check()
    assert decode.sink.evictions == [SequenceEvicted(key=young.key, attempt=1)]
    assert decode.phase.counters.num_preemptions == 1
    assert decode.phase.status().num_running == 2
    log = decode.token_ids(young.key)
    assert log == answer_of(young)[: len(log)]
    # 2. The others go on; where they need more than the pool has, the next youngest goes.
    decode.run_out()
    assert decode.token_ids(old.key) == answer_of(old)
    assert decode.sink.failures == []
    # 3. What was evicted comes back with its log and gets the same answer.
    for request in (middle, young):
        if decode.token_ids(request.key) != answer_of(request):
            again = resumed(decode, request)
            decode.begin(again, 2, num_evictions=1)
            decode.run_out()
            assert (again.output_token_ids + tuple(decode.token_ids(request.key, 2)[1:])) == tuple(answer_of(request))
    assert_no_leaks(decode.pool)


def test_a_reservation_that_waits_for_its_commit_goes_too() -> None:
    decode = DecodeSide(num_pages=3)
    old, young = long("old", max_tokens=8), long("young", max_tokens=8)
    decode.begin(old)
    ticket = decode.reserve(young)
    decode.phase.accept(prompt_segments(ticket, young))
    # 1. The oldest needs the page.
    decode.run_out()
    assert decode.sink.evictions == [SequenceEvicted(key=young.key, attempt=1)]
    assert decode.token_ids(old.key) == answer_of(old)
    # 2. Its ticket is void.
    assert code_of(lambda: decode.phase.accept(prompt_segments(ticket, young))) is RefusalCode.UNKNOWN_RESERVATION
    commit = make_commit(ticket, next_token(young.prompt_token_ids))
    assert code_of(lambda: decode.phase.commit(commit)) is RefusalCode.UNKNOWN_RESERVATION
    assert code_of(lambda: decode.reserve(young, 1)) is RefusalCode.STALE_ATTEMPT
    assert decode.reserve(young, 2).attempt == 2
    decode.phase.abort(young.key, 2)
    assert_no_leaks(decode.pool)


def test_a_young_one_that_needs_a_page_goes_itself() -> None:
    # 1. The old one waits for its prompt; of four pages the last is gone otherwise.
    decode = DecodeSide(num_pages=4)
    old, young = long("old"), make_request(6, name="young", max_tokens=6)
    decode.reserve(old)
    ticket = decode.begin(young)
    decode.pool.allocate(1, PageOwner(key=SequenceKey(RequestId("other")), attempt=1), PageState.USED)
    # 2. The young one runs and needs a third.
    decode.run_out()
    assert decode.sink.evictions == [SequenceEvicted(key=young.key, attempt=1)]
    assert decode.phase.status().num_running == 1
    # 3. A commit that is repeated gets the answer it got.
    decode.phase.commit(make_commit(ticket, next_token(young.prompt_token_ids)))


def test_the_oldest_waits_for_pages_that_are_not_decodes() -> None:
    decode = DecodeSide(num_pages=4)
    old = long("old")
    decode.begin(old)
    # 1. The prefill phase beside holds the rest of the pool.
    others = PageOwner(key=SequenceKey(RequestId("other")), attempt=1)
    page_ids = decode.pool.allocate(3, others, PageState.USED)
    decode.run_out()
    assert decode.sink.evictions == []
    assert len(decode.token_ids(old.key)) == 2
    # 2. When it gives them back, the sequence goes on.
    decode.pool.release(page_ids, others)
    decode.run_out()
    assert decode.token_ids(old.key) == answer_of(old)
    assert_no_leaks(decode.pool)


def test_each_eviction_doubles_the_room_to_grow_up_to_what_is_needed() -> None:
    rules = TokenRules(eos_token_ids=frozenset(), num_tokens=NUM_TOKENS, max_model_len=MAX_MODEL_LEN)
    check = AdmissionCheck(worker_id=WorkerId("decode-0"), layout=LAYOUT, rules=rules, num_pages=16)
    request = make_request(6, max_tokens=50)  # 14 pages at its longest
    assert [check.first_pages_for(request, number) for number in (0, 1, 2, 3, 4, 2**32 - 1)] == [2, 4, 6, 10, 14, 14]
    with_log = replace(request, output_token_ids=tuple(range(9)))
    assert [check.first_pages_for(with_log, number) for number in (0, 1, 2)] == [4, 6, 8]


def test_one_that_is_reserved_all_it_needs_waits_until_nobody_can_push_it_out() -> None:
    decode = DecodeSide(num_pages=8)
    old, again = long("old"), replace(long("again"), output_token_ids=tuple(answer_of(long("again"))[:1]))
    blocker = make_request(7, name="blocker", max_tokens=1)
    # 1. It needs four pages. Five are free, but the old one may yet need three of them.
    decode.begin(old)
    decode.reserve(blocker)
    assert decode.ask(again, 2, num_evictions=2) == []
    # 2. With those of the blocker it is let in, and stays to its end beside the other.
    decode.phase.abort(blocker.key, 1)
    decode.step()
    ticket = decode.reserve(again, 2)
    assert isinstance(ticket, TransferTicket)
    assert decode.pool.counts()[PageState.RESERVED] == 4
    decode.phase.accept(prompt_segments(ticket, again))
    decode.phase.commit(make_commit(ticket, next_token(again.prompt_token_ids)))
    decode.run_out()
    assert decode.sink.evictions == []
    assert decode.token_ids(old.key) == answer_of(old)
    assert decode.token_ids(again.key) == answer_of(again)
    assert_no_leaks(decode.pool)


def test_pages_that_lack_for_no_fault_of_the_settled_one_are_waited_for() -> None:
    decode = DecodeSide(num_pages=8)
    old, settled = long("old"), long("settled")
    decode.begin(old)
    decode.begin(settled, num_evictions=2)
    others = PageOwner(key=SequenceKey(RequestId("other")), attempt=1)
    page_ids = decode.pool.allocate(3, others, PageState.USED)
    decode.run_out()
    assert decode.token_ids(settled.key) == answer_of(settled)
    assert decode.sink.evictions == []
    decode.pool.release(page_ids, others)
    decode.run_out()
    assert decode.token_ids(old.key) == answer_of(old)
    assert_no_leaks(decode.pool)

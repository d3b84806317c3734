"""Every message of the contract survives the wire, and one that breaks the contract is refused, not a crash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.page_state import PageOwner, PageRecord, PagesSnapshot, PageState
from serving_core.rpc import convert
from serving_core.rpc.v1 import common_pb2, router_link_pb2
from serving_core.sampling_params import MAX_SEED, SamplingParams
from serving_core.token_event import (
    FailureKind,
    FinishReason,
    SequenceEvent,
    SequenceEvicted,
    SequenceFailed,
    TokenEvent,
    TokenLogprobs,
)
from serving_core.transfer_ticket import HandoffCommit, TransferTicket
from serving_core.worker_status import MetricFamily, MetricSample, PhaseName, WorkerHello, WorkerStatus

LAYOUT = KVPageLayout(num_layers=2, num_kv_heads=3, head_dim=64, page_size=16, dtype=KVDType.BFLOAT16)
KEY = SequenceKey(RequestId("request-1"), 2)

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(5, 10_000),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1000),
    seed=st.integers(0, MAX_SEED),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
)


@given(
    sampling=samplings,
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5).map(tuple),
    outputs=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
)
def test_request_round_trip(sampling: SamplingParams, prompt: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    request = GenerateRequest(key=KEY, prompt_token_ids=prompt, sampling=sampling, output_token_ids=outputs)
    assert convert.request_from_pb(convert.request_to_pb(request)) == request


def test_ticket_and_commit_round_trip() -> None:
    ticket = TransferTicket(
        reservation_id=ReservationId("0" * 32),
        key=KEY,
        attempt=3,
        decode_worker_id=WorkerId("decode-0"),
        decode_incarnation=Incarnation("abc"),
        decode_address="127.0.0.1:1",
        layout=LAYOUT,
        num_prompt_tokens=40,
        num_cached_tokens=16,
        lease_s=6.0,
    )
    assert convert.ticket_from_pb(convert.ticket_to_pb(ticket)) == ticket
    assert (ticket.first_page, ticket.num_prompt_pages) == (1, 3)
    for logprobs in (None, TokenLogprobs(logprob=-0.5, top=((7, -0.5), (9, -1.5)))):
        commit = HandoffCommit(
            reservation_id=ReservationId("0" * 32), key=KEY, attempt=3, token_id=7, logprobs=logprobs, num_bytes_sent=2**40
        )
        assert convert.commit_from_pb(convert.commit_to_pb(commit)) == commit


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent(key=KEY, attempt=1, index=0, token_id=5),
        TokenEvent(key=KEY, attempt=1, index=9, token_id=5, finish_reason=FinishReason.LENGTH),
        TokenEvent(key=KEY, attempt=1, index=0, token_id=5, logprobs=TokenLogprobs(logprob=-1.0)),
        SequenceFailed(key=KEY, attempt=2, kind=FailureKind.INTERNAL, message="why"),
        SequenceEvicted(key=KEY, attempt=2),
    ],
)
def test_event_round_trip(event: SequenceEvent) -> None:
    assert convert.event_from_pb(convert.event_to_pb(event)) == event


def test_worker_messages_round_trip() -> None:
    hello = WorkerHello(
        worker_id=WorkerId("both-0"),
        incarnation=Incarnation("abc"),
        phases=frozenset(PhaseName),
        address="127.0.0.1:1",
        node="here",
        pids=(1, 2),
        tensor_parallel_size=2,
        model_name="model",
        model_print="print",
        prefill_arithmetic="torch bfloat16",
        decode_arithmetic="native auto",
        layout=LAYOUT,
        num_pages=7,
        max_model_len=128,
        max_num_seqs=4,
        max_prefill_tokens_per_step=64,
    )
    assert convert.hello_from_pb(convert.hello_to_pb(hello)) == hello
    sample = MetricSample(name="x_total", labels=(("a", "1"), ("b", "2")), value=3.0)
    family = MetricFamily(name="x", documentation="what x is", kind="counter", samples=(sample,))
    status = WorkerStatus(num_running=1, num_waiting=2, is_draining=True, metrics=(family,))
    assert convert.status_from_pb(convert.status_to_pb(status)) == status
    page = PageRecord(
        page_id=PageId(3), generation=2, state=PageState.FILLING, owners=(PageOwner(key=KEY, attempt=2),), age_s=0.25
    )
    counts = dict.fromkeys(PageState, 0) | {PageState.FREE: 6, PageState.FILLING: 1}
    snapshot = PagesSnapshot(page_size=16, num_pages=7, counts=counts, pages=(page,))
    assert convert.pages_from_pb(convert.pages_to_pb(snapshot)) == snapshot
    assert snapshot.is_sum_ok


@pytest.mark.parametrize("code", list(RefusalCode))
def test_refusal_round_trip(code: RefusalCode) -> None:
    refused = convert.refusal_from_pb(convert.refusal_to_pb(Refused(code, "why")))
    assert (refused.code, str(refused)) == (code, "why")


def test_the_wire_knows_every_refusal_code_by_the_same_number() -> None:
    wire = {name.removeprefix("REFUSAL_CODE_"): value for name, value in common_pb2.RefusalCode.items() if value}
    assert wire == {code.name: code.value for code in RefusalCode}


def test_messages_that_break_the_contract_are_refused() -> None:
    good = convert.request_to_pb(
        GenerateRequest(key=KEY, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, temperature=0))
    )
    empty_prompt = common_pb2.GenerateRequest()
    empty_prompt.CopyFrom(good)
    del empty_prompt.prompt_token_ids[:]
    no_key = common_pb2.GenerateRequest()
    no_key.CopyFrom(good)
    no_key.ClearField("key")
    bad_sampling = common_pb2.GenerateRequest()
    bad_sampling.CopyFrom(good)
    bad_sampling.sampling.temperature = float("nan")
    for message in (empty_prompt, no_key, bad_sampling):
        with pytest.raises(Refused) as refused:
            convert.request_from_pb(message)
        assert refused.value.code is RefusalCode.MALFORMED
    with pytest.raises(Refused, match="phases"):
        convert.hello_from_pb(router_link_pb2.WorkerHello(worker_id="w"))
    with pytest.raises(Refused, match="page layout"):
        convert.layout_from_pb(common_pb2.KVPageLayout(dtype="float32"))
    with pytest.raises(Refused, match="int3"):
        convert.layout_from_pb(common_pb2.KVPageLayout(dtype="int3"))
    with pytest.raises(Refused, match="kind"):
        convert.event_from_pb(common_pb2.SequenceEvent())

"""Every message of the contract survives the wire, and one that breaks the contract is refused, not a crash."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, SequenceKey, WorkerId
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.page_state import PageOwner, PageRecord, PagesSnapshot, PageState
from serving_core.rpc import convert
from serving_core.rpc.v1 import common_pb2
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
REQUEST = GenerateRequest(
    key=KEY,
    prompt_token_ids=(1, 2),
    output_token_ids=(3,),
    sampling=SamplingParams(max_tokens=4, stop_token_ids=(5,), num_logprobs=1, logit_bias=((6, 1.0),)),
    cache_salt=b"\xff salt",
)
TICKET = TransferTicket(
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
COMMIT = HandoffCommit(
    reservation_id=ReservationId("0" * 32),
    key=KEY,
    attempt=3,
    token_id=7,
    logprobs=TokenLogprobs(logprob=-0.5, top=((7, -0.5),)),
    num_bytes_sent=2**40,
    num_cached_tokens=16,
)
HELLO = WorkerHello(
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
SAMPLE = MetricSample(name="x_total", labels=(("a", "1"), ("b", "2")), value=3.0)
STATUS = WorkerStatus(
    num_running=1,
    num_waiting=2,
    is_draining=True,
    metrics=(MetricFamily(name="x", documentation="what x is", kind="counter", samples=(SAMPLE,)),),
)
SNAPSHOT = PagesSnapshot(
    page_size=16,
    num_pages=7,
    counts=dict.fromkeys(PageState, 0) | {PageState.FREE: 6, PageState.FILLING: 1},
    pages=(
        PageRecord(
            page_id=PageId(3), generation=2, state=PageState.FILLING, owners=(PageOwner(key=KEY, attempt=2),), age_s=0.25
        ),
    ),
)
HELLO_COUNTS = ("tensor_parallel_size", "num_pages", "max_model_len", "max_num_seqs", "max_prefill_tokens_per_step")

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
    salt=st.binary(max_size=1024),
)
def test_request_round_trip(sampling: SamplingParams, prompt: tuple[int, ...], outputs: tuple[int, ...], salt: bytes) -> None:
    request = GenerateRequest(key=KEY, prompt_token_ids=prompt, sampling=sampling, output_token_ids=outputs, cache_salt=salt)
    assert convert.request_from_pb(convert.request_to_pb(request)) == request


def test_ticket_and_commit_round_trip() -> None:
    assert convert.ticket_from_pb(convert.ticket_to_pb(TICKET)) == TICKET
    assert (TICKET.first_page, TICKET.num_prompt_pages) == (1, 3)
    for commit in (COMMIT, replace(COMMIT, logprobs=None)):
        assert convert.commit_from_pb(convert.commit_to_pb(commit)) == commit


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent(key=KEY, attempt=1, index=0, token_id=5, num_cached_tokens=32),
        TokenEvent(key=KEY, attempt=1, index=9, token_id=5, finish_reason=FinishReason.LENGTH),
        TokenEvent(key=KEY, attempt=1, index=0, token_id=5, logprobs=TokenLogprobs(logprob=-1.0)),
        SequenceFailed(key=KEY, attempt=2, kind=FailureKind.INTERNAL, message="why"),
        SequenceEvicted(key=KEY, attempt=2),
    ],
)
def test_event_round_trip(event: SequenceEvent) -> None:
    assert convert.event_from_pb(convert.event_to_pb(event)) == event


def test_worker_messages_round_trip() -> None:
    assert convert.hello_from_pb(convert.hello_to_pb(HELLO)) == HELLO
    assert convert.status_from_pb(convert.status_to_pb(STATUS)) == STATUS
    assert convert.pages_from_pb(convert.pages_to_pb(SNAPSHOT)) == SNAPSHOT
    assert SNAPSHOT.is_sum_ok


@pytest.mark.parametrize("code", list(RefusalCode))
def test_refusal_round_trip(code: RefusalCode) -> None:
    refused = convert.refusal_from_pb(convert.refusal_to_pb(Refused(code, "why")))
    assert (refused.code, str(refused)) == (code, "why")


def test_the_wire_knows_every_refusal_code_by_the_same_number() -> None:
    wire = {name.removeprefix("REFUSAL_CODE_"): value for name, value in common_pb2.RefusalCode.items() if value}
    assert wire == {code.name: code.value for code in RefusalCode}


def refusal_of(convert_message: Callable[[Any], object], message: Message) -> str:
    with pytest.raises(Refused) as refused:
        convert_message(message)
    assert refused.value.code is RefusalCode.MALFORMED
    return str(refused.value)


def test_requests_that_break_the_contract_are_refused() -> None:
    message = convert.request_to_pb(REQUEST)
    del message.prompt_token_ids[:]
    assert "a prompt holds at least one token" in refusal_of(convert.request_from_pb, message)
    message = convert.request_to_pb(REQUEST)
    message.ClearField("key")
    assert "the request id is empty" in refusal_of(convert.request_from_pb, message)
    message = convert.request_to_pb(REQUEST)
    message.key.request_id = "r" * 257
    assert "has 257 characters but may have at most 256" in refusal_of(convert.request_from_pb, message)
    message = convert.request_to_pb(REQUEST)
    message.sampling.temperature = math.nan
    assert "temperature is nan" in refusal_of(convert.request_from_pb, message)
    message = convert.request_to_pb(REQUEST)
    message.cache_salt = bytes(1025)
    assert "the cache salt has 1025 bytes, above 1024" in refusal_of(convert.request_from_pb, message)
    assert "the router's id is empty" in refusal_of(convert.router_id_from_pb, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        *(("lease_s", lease_s, "the lease is") for lease_s in (math.nan, math.inf, -math.inf, -1.0, 0.0, 3600.5)),
        *(
            ("reservation_id", text, "32 hexadecimal digits")
            for text in ("", "r", "G" * 32, "0" * 31, "A" * 32, "0" * 32 + "\n")
        ),
        ("attempt", 0, "attempt 0 is below 1"),
        ("decode_worker_id", "", "decode worker's id is empty"),
        ("decode_incarnation", "", "decode worker's incarnation is empty"),
        ("decode_address", "unix:/tmp/socket", "'unix:/tmp/socket' but must be HOST:PORT"),
        ("num_prompt_tokens", 0, "cached tokens"),
    ],
)
def test_tickets_that_break_the_contract_are_refused(field: str, value: object, said: str) -> None:
    message = convert.ticket_to_pb(TICKET)
    setattr(message, field, value)
    assert said in refusal_of(convert.ticket_from_pb, message)


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "a b:1",
        "::1:1",
        "unix:x",
        "dns:///a:1",
        "a:1\n",
        "a:\u0661",
    ],
)
def test_addresses_are_host_and_port(address: str) -> None:
    message = convert.hello_to_pb(HELLO)
    message.address = address
    assert "HOST:PORT" in refusal_of(convert.hello_from_pb, message)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "node-1.cluster_a.internal:80", "[::1]:5"])
def test_addresses_of_every_kind_are_taken(address: str) -> None:
    assert convert.hello_from_pb(convert.hello_to_pb(replace(HELLO, address=address))).address == address


def test_commits_that_break_the_contract_are_refused() -> None:
    for field, value in (("reservation_id", ""), ("attempt", 0)):
        message = convert.commit_to_pb(COMMIT)
        setattr(message, field, value)
        refusal_of(convert.commit_from_pb, message)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("worker_id", "", "worker's id is empty"),
        ("incarnation", "", "worker's incarnation is empty"),
        ("phases", [], "0 phases"),
        ("phases", ["embedding"], "embedding"),
        ("pids", [], "0 processes"),
        *((field, 0, f"{field} of worker both-0 is 0 but must be at least 1") for field in HELLO_COUNTS),
    ],
)
def test_hellos_that_break_the_contract_are_refused(field: str, value: object, said: str) -> None:
    message = convert.hello_to_pb(HELLO)
    message.ClearField(field)  # type: ignore[arg-type]
    if isinstance(value, list):
        getattr(message, field).extend(value)
    assert said in refusal_of(convert.hello_from_pb, message)


def test_statuses_whose_metrics_would_spoil_the_others_are_refused() -> None:
    for field, value in (("name", "a b"), ("name", ""), ("kind", "enum")):
        message = convert.status_to_pb(STATUS)
        setattr(message.metrics[0], field, value)
        refusal_of(convert.status_from_pb, message)
    message = convert.status_to_pb(STATUS)
    message.metrics[0].samples[0].labels['"} 1\n'] = "x"
    assert "Prometheus" in refusal_of(convert.status_from_pb, message)


def test_other_messages_that_break_the_contract_are_refused() -> None:
    assert "page layout" in refusal_of(convert.layout_from_pb, common_pb2.KVPageLayout(dtype="float32"))
    assert "int3" in refusal_of(convert.layout_from_pb, common_pb2.KVPageLayout(dtype="int3"))
    odd = common_pb2.KVPageLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype="int8")
    assert "scales would lie askew" in refusal_of(convert.layout_from_pb, odd)


@pytest.mark.parametrize("dtype", KVDType)
def test_a_layout_travels_with_the_name_of_its_type(dtype: KVDType) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    message = convert.layout_to_pb(layout)
    assert message.dtype == dtype.value
    assert convert.layout_from_pb(message) == layout
    assert "kind" in refusal_of(convert.event_from_pb, common_pb2.SequenceEvent())
    event = convert.event_to_pb(TokenEvent(key=KEY, attempt=1, index=0, token_id=5))
    event.token.finish_reason = 77  # type: ignore[assignment]
    assert "finish reason 77" in refusal_of(convert.event_from_pb, event)


CONVERSIONS: tuple[tuple[Message, Callable[[Any], object]], ...] = (
    (convert.request_to_pb(REQUEST), convert.request_from_pb),
    (convert.ticket_to_pb(TICKET), convert.ticket_from_pb),
    (convert.commit_to_pb(COMMIT), convert.commit_from_pb),
    (convert.event_to_pb(TokenEvent(key=KEY, attempt=1, index=0, token_id=5, logprobs=COMMIT.logprobs)), convert.event_from_pb),
    (
        convert.event_to_pb(SequenceFailed(key=KEY, attempt=2, kind=FailureKind.INTERNAL, message="why")),
        convert.event_from_pb,
    ),
    (convert.hello_to_pb(HELLO), convert.hello_from_pb),
    (convert.status_to_pb(STATUS), convert.status_from_pb),
    (convert.pages_to_pb(SNAPSHOT), convert.pages_from_pb),
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_ENUM: st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3),
    FieldDescriptor.TYPE_STRING: st.text(max_size=300) | st.sampled_from(["", "unix:x", "float32", "decode", "a:1"]),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=1100),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 2),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1) | st.integers(0, 2),
}


def spoil(data: st.DataObject, message: Message) -> None:
    """Change one field of the message, at whatever depth, to whatever its type allows."""
    field: Any = data.draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    inner = field.message_type
    is_map = inner is not None and inner.GetOptions().map_entry
    if data.draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    elif is_map:
        key, value = (data.draw(_SCALARS[each.type]) for each in inner.fields)
        getattr(message, field.name)[key] = value
    elif inner is not None and field.is_repeated:
        items = getattr(message, field.name)
        spoil(data, items[0] if items and data.draw(st.booleans()) else items.add())
    elif inner is not None:
        spoil(data, getattr(message, field.name))
    elif field.is_repeated:
        getattr(message, field.name).append(data.draw(_SCALARS[field.type]))
    else:
        setattr(message, field.name, data.draw(_SCALARS[field.type]))


@pytest.mark.parametrize(("good", "convert_message"), CONVERSIONS, ids=lambda value: getattr(value, "__name__", ""))
@given(data=st.data())
def test_a_message_is_converted_or_refused_and_never_anything_else(
    good: Message, convert_message: Callable[[Any], object], data: st.DataObject
) -> None:
    message = type(good)()
    if data.draw(st.booleans()):
        message.CopyFrom(good)
    for _ in range(data.draw(st.integers(1, 4))):
        spoil(data, message)
    with suppress(Refused):
        convert_message(message)


def test_a_refusal_is_short_however_long_the_value() -> None:
    message = convert.hello_to_pb(HELLO)
    message.phases.append("x" * 100_000)
    assert len(refusal_of(convert.hello_from_pb, message)) < 1000

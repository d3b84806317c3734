"""Between the contract's types and their protobuf messages, one pair of functions a type.

Messages from a peer are not trusted: one that breaks an invariant raises ``Refused`` (MALFORMED), so that a bad peer cannot
look like a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from serving_core.errors import BrokenContract, InvalidRequest, RefusalCode, Refused
from serving_core.generate_request import GenerateRequest
from serving_core.ids import Incarnation, PageId, RequestId, ReservationId, RouterId, SequenceKey, WorkerId, check_id
from serving_core.kv_page_layout import KVDType, KVPageLayout
from serving_core.page_state import PageOwner, PageRecord, PagesSnapshot, PageState
from serving_core.rpc.v1 import common_pb2, router_link_pb2, worker_pb2
from serving_core.sampling_params import SamplingParams
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

_MAX_REASON_CHARS = 500
"""A reason quotes the peer's value, which may be of any length."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _checked(convert: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turns a broken invariant of the contract's types into a refusal of the message."""

    @wraps(convert)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return convert(*args, **kwargs)
        except (BrokenContract, InvalidRequest, ValueError) as error:  # ValueError: a word that is not in the enum
            what = convert.__name__.removesuffix("_from_pb")
            raise Refused(RefusalCode.MALFORMED, f"{what} message: {str(error)[:_MAX_REASON_CHARS]}") from error

    return checked


_FINISH_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PB: dict[int, FinishReason] = {value: reason for reason, value in _FINISH_TO_PB.items()}


def key_to_pb(key: SequenceKey) -> common_pb2.SequenceKey:
    return common_pb2.SequenceKey(request_id=key.request_id, choice_index=key.choice_index)


@_checked
def key_from_pb(message: common_pb2.SequenceKey) -> SequenceKey:
    return SequenceKey(RequestId(message.request_id), message.choice_index)


@_checked
def router_id_from_pb(router_id: str) -> RouterId:
    check_id("router's id", router_id)
    return RouterId(router_id)


def sampling_to_pb(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
    )


@_checked
def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
    )


def request_to_pb(request: GenerateRequest) -> common_pb2.GenerateRequest:
    return common_pb2.GenerateRequest(
        key=key_to_pb(request.key),
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=sampling_to_pb(request.sampling),
        cache_salt=request.cache_salt,
    )


@_checked
def request_from_pb(message: common_pb2.GenerateRequest) -> GenerateRequest:
    return GenerateRequest(
        key=key_from_pb(message.key),
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=sampling_from_pb(message.sampling),
        cache_salt=message.cache_salt,
    )


def layout_to_pb(layout: KVPageLayout) -> common_pb2.KVPageLayout:
    return common_pb2.KVPageLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype.value,
    )


@_checked
def layout_from_pb(message: common_pb2.KVPageLayout) -> KVPageLayout:
    return KVPageLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        page_size=message.page_size,
        dtype=KVDType(message.dtype),
    )


def ticket_to_pb(ticket: TransferTicket) -> common_pb2.TransferTicket:
    return common_pb2.TransferTicket(
        reservation_id=ticket.reservation_id,
        key=key_to_pb(ticket.key),
        attempt=ticket.attempt,
        decode_worker_id=ticket.decode_worker_id,
        decode_incarnation=ticket.decode_incarnation,
        decode_address=ticket.decode_address,
        layout=layout_to_pb(ticket.layout),
        num_prompt_tokens=ticket.num_prompt_tokens,
        num_cached_tokens=ticket.num_cached_tokens,
        lease_s=ticket.lease_s,
    )


@_checked
def ticket_from_pb(message: common_pb2.TransferTicket) -> TransferTicket:
    return TransferTicket(
        reservation_id=ReservationId(message.reservation_id),
        key=key_from_pb(message.key),
        attempt=message.attempt,
        decode_worker_id=WorkerId(message.decode_worker_id),
        decode_incarnation=Incarnation(message.decode_incarnation),
        decode_address=message.decode_address,
        layout=layout_from_pb(message.layout),
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        lease_s=message.lease_s,
    )


def logprobs_to_pb(logprobs: TokenLogprobs | None) -> common_pb2.TokenLogprobs | None:
    if logprobs is None:
        return None
    top = [common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top]
    return common_pb2.TokenLogprobs(logprob=logprobs.logprob, top=top)


def logprobs_from_pb(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(logprob=message.logprob, top=tuple((entry.token_id, entry.logprob) for entry in message.top))


def commit_to_pb(commit: HandoffCommit) -> common_pb2.HandoffCommit:
    return common_pb2.HandoffCommit(
        reservation_id=commit.reservation_id,
        key=key_to_pb(commit.key),
        attempt=commit.attempt,
        token_id=commit.token_id,
        logprobs=logprobs_to_pb(commit.logprobs),
        num_bytes_sent=commit.num_bytes_sent,
        num_cached_tokens=commit.num_cached_tokens,
    )


@_checked
def commit_from_pb(message: common_pb2.HandoffCommit) -> HandoffCommit:
    return HandoffCommit(
        reservation_id=ReservationId(message.reservation_id),
        key=key_from_pb(message.key),
        attempt=message.attempt,
        token_id=message.token_id,
        logprobs=logprobs_from_pb(message.logprobs) if message.HasField("logprobs") else None,
        num_bytes_sent=message.num_bytes_sent,
        num_cached_tokens=message.num_cached_tokens,
    )


def refusal_to_pb(refused: Refused) -> common_pb2.Refusal:
    return common_pb2.Refusal(code=common_pb2.RefusalCode.ValueType(refused.code.value), message=str(refused))


def refusal_from_pb(message: common_pb2.Refusal) -> Refused:
    """The refusal as an error to raise. A code this build does not know reads as MALFORMED."""
    return Refused(_refusal_code(message.code) or RefusalCode.MALFORMED, message.message)


def _refusal_code(value: int) -> RefusalCode | None:
    return next((code for code in RefusalCode if code.value == value), None)


def event_to_pb(event: SequenceEvent) -> common_pb2.SequenceEvent:
    if isinstance(event, TokenEvent):
        token = common_pb2.TokenEvent(
            key=key_to_pb(event.key),
            attempt=event.attempt,
            index=event.index,
            token_id=event.token_id,
            logprobs=logprobs_to_pb(event.logprobs),
            finish_reason=_FINISH_TO_PB[event.finish_reason] if event.finish_reason else common_pb2.FINISH_REASON_UNSPECIFIED,
            num_cached_tokens=event.num_cached_tokens,
        )
        return common_pb2.SequenceEvent(token=token)
    if isinstance(event, SequenceEvicted):
        return common_pb2.SequenceEvent(evicted=common_pb2.SequenceEvicted(key=key_to_pb(event.key), attempt=event.attempt))
    failed = common_pb2.SequenceFailed(
        key=key_to_pb(event.key),
        attempt=event.attempt,
        kind=common_pb2.FailureKind.ValueType(event.kind.value),
        message=event.message,
    )
    return common_pb2.SequenceEvent(failed=failed)


@_checked
def event_from_pb(message: common_pb2.SequenceEvent) -> SequenceEvent:
    if message.HasField("token"):
        token = message.token
        return TokenEvent(
            key=key_from_pb(token.key),
            attempt=token.attempt,
            index=token.index,
            token_id=token.token_id,
            logprobs=logprobs_from_pb(token.logprobs) if token.HasField("logprobs") else None,
            finish_reason=_finish_reason(token.finish_reason),
            num_cached_tokens=token.num_cached_tokens,
        )
    if message.HasField("evicted"):
        return SequenceEvicted(key=key_from_pb(message.evicted.key), attempt=message.evicted.attempt)
    if not message.HasField("failed"):
        raise BrokenContract("a sequence event of a kind this build does not know")
    failed = message.failed
    return SequenceFailed(
        key=key_from_pb(failed.key),
        attempt=failed.attempt,
        kind=FailureKind(failed.kind),
        message=failed.message,
    )


def _finish_reason(value: int) -> FinishReason | None:
    if value == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if value not in _FINISH_FROM_PB:
        raise BrokenContract(f"a finish reason {value} that this build does not know")
    return _FINISH_FROM_PB[value]


def hello_to_pb(hello: WorkerHello) -> router_link_pb2.WorkerHello:
    return router_link_pb2.WorkerHello(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        phases=sorted(phase.value for phase in hello.phases),
        address=hello.address,
        node=hello.node,
        pids=hello.pids,
        tensor_parallel_size=hello.tensor_parallel_size,
        model_name=hello.model_name,
        model_print=hello.model_print,
        prefill_arithmetic=hello.prefill_arithmetic,
        decode_arithmetic=hello.decode_arithmetic,
        layout=layout_to_pb(hello.layout),
        num_pages=hello.num_pages,
        max_model_len=hello.max_model_len,
        max_num_seqs=hello.max_num_seqs,
        max_prefill_tokens_per_step=hello.max_prefill_tokens_per_step,
    )


@_checked
def hello_from_pb(message: router_link_pb2.WorkerHello) -> WorkerHello:
    return WorkerHello(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        phases=frozenset(PhaseName(phase) for phase in message.phases),
        address=message.address,
        node=message.node,
        pids=tuple(message.pids),
        tensor_parallel_size=message.tensor_parallel_size,
        model_name=message.model_name,
        model_print=message.model_print,
        prefill_arithmetic=message.prefill_arithmetic,
        decode_arithmetic=message.decode_arithmetic,
        layout=layout_from_pb(message.layout),
        num_pages=message.num_pages,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        max_prefill_tokens_per_step=message.max_prefill_tokens_per_step,
    )


def status_to_pb(status: WorkerStatus) -> router_link_pb2.WorkerStatus:
    return router_link_pb2.WorkerStatus(
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        is_draining=status.is_draining,
        metrics=[_family_to_pb(family) for family in status.metrics],
    )


@_checked
def status_from_pb(message: router_link_pb2.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        is_draining=message.is_draining,
        metrics=tuple(_family_from_pb(family) for family in message.metrics),
    )


def _family_to_pb(family: MetricFamily) -> router_link_pb2.MetricFamily:
    samples = [router_link_pb2.MetricSample(name=s.name, labels=dict(s.labels), value=s.value) for s in family.samples]
    return router_link_pb2.MetricFamily(name=family.name, documentation=family.documentation, kind=family.kind, samples=samples)


def _family_from_pb(message: router_link_pb2.MetricFamily) -> MetricFamily:
    samples = (MetricSample(name=s.name, labels=tuple(sorted(s.labels.items())), value=s.value) for s in message.samples)
    return MetricFamily(name=message.name, documentation=message.documentation, kind=message.kind, samples=tuple(samples))


def pages_to_pb(snapshot: PagesSnapshot) -> worker_pb2.PagesSnapshot:
    return worker_pb2.PagesSnapshot(
        page_size=snapshot.page_size,
        num_pages=snapshot.num_pages,
        counts={state.value: count for state, count in snapshot.counts.items()},
        pages=[
            worker_pb2.PageRecord(
                page_id=page.page_id,
                generation=page.generation,
                state=page.state.value,
                owners=[worker_pb2.PageOwner(key=key_to_pb(owner.key), attempt=owner.attempt) for owner in page.owners],
                age_s=page.age_s,
            )
            for page in snapshot.pages
        ],
    )


@_checked
def pages_from_pb(message: worker_pb2.PagesSnapshot) -> PagesSnapshot:
    return PagesSnapshot(
        page_size=message.page_size,
        num_pages=message.num_pages,
        counts={state: message.counts.get(state.value, 0) for state in PageState},
        pages=tuple(
            PageRecord(
                page_id=PageId(page.page_id),
                generation=page.generation,
                state=PageState(page.state),
                owners=tuple(PageOwner(key=key_from_pb(owner.key), attempt=owner.attempt) for owner in page.owners),
                age_s=page.age_s,
            )
            for page in message.pages
        ),
    )

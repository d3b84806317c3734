"""Which tokens of which sequence are in the next decode step. Decides only; pages, events and ends are the phase's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decode_worker.decode_sequence import DecodeSequence, DecodeState
from llm_engine.step_plan import NOT_YET_KNOWN, PlanRow
from llm_engine.token_rules import TokenRules
from serving_core.kv_page_layout import KVPageLayout

MAX_REPLAY_TOKENS = 16
"""What a worker's steps replay unless told otherwise."""


class DecodeScheduler:
    """One row for each decoding sequence: the tokens whose keys and values are not cached yet, and a sample after the last.

    That is a single token, the newest, except for a sequence that goes on from a log: the log is *replayed* through the same
    rows, which gives the same bits as if the sequence had never stopped. A step replays at most ``max_replay_tokens``, so that
    the others do not wait long for theirs; the oldest is served first.

    A sequence whose newest token a step under way samples goes on with that one, unless it will be the last, or the next cannot
    be chosen without knowing it: then it misses a step, and the others do not.
    """

    def __init__(self, *, layout: KVPageLayout, rules: TokenRules, max_replay_tokens: int) -> None:
        assert max_replay_tokens >= 2, "a replay of one token is no replay"
        self._layout = layout
        self._rules = rules
        self._max_replay_tokens = max_replay_tokens

    def choose(
        self, sequences: Iterable[DecodeSequence], take_pages: Callable[[DecodeSequence, int], bool]
    ) -> tuple[PlanRow, ...]:
        """The next step's rows. ``sequences`` come in the order in which they are served; the iterable leaves out those that go
        meanwhile. ``take_pages`` sees to so many pages in all, or says that the sequence cannot run in this step."""
        budget = self._max_replay_tokens
        rows: list[PlanRow] = []
        for sequence in sequences:
            if sequence.state is not DecodeState.DECODING or not self._may_go_on(sequence):
                continue
            num_tokens = sequence.num_pending
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens == 0:
                continue
            num_planned_tokens = sequence.request.num_prompt_tokens + sequence.num_planned_outputs
            if take_pages(sequence, self._layout.num_pages_for(num_planned_tokens + num_tokens)):
                rows.append(self._row(sequence, num_planned_tokens, num_tokens))
        return tuple(rows)

    def _may_go_on(self, sequence: DecodeSequence) -> bool:
        if sequence.num_not_yet_known == 0:
            return True
        assert sequence.sample_template is not None
        is_last = self._rules.is_last(sequence.request, len(sequence.output_token_ids))
        return not is_last and not sequence.sample_template.needs_every_token

    def _row(self, sequence: DecodeSequence, position: int, num_tokens: int) -> PlanRow:
        assert sequence.reservation is not None
        assert sequence.sample_template is not None
        start = sequence.num_planned_outputs
        known = tuple(sequence.output_token_ids[start : start + num_tokens])
        spec = None
        if num_tokens == sequence.num_pending:
            spec = sequence.sample_template.spec(sequence.output_token_ids, num_not_yet_known=sequence.num_not_yet_known)
        return PlanRow(
            key=sequence.key,
            token_ids=known or (NOT_YET_KNOWN,),
            start_position=position,
            page_ids=sequence.reservation.page_ids[: self._layout.num_pages_for(position + num_tokens)],
            sample=spec,
        )

"""What all tokens of one answer have in common in how they are chosen, so that a step adds only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_engine.packed_ids import PackedIds
from llm_engine.step_plan import SampleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTemplate:
    """``first`` is the spec of token 0, but for ``end_token_ids``, which are banned from the first ``min_tokens`` tokens."""

    first: SampleSpec
    end_token_ids: tuple[int, ...]
    min_tokens: int

    def spec(self, output_token_ids: Sequence[int]) -> SampleSpec:
        """How to choose the token that follows ``output_token_ids``. Give an ``array("i")``: it is copied in no time."""
        output_index = len(output_token_ids)
        penalties = self.first.penalties
        if penalties is not None:
            penalties = replace(penalties, output_token_ids=PackedIds.of(output_token_ids))
        banned_token_ids = self.end_token_ids if output_index < self.min_tokens else ()
        return replace(self.first, output_index=output_index, banned_token_ids=banned_token_ids, penalties=penalties)

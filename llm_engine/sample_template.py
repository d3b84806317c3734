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

    @property
    def needs_every_token(self) -> bool:
        """Whether a token cannot be chosen before all those before it are known."""
        return self.first.penalties is not None

    def spec(self, output_token_ids: Sequence[int], *, num_not_yet_known: int = 0) -> SampleSpec:
        """How to choose the token that follows ``output_token_ids``, and so many more that are yet to come. Give an
        ``array("i")``: it is copied in no time."""
        assert num_not_yet_known == 0 or not self.needs_every_token
        output_index = len(output_token_ids) + num_not_yet_known
        penalties = self.first.penalties
        if penalties is not None:
            penalties = replace(penalties, output_token_ids=PackedIds.of(output_token_ids))
        banned_token_ids = self.end_token_ids if output_index < self.min_tokens else ()
        return replace(self.first, output_index=output_index, banned_token_ids=banned_token_ids, penalties=penalties)

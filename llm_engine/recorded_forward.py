"""Decode steps on the native kernels whose calls are replayed."""

from __future__ import annotations

import torch

from llm_engine.decoder import Decoder
from llm_engine.forward import Forward, attention_rows, last_tokens, positions_of, token_ids_of
from llm_engine.native.library import NativeLibrary
from llm_engine.native_attention import NativeAttention
from llm_engine.step_plan import StepPlan


class RecordedForward:
    """See ``Forward``. What the layers do is recorded at the start, for any number of tokens up to ``max_tokens``; ``eager``
    computes steps of more, which have a replayed log among their rows. The same bits either way: the kernels are the same.
    ``max_row_pages`` is the most pages of a sequence.

    For decoders that call nothing but kernels: without experts.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: NativeAttention,
        library: NativeLibrary,
        *,
        max_tokens: int,
        max_row_pages: int,
        eager: Forward,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._library = library
        self._eager = eager
        nothing = torch.zeros(max_tokens, dtype=torch.int64)
        # The inputs, and what the layers add to and leave: the recorded calls hold their addresses.
        self._places = attention.empty_places(max_tokens=max_tokens, max_pages=max_tokens * max_row_pages)
        self._rotations = decoder.rotations(nothing)
        self._x = decoder.embedded(nothing)
        with library.recording(max_tokens) as self._recording:
            summed, self._fed = decoder.layers(self._x, self._rotations, attention.step_at(self._places))
        assert summed is self._x, "the layers add where their input lies"

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        token_ids = torch.tensor(token_ids_of(plan.rows))
        num_tokens = len(token_ids)
        if num_tokens > self._recording.max_tokens:
            return self._eager.logits(plan)
        rows = attention_rows(plan.rows)
        self._attention.enter(rows)
        self._places.copy_(self._attention.places_of(rows))
        for rope, rotation in self._decoder.rotations(torch.tensor(positions_of(plan.rows))).items():
            self._rotations[rope].copy_(rotation)
        self._x[:num_tokens] = self._decoder.embedded(token_ids)
        self._library.replay(self._recording, num_tokens)
        sampled = last_tokens(plan.rows)
        return self._decoder.logits(self._x[sampled] + self._fed[sampled]) if sampled else None

"""The receiver's end of the page path: takes checked segments to the engine thread, where pages may be written."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.decode_phase import DecodePhase
from kv_transfer.page_transport import Segment
from llm_engine.engine_calls import EngineCalls, run_between_steps


class DecodePageSink:
    """``PageSink`` of one decode phase."""

    def __init__(self, *, phase: DecodePhase, engine: EngineCalls) -> None:
        self._phase = phase
        self._engine = engine

    async def accept(self, segments: Sequence[Segment]) -> None:
        await run_between_steps(self._engine, lambda: self._phase.accept(segments))

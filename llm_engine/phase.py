"""The verbs both phases share, and what the step loop asks of a runner. The loop drives phases; it never looks inside one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llm_engine.step_plan import StepPlan, StepResult
from serving_core.ids import SequenceKey
from serving_core.worker_status import PhaseName


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStatus:
    """A phase's load, in sequences."""

    num_running: int
    num_waiting: int


class Phase(Protocol):
    """Prefill or decode, mounted on one worker's step loop. Every method runs on the engine thread and never blocks.

    Work is admitted by a verb of the phase's own (``admit`` for prefill, ``reserve`` and ``commit`` for decode), since what is
    admitted differs. All else is the same, so that both phases read alike.
    """

    name: PhaseName

    def expire(self, now: float) -> float | None:
        """Release what no router named for one lease. Returns when the next lease ends, or None with no lease left."""

    def plan(self) -> StepPlan | None:
        """Choose the rows of the next step and account for their pages; None when nothing can run. A plan whose step is still
        under way was not applied yet: what it computes and samples is not computed again."""

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        """Take the step's tokens: advance sequences, emit events, release what ended. Plans are applied in their order."""

    def renew(self, keys: frozenset[SequenceKey]) -> None:
        """Extend the leases of those of ``keys`` that this phase holds."""

    def abort(self, key: SequenceKey, attempt: int) -> None:
        """Release the sequence if it is held at ``attempt`` or below, in whatever state; otherwise do nothing."""

    def drain(self) -> None:
        """Take no new work from now on; what is held runs to its end."""

    def status(self) -> PhaseStatus:
        """The load of this moment."""


class StepUnderWay(Protocol):
    """A step that a device computes while the host goes on. It is computed after all that were begun before."""

    def wait(self) -> StepResult:
        """What the step produced, once it has. To be called once."""


def finished(outcome: StepResult | StepUnderWay) -> StepResult:
    """The result of ``Runner.run``, waited for if need be."""
    return outcome if isinstance(outcome, StepResult) else outcome.wait()


class Runner(Protocol):
    """Computes a step: the model, its weights and its cache, for one worker."""

    def run(self, plan: StepPlan) -> StepResult | StepUnderWay:
        """Run one forward pass and sample; writes the rows' keys and values into the paged cache.

        When it only has begun, one more step of the phase may be run before this one is waited for, with rows whose token is
        ``NOT_YET_KNOWN``. Until then nobody else may write into the pages into which the step writes.
        """

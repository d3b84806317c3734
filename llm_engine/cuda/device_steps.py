"""The steps of a phase on a device: begun one after another, without waiting for the tokens of the one before."""

from __future__ import annotations

import torch

from llm_engine.cuda.device_sampler import ChosenTokens, choose_tokens
from llm_engine.device import settle, to_device
from llm_engine.forward import DeviceForward, LateTokens
from llm_engine.phase import StepUnderWay
from llm_engine.sampler import step_result
from llm_engine.step_plan import StepPlan, StepResult
from serving_core.ids import SequenceKey


class DeviceSteps:
    """See ``Runner``: for one phase, on one device. Unless ``is_ahead``, each step is waited for at once."""

    def __init__(self, forward: DeviceForward, device: torch.device, *, is_ahead: bool) -> None:
        self._forward = forward
        self._device = device
        self._is_ahead = is_ahead
        self._chosen: ChosenTokens | None = None  # in the newest step
        self._chosen_for: dict[SequenceKey, int] = {}  # whose, and which of them

    def run(self, plan: StepPlan) -> StepResult | StepUnderWay:
        logits = self._forward.logits(plan, self._late_tokens(plan))
        sampled = [(row.key, row.sample) for row in plan.rows if row.sample is not None]
        self._chosen_for = {key: number for number, (key, _) in enumerate(sampled)}
        self._chosen = None
        if logits is not None:
            self._chosen = choose_tokens(logits[: len(sampled)], [spec for _, spec in sampled])
        step = _DeviceStep(plan, self._chosen, self._device)
        return step if self._is_ahead else step.wait()

    def _late_tokens(self, plan: StepPlan) -> LateTokens | None:
        places: list[int] = []
        sources: list[int] = []
        num_tokens = 0
        for row in plan.rows:
            if row.is_ahead:
                places.append(num_tokens)
                sources.append(self._chosen_for[row.key])
            num_tokens += len(row.token_ids)
        if not places:
            return None
        assert self._chosen is not None
        on_device = to_device(torch.tensor([places, sources]), self._device)
        return LateTokens(places=on_device[0], token_ids=self._chosen.token_ids[on_device[1]])


class _DeviceStep:
    """See ``StepUnderWay``."""

    def __init__(self, plan: StepPlan, chosen: ChosenTokens | None, device: torch.device) -> None:
        self._plan = plan
        self._chosen = chosen
        self._device = device

    def wait(self) -> StepResult:
        if self._chosen is None:
            settle(self._device)  # others may read the pages as soon as the step is over
            return step_result(self._plan, ())
        return step_result(self._plan, self._chosen.wait())

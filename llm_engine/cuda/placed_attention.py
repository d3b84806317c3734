"""An attention back end made for the CPU, on another device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_engine.attention import AttentionBackend, AttentionRow, AttentionStep
from llm_engine.rotation import Rotation


class PlacedAttention:
    """See ``AttentionBackend``. Whatever tensors ``inner`` makes, it makes on ``device``, where its cache is."""

    def __init__(self, inner: AttentionBackend, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def begin_step(self, rows: Sequence[AttentionRow]) -> _PlacedStep:
        with self._device:
            return _PlacedStep(self._inner.begin_step(rows), self._device)


class _PlacedStep:
    def __init__(self, inner: AttentionStep, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None) -> Tensor:
        with self._device:
            return self._inner.attend(layer, query, key, value, rotation)

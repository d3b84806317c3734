"""The gated feed-forward network. Source: Shazeer 2020 (arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from llm_engine.linear import Linear
from llm_engine.model_config import Activation


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FeedForward:
    """Gate and up share a matrix: one product instead of two."""

    gate_up: Linear  # [2 * feed_forward_size, hidden_size]
    down: Linear  # [hidden_size, feed_forward_size]
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._activated(gate) * up)

    def _activated(self, gate: Tensor) -> Tensor:
        match self.activation:
            case Activation.SILU:
                return functional.silu(gate)
            case Activation.GELU_TANH:
                return functional.gelu(gate, approximate="tanh")

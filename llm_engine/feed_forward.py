"""The gated feed-forward network. Source: Shazeer 2020 (arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llm_engine.gated_activation import GatedActivation
from llm_engine.linear import Projection


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FeedForward:
    """Gate and up share a matrix: one product instead of two."""

    gate_up: Projection  # [2 * feed_forward_size, hidden_size]
    down: Projection  # [hidden_size, feed_forward_size]
    activation: GatedActivation

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → the same shape."""
        return self.down(self.activation(self.gate_up(x)))

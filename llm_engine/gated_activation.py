"""What a gated feed-forward network does between its products: the activation of the gate, times up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.nn import functional

from llm_engine.model_config import Activation

if TYPE_CHECKING:
    from llm_engine.native.library import NativeLibrary


class GatedActivation(Protocol):
    """Gate and up come side by side, as one product yields them."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [num_rows, 2 * feed_forward_size] → [num_rows, feed_forward_size]."""


@dataclass(frozen=True, slots=True)
class TorchGate:
    activation: Activation

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activated(gate) * up

    def _activated(self, gate: Tensor) -> Tensor:
        match self.activation:
            case Activation.SILU:
                return functional.silu(gate)
            case Activation.GELU_TANH:
                return functional.gelu(gate, approximate="tanh")


@dataclass(frozen=True, slots=True, eq=False)
class NativeGate:
    """For bfloat16 on the native kernels. What is activated is not rounded before it is multiplied."""

    activation: Activation
    library: NativeLibrary

    def __call__(self, gate_up: Tensor) -> Tensor:
        return self.library.activate_multiply(self.activation, gate_up)

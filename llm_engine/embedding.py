"""The vector of each token, looked up in a table of its own or in the head, where the two are the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.device import CPU
from llm_engine.native.packed_weight import PackedWeight, unpack_rows


class Embedding(Protocol):
    """What the layers start from."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations that are multiplied."""

    @property
    def device(self) -> torch.device:
        """Of the vectors, and so of all that is computed from them."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] → [num_tokens, hidden_size], to which the layers add: of ``dtype``, or float32."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTable:
    """``table`` [vocab_size, hidden_size]. ``is_summed_wide``: what the layers add to is float32."""

    table: Tensor
    is_summed_wide: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        vectors = functional.embedding(token_ids, self.table)
        return vectors.float() if self.is_summed_wide else vectors


@dataclass(frozen=True, slots=True, eq=False)
class PackedEmbedding:
    """``table`` [num_tokens of the tokenizer, hidden_size] is the head, packed. What the layers add to is float32."""

    table: PackedWeight

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return CPU

    def __call__(self, token_ids: Tensor) -> Tensor:
        return unpack_rows(self.table, token_ids)

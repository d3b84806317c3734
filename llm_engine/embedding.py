"""The vector of each token, looked up in a table of its own or in the head, where the two are the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.native.packed_weight import PackedWeight, unpack_rows


class Embedding(Protocol):
    """What the layers start from."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the vectors, and so of all activations."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] → [num_tokens, hidden_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTable:
    """``table`` [vocab_size, hidden_size]."""

    table: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.table)


@dataclass(frozen=True, slots=True, eq=False)
class PackedEmbedding:
    """``table`` [num_tokens of the tokenizer, hidden_size] is the head, packed. Its vectors are rounded to bfloat16."""

    table: PackedWeight

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def __call__(self, token_ids: Tensor) -> Tensor:
        return unpack_rows(self.table, token_ids).bfloat16()

"""The weights of a model, arranged as the decoder uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llm_engine.decoder_tensors import FINAL_NORM, ROPE_FACTORS, expert_part, layer_tensor
from llm_engine.embedding import Embedding
from llm_engine.feed_forward import FeedForward
from llm_engine.gated_activation import GatedActivation
from llm_engine.linear import Projection
from llm_engine.mixture_of_experts import MixtureOfExperts
from llm_engine.model_config import ModelConfig
from llm_engine.rms_norm import Norm


class WeightSource(Protocol):
    """Makes what a decoder computes with, each part once. ``num_bytes`` is what has been made so far."""

    num_bytes: int

    def embedding(self) -> Embedding: ...

    def head(self) -> Projection:
        """[num_tokens of the tokenizer, hidden_size]: padding has no logit, so no id without a token is ever chosen."""

    def matrix(self, name: str) -> Projection:
        """One of ``decoder_matrices``."""

    def norm(self, name: str) -> Norm:
        """That with the weight of this name, one of ``decoder_tensors``."""

    def gated_activation(self) -> GatedActivation: ...

    def vector(self, name: str) -> Tensor:
        """One of ``decoder_tensors``, float32."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One layer. Query, key and value share a matrix: one product instead of three. A norm is None in models that have none
    there.
    """

    attention_norm: Norm
    qkv: Projection  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    query_norm: Norm | None
    key_norm: Norm | None
    attention_out: Projection  # [hidden_size, num_heads * head_dim]
    attention_out_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward | MixtureOfExperts
    feed_forward_out_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """All weights. ``rope_factors`` divide the rotary frequencies."""

    embedding: Embedding  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Projection  # [num_tokens of the tokenizer, hidden_size]
    rope_factors: Tensor  # [head_dim / 2], float32

    @classmethod
    def read(cls, config: ModelConfig, source: WeightSource, *, has_rope_factors: bool = False) -> DecoderWeights:
        """Take every part from ``source``. ``has_rope_factors``: the checkpoint states them; else all are 1."""
        embedding = source.embedding()
        return cls(
            embedding=embedding,
            layers=tuple(_Layer(config, source, index).read() for index in range(config.num_layers)),
            final_norm=source.norm(FINAL_NORM),
            head=source.head(),
            rope_factors=(
                source.vector(ROPE_FACTORS) if has_rope_factors else torch.ones(config.head_dim // 2, device=embedding.device)
            ),
        )


class _Layer:
    """Reads the layer of that index."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        self._config = config
        self._source = source
        self._index = index

    def read(self) -> LayerWeights:
        config = self._config
        return LayerWeights(
            attention_norm=self._norm("attention_norm"),
            qkv=self._matrix("qkv"),
            query_norm=self._norm("query_norm") if config.has_query_key_norms else None,
            key_norm=self._norm("key_norm") if config.has_query_key_norms else None,
            attention_out=self._matrix("attention_out"),
            attention_out_norm=self._norm("attention_out_norm") if config.has_out_norms else None,
            feed_forward_norm=self._norm("feed_forward_norm"),
            feed_forward=self._experts() if config.layers[self._index].has_experts else self._feed_forward(),
            feed_forward_out_norm=self._norm("feed_forward_out_norm") if config.has_out_norms else None,
        )

    def _experts(self) -> MixtureOfExperts:
        experts = self._config.experts
        assert experts is not None, "a layer with experts is told how many"
        return MixtureOfExperts(
            router=self._matrix("router"),
            experts=tuple(self._feed_forward(index) for index in range(experts.num_experts)),
            num_chosen=experts.num_chosen,
            is_normalized=experts.is_normalized,
        )

    def _feed_forward(self, expert: int | None = None) -> FeedForward:
        def matrix(part: str) -> Projection:
            return self._matrix(part if expert is None else expert_part(expert, part))

        return FeedForward(gate_up=matrix("gate_up"), down=matrix("down"), activation=self._source.gated_activation())

    def _matrix(self, part: str) -> Projection:
        return self._source.matrix(layer_tensor(self._index, part))

    def _norm(self, part: str) -> Norm:
        return self._source.norm(layer_tensor(self._index, f"{part}.weight"))

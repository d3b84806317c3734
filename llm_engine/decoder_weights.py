"""The weights of a model, arranged as the decoder uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_engine.decoder_tensors import EMBEDDING, FINAL_NORM, HEAD, expert_part, layer_tensor
from llm_engine.feed_forward import FeedForward
from llm_engine.layer_config import LayerConfig
from llm_engine.linear import Linear
from llm_engine.mixture_of_experts import MixtureOfExperts
from llm_engine.model_config import ModelConfig
from llm_engine.rms_norm import RmsNorm


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One layer. Query, key and value share a matrix: one product instead of three. A norm is None in models that have none
    there.
    """

    attention_norm: RmsNorm
    qkv: Linear  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    attention_out: Linear  # [hidden_size, num_heads * head_dim]
    attention_out_norm: RmsNorm | None
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward | MixtureOfExperts
    feed_forward_out_norm: RmsNorm | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """All weights. ``head`` is ``embedding`` itself when the two are tied. ``rope_factors`` divide the rotary frequencies."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm
    head: Linear  # [vocab_size, hidden_size]
    rope_factors: Tensor  # [head_dim / 2], float32

    @classmethod
    def empty(cls, config: ModelConfig, *, dtype: torch.dtype, device: str = "cpu") -> DecoderWeights:
        """Tensors of the right shapes, not yet filled. Device "meta" gives shapes alone, without memory."""
        return _Maker(config, dtype, device).decoder()

    def places(self, config: ModelConfig) -> dict[str, Tensor]:
        """Where each tensor of ``tensor_shapes`` belongs: a whole tensor of the model, or some rows of one."""
        places = {EMBEDDING: self.embedding, FINAL_NORM: self.final_norm.weight}
        for index, layer in enumerate(self.layers):
            places |= {layer_tensor(index, part): place for part, place in _layer_places(layer, config)}
        if not config.is_tied:
            places[HEAD] = self.head.weight
        return places


class _Maker:
    """Makes empty weights of one type on one device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device

    def decoder(self) -> DecoderWeights:
        config = self._config
        embedding = self._linear(config.vocab_size, config.hidden_size)
        return DecoderWeights(
            embedding=embedding.weight,
            layers=tuple(self._layer(layer) for layer in config.layers),
            final_norm=self._norm(config.hidden_size),
            head=embedding if config.is_tied else self._linear(config.vocab_size, config.hidden_size),
            rope_factors=torch.ones(config.head_dim // 2, dtype=torch.float32, device=self._device),
        )

    def _layer(self, layer: LayerConfig) -> LayerWeights:
        config = self._config
        hidden, head_dim = config.hidden_size, config.head_dim
        qkv_size = (config.num_heads + 2 * config.num_kv_heads) * head_dim
        return LayerWeights(
            attention_norm=self._norm(hidden),
            qkv=self._linear(qkv_size, hidden, has_bias=config.has_qkv_bias),
            query_norm=self._norm(head_dim) if config.has_query_key_norms else None,
            key_norm=self._norm(head_dim) if config.has_query_key_norms else None,
            attention_out=self._linear(hidden, config.num_heads * head_dim, has_bias=config.has_attention_out_bias),
            attention_out_norm=self._norm(hidden) if config.has_out_norms else None,
            feed_forward_norm=self._norm(hidden),
            feed_forward=self._experts() if layer.has_experts else self._dense(),
            feed_forward_out_norm=self._norm(hidden) if config.has_out_norms else None,
        )

    def _dense(self) -> FeedForward:
        return self._feed_forward(self._config.feed_forward_size, has_bias=self._config.has_feed_forward_bias)

    def _experts(self) -> MixtureOfExperts:
        experts = self._config.experts
        assert experts is not None, "a layer with experts is told how many"
        return MixtureOfExperts(
            router=self._linear(experts.num_experts, self._config.hidden_size),
            experts=tuple(self._feed_forward(experts.feed_forward_size) for _ in range(experts.num_experts)),
            num_chosen=experts.num_chosen,
            is_normalized=experts.is_normalized,
        )

    def _feed_forward(self, size: int, *, has_bias: bool = False) -> FeedForward:
        hidden = self._config.hidden_size
        return FeedForward(
            gate_up=self._linear(2 * size, hidden, has_bias=has_bias),
            down=self._linear(hidden, size, has_bias=has_bias),
            activation=self._config.activation,
        )

    def _linear(self, num_out: int, num_in: int, *, has_bias: bool = False) -> Linear:
        weight = torch.empty(num_out, num_in, dtype=self._dtype, device=self._device)
        return Linear(weight, torch.empty(num_out, dtype=self._dtype, device=self._device) if has_bias else None)

    def _norm(self, size: int) -> RmsNorm:
        return RmsNorm(torch.empty(size, dtype=torch.float32, device=self._device), self._config.rms_norm_eps)


def _layer_places(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    qkv_sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    yield from _linear_places(("query", "key", "value"), layer.qkv, qkv_sizes)
    yield from _linear_places(("attention_out",), layer.attention_out, [config.hidden_size])
    norms = {
        "attention_norm": layer.attention_norm,
        "query_norm": layer.query_norm,
        "key_norm": layer.key_norm,
        "attention_out_norm": layer.attention_out_norm,
        "feed_forward_norm": layer.feed_forward_norm,
        "feed_forward_out_norm": layer.feed_forward_out_norm,
    }
    for name, norm in norms.items():
        if norm is not None:
            yield f"{name}.weight", norm.weight
    match layer.feed_forward:
        case FeedForward():
            yield from _feed_forward_places(layer.feed_forward)
        case MixtureOfExperts():
            yield "router.weight", layer.feed_forward.router.weight
            for index, expert in enumerate(layer.feed_forward.experts):
                yield from ((expert_part(index, part), place) for part, place in _feed_forward_places(expert))


def _feed_forward_places(feed_forward: FeedForward) -> Iterator[tuple[str, Tensor]]:
    hidden, size = feed_forward.down.weight.shape
    yield from _linear_places(("gate", "up"), feed_forward.gate_up, [size, size])
    yield from _linear_places(("down",), feed_forward.down, [hidden])


def _linear_places(names: tuple[str, ...], linear: Linear, num_rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The parts of a matrix that several share, by rows."""
    for name, weight in zip(names, torch.split(linear.weight, num_rows), strict=True):
        yield f"{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, num_rows), strict=True):
            yield f"{name}.bias", bias

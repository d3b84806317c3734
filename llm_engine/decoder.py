"""The model, inference only: the arithmetic from token ids to logits. Knows no file, no page, no sequence.

One decoder for all model families: what sets them apart is data in ``ModelConfig``. Sources: Touvron et al. 2023
(arXiv:2302.13971) for the Llama model that all of them vary; Su et al. 2021 (arXiv:2104.09864), rotary embedding, here with the
two halves of a head rotated against each other; Ainslie et al. 2023 (arXiv:2305.13245), grouped-query attention; Henry et al.
2020 (arXiv:2010.04245), norms of queries and keys; Gemma Team 2025 (arXiv:2503.19786), norms after attention and feed-forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.attention import AttentionStep
from llm_engine.decoder_weights import DecoderWeights, LayerWeights
from llm_engine.layer_config import Rope
from llm_engine.linear import Linear
from llm_engine.model_config import ModelConfig
from llm_engine.rms_norm import RmsNorm
from llm_engine.rope_frequencies import rope_frequencies
from llm_engine.rope_scaling import YarnScaling

_Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the step's angles, each [num_tokens, 1, head_dim / 2], float32."""


class Decoder:
    """The model with its weights. Stateless: keys and values live behind the ``AttentionStep``."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights
        # Padding of the head has no logit, so no id that the tokenizer lacks is ever sampled or listed.
        self._head = Linear(weights.head.weight[: config.num_tokens])
        self._frequencies = {  # each [head_dim / 2]
            rope: rope_frequencies(rope.theta, config.head_dim, rope.scaling) / weights.rope_factors
            for rope in {layer.rope for layer in config.layers}
            if rope is not None
        }

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Run all layers over the step's tokens. token_ids and positions [num_tokens] → [num_tokens, hidden_size]."""
        rotations: dict[Rope | None, _Rotation] = {rope: self._rotation(rope, positions) for rope in self._frequencies}
        x = functional.embedding(token_ids, self._weights.embedding) * self._config.embedding_scale
        for index, layer in enumerate(self._weights.layers):
            rotation = rotations.get(self._config.layers[index].rope)
            attended = self._attend(index, layer.attention_norm(x), rotation, attention)
            x = x + _normed(attended, layer.attention_out_norm)
            fed = layer.feed_forward(layer.feed_forward_norm(x))
            x = x + _normed(fed, layer.feed_forward_out_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → float32 [num_rows, num_tokens]."""
        logits = self._head(self._weights.final_norm(hidden)).float()
        cap = self._config.logit_soft_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _attend(self, index: int, x: Tensor, rotation: _Rotation | None, attention: AttentionStep) -> Tensor:
        """The attention of one layer, [num_tokens, hidden_size]."""
        config, layer = self._config, self._weights.layers[index]
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), num_rotated + config.num_kv_heads, config.head_dim)
        rotated = _normed_heads(qkv[:, :num_rotated], layer, config.num_heads)
        if rotation is not None:
            rotated = _rotate(rotated, *rotation)
        attended = attention.attend(
            index,
            rotated[:, : config.num_heads],  # query [num_tokens, num_heads, head_dim]
            rotated[:, config.num_heads :],  # key [num_tokens, num_kv_heads, head_dim]
            qkv[:, num_rotated:],  # value [num_tokens, num_kv_heads, head_dim]
        )
        return layer.attention_out(attended)

    def _rotation(self, rope: Rope, positions: Tensor) -> _Rotation:
        angles = torch.outer(positions.float(), self._frequencies[rope]).unsqueeze(1)
        scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
        return angles.cos() * scale, angles.sin() * scale


def _normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    return x if norm is None else norm(x)


def _normed_heads(heads: Tensor, layer: LayerWeights, num_heads: int) -> Tensor:
    """Queries and keys, [num_tokens, num_heads + num_kv_heads, head_dim], each normed where the model has a norm for it."""
    if layer.query_norm is None or layer.key_norm is None:
        return heads
    return torch.cat([layer.query_norm(heads[:, :num_heads]), layer.key_norm(heads[:, num_heads:])], dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second, in float32. x [num_tokens, num_heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

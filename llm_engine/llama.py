"""The Llama model, inference only: weights, and the arithmetic from token ids to logits. Knows no file, no page, no sequence.

Sources: Touvron et al. 2023 (arXiv:2302.13971) for the model; Su et al. 2021 (arXiv:2104.09864), rotary embedding, here with
the two halves of a head rotated against each other; Ainslie et al. 2023 (arXiv:2305.13245), grouped-query attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.attention import AttentionStep
from llm_engine.model_config import ModelConfig
from llm_engine.rope_frequencies import rope_frequencies
from llm_engine.rope_scaling import YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Query, key and value share a matrix, as do gate and up: one product each instead of five. A bias is None in
    models that have none there.
    """

    attention_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention_out: Tensor  # [hidden_size, num_heads * head_dim]
    feed_forward_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * feed_forward_size, hidden_size]
    down: Tensor  # [hidden_size, feed_forward_size]
    qkv_bias: Tensor | None = None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    attention_out_bias: Tensor | None = None  # [hidden_size]
    gate_up_bias: Tensor | None = None  # [2 * feed_forward_size]
    down_bias: Tensor | None = None  # [hidden_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights. ``head`` is ``embedding`` itself when the two are tied. ``rope_factors`` divide the rotary frequencies."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Tensor  # [vocab_size, hidden_size]
    rope_factors: Tensor  # [head_dim / 2], float32

    @classmethod
    def empty(cls, config: ModelConfig, *, dtype: torch.dtype, device: str = "cpu") -> LlamaWeights:
        """Tensors of the right shapes, not yet filled. Device "meta" gives shapes alone, without memory."""

        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, head_dim = config.hidden_size, config.head_dim
        qkv, gate_up = (config.num_heads + 2 * config.num_kv_heads) * head_dim, 2 * config.feed_forward_size
        has_attention_bias, has_feed_forward_bias = config.has_attention_bias, config.has_feed_forward_bias
        embedding = tensor(config.vocab_size, hidden)
        return cls(
            embedding=embedding,
            layers=tuple(
                LayerWeights(
                    attention_norm=tensor(hidden),
                    qkv=tensor(qkv, hidden),
                    attention_out=tensor(hidden, config.num_heads * head_dim),
                    feed_forward_norm=tensor(hidden),
                    gate_up=tensor(gate_up, hidden),
                    down=tensor(hidden, config.feed_forward_size),
                    qkv_bias=tensor(qkv) if has_attention_bias else None,
                    attention_out_bias=tensor(hidden) if has_attention_bias else None,
                    gate_up_bias=tensor(gate_up) if has_feed_forward_bias else None,
                    down_bias=tensor(hidden) if has_feed_forward_bias else None,
                )
                for _ in range(config.num_layers)
            ),
            final_norm=tensor(hidden),
            head=embedding if config.is_tied else tensor(config.vocab_size, hidden),
            rope_factors=torch.ones(head_dim // 2, dtype=torch.float32, device=device),
        )


class Llama:
    """The model with its weights. Stateless: keys and values live behind the ``AttentionStep``."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self._config = config
        self._weights = weights
        frequencies = rope_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
        self._frequencies = frequencies / weights.rope_factors  # [head_dim / 2]
        self._rotated_scale = config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Run all layers over the step's tokens. token_ids and positions [num_tokens] → [num_tokens, hidden_size]."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        angles = torch.outer(positions.float(), self._frequencies).unsqueeze(1)  # [num_tokens, 1, head_dim / 2]
        cos, sin = angles.cos() * self._rotated_scale, angles.sin() * self._rotated_scale

        x = functional.embedding(token_ids, self._weights.embedding)  # [num_tokens, hidden_size]
        for index, layer in enumerate(self._weights.layers):
            qkv = functional.linear(self._norm(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(x), num_rotated + config.num_kv_heads, config.head_dim)
            rotated = _rotate(qkv[:, :num_rotated], cos, sin)
            attended = attention.attend(
                index,
                rotated[:, : config.num_heads],  # query [num_tokens, num_heads, head_dim]
                rotated[:, config.num_heads :],  # key [num_tokens, num_kv_heads, head_dim]
                qkv[:, num_rotated:],  # value [num_tokens, num_kv_heads, head_dim]
            )
            x = x + functional.linear(attended, layer.attention_out, layer.attention_out_bias)

            gate_up = functional.linear(self._norm(x, layer.feed_forward_norm), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → float32 [num_rows, num_tokens]. Padding of the head has no logit, so no id that
        the tokenizer lacks is ever sampled or listed."""
        head = self._weights.head[: self._config.num_tokens]
        return functional.linear(self._norm(hidden, self._weights.final_norm), head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm, computed in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return wide.to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's first half against its second, in float32. x [num_tokens, num_heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

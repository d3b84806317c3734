"""The model, inference only: the arithmetic from token ids to logits. Knows no file, no page, no sequence.

One decoder for all model families: what sets them apart is data in ``ModelConfig``. Sources: Touvron et al. 2023
(arXiv:2302.13971) for the Llama model that all of them vary; Ainslie et al. 2023 (arXiv:2305.13245), grouped-query attention;
Henry et al. 2020 (arXiv:2010.04245), norms of queries and keys; Gemma Team 2025 (arXiv:2503.19786), norms after attention and
feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llm_engine.attention import AttentionStep
from llm_engine.decoder_weights import DecoderWeights
from llm_engine.layer_config import Rope
from llm_engine.model_config import ModelConfig
from llm_engine.rms_norm import Norm
from llm_engine.rope_frequencies import rope_frequencies
from llm_engine.rope_scaling import YarnScaling
from llm_engine.rotation import Rotation


class Decoder:
    """The model with its weights. Stateless: keys and values live behind the ``AttentionStep``."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights
        self._frequencies = {  # each [head_dim / 2]
            rope: rope_frequencies(rope.theta, config.head_dim, rope.scaling).to(self.device) / weights.rope_factors
            for rope in {layer.rope for layer in config.layers}
            if rope is not None
        }

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def num_tokens(self) -> int:
        """Logits a row."""
        return self._config.num_tokens

    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionStep, kept: Tensor | None = None
    ) -> Tensor:
        """Run all layers over the step's tokens. token_ids and positions [num_tokens] → [num_tokens, hidden_size], of the type
        of the embedding's vectors; or only those of the tokens whose places are in ``kept``, [num_kept]."""
        x, fed = self.layers(self.embedded(token_ids), self.rotations(positions), attention, kept)
        return x + fed

    def embedded(self, token_ids: Tensor) -> Tensor:
        """What the layers start from: token_ids [num_tokens] → [num_tokens, hidden_size]."""
        return self._weights.embedding(token_ids) * self._config.embedding_scale

    def rotations(self, positions: Tensor) -> dict[Rope, Rotation]:
        """Of the tokens at positions [num_tokens], for every kind of layer."""
        return {rope: self._rotation(rope, positions) for rope in self._frequencies}

    def layers(
        self, x: Tensor, rotations: Mapping[Rope, Rotation], attention: AttentionStep, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over x [num_tokens, hidden_size]. Returns two such, whose sum is the result; the first may lie where
        ``x`` lay. Of the others than ``kept`` the last layer computes keys and values alone."""
        fed: Tensor | None = None  # what the layer before adds to x
        for index, layer in enumerate(self._weights.layers):
            rope = self._config.layers[index].rope
            x, normed = layer.attention_norm.of_sum(x, fed)
            rotation = None if rope is None else rotations[rope]
            attended = self._attend(index, normed, rotation, attention)
            if kept is not None and layer is self._weights.layers[-1]:
                x, attended = x[kept], attended[kept]
            attended = _normed(layer.attention_out(attended), layer.attention_out_norm)
            x, normed = layer.feed_forward_norm.of_sum(x, attended)
            fed = _normed(layer.feed_forward(normed), layer.feed_forward_out_norm)
        assert fed is not None, "a model has layers"
        return x, fed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → float32 [num_rows, num_tokens]."""
        logits = self._weights.head(self._weights.final_norm(hidden)).float()
        cap = self._config.logit_soft_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _attend(self, index: int, x: Tensor, rotation: Rotation | None, attention: AttentionStep) -> Tensor:
        """The attention of one layer, [num_tokens, num_heads * head_dim]."""
        config, layer = self._config, self._weights.layers[index]
        num_heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        heads = layer.qkv(x).view(len(x), sum(num_heads), config.head_dim)
        query, key, value = torch.split(heads, num_heads, dim=1)
        return attention.attend(index, _normed(query, layer.query_norm), _normed(key, layer.key_norm), value, rotation)

    def _rotation(self, rope: Rope, positions: Tensor) -> Rotation:
        angles = torch.outer(positions.float(), self._frequencies[rope])
        scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
        return Rotation(angles.cos() * scale, angles.sin() * scale)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)

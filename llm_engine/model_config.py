"""The shape of a model: sizes and constants, whatever kind of file stated them. Model families differ by this data alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from llm_engine.layer_config import LayerConfig
from serving_core.kv_page_layout import KVDType, KVPageLayout


class Activation(StrEnum):
    """What is applied to the gate of a feed-forward network."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: ``num_chosen`` of ``num_experts`` compute each token, weighted by the router's probabilities, which
    with ``is_normalized`` are divided by the sum of the chosen ones."""

    num_experts: int
    num_chosen: int
    feed_forward_size: int
    is_normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model.

    ``max_model_len`` is the window in tokens that the weights are made for. ``vocab_size`` is the number of rows of the
    embedding matrix; ``num_tokens`` of them, the first, have a token in the tokenizer: the rest is padding, and never chosen.
    ``feed_forward_size`` is that of the layers without experts. ``is_tied``: the output head is the embedding matrix.

    ``attention_scale`` multiplies the products of queries and keys, ``embedding_scale`` the embeddings. With
    ``logit_soft_cap`` c a logit x becomes c tanh(x / c). ``has_query_key_norms``: each head's query and key are normed before
    they are rotated. ``has_out_norms``: what attention and feed-forward yield is normed before it is added.
    """

    layers: tuple[LayerConfig, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward_size: int
    vocab_size: int
    num_tokens: int
    max_model_len: int
    rms_norm_eps: float
    attention_scale: float
    is_tied: bool
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_feed_forward_bias: bool = False
    has_query_key_norms: bool = False
    has_out_norms: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def page_layout(self, *, page_size: int, dtype: KVDType) -> KVPageLayout:
        """The layout of this model's KV pages, the same in every layer."""
        return KVPageLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
        )

"""The shape of a Llama-family model: sizes and constants, whatever kind of file stated them."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.rope_scaling import RopeScaling
from serving_core.kv_page_layout import KVDType, KVPageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model.

    ``max_model_len`` is the window in tokens that the weights are made for. ``vocab_size`` is the number of rows of the
    embedding matrix; ``num_tokens`` of them, the first, have a token in the tokenizer: the rest is padding, and never chosen.
    ``is_tied``: the output head is the embedding matrix.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward_size: int
    vocab_size: int
    num_tokens: int
    max_model_len: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float
    is_tied: bool
    has_attention_bias: bool = False
    has_feed_forward_bias: bool = False

    def page_layout(self, *, page_size: int, dtype: KVDType) -> KVPageLayout:
        """The layout of this model's KV pages."""
        return KVPageLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
        )

"""The sizes of the tiny model."""

from __future__ import annotations

import numpy as np

from llm_engine.layer_config import LayerConfig, Rope
from llm_engine.model_config import ModelConfig

TINY_CONFIG = ModelConfig(
    layers=(LayerConfig(rope=Rope(theta=10_000.0)),) * 2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    feed_forward_size=128,
    vocab_size=267,
    num_tokens=267,
    max_model_len=512,
    rms_norm_eps=float(np.float32(1e-5)),
    attention_scale=0.25,
    is_tied=True,
)

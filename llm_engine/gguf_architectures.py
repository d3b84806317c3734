"""What llama.cpp takes for granted of each architecture that we serve: its files do not state it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm_engine.model_config import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """``is_interleaved``: the file interleaves the two halves of each query and key head (row 2i, row 2i + 1), where the model
    keeps one half after the other (row i, row i + head_dim / 2).

    Every ``no_rope_interval``-th layer has no rotary embedding. Of the layers of an architecture with a sliding window, every
    ``global_interval``-th attends to everything; the others have a rotary embedding of base ``local_rope_theta``, not scaled.
    In models of ``few_heads_num_layers`` layers queries are scaled as if heads had hidden_size / num_heads dimensions.
    ``end_of_turn`` is the text of a token that ends an answer where the file does not name one.
    """

    is_interleaved: bool = False
    activation: Activation = Activation.SILU
    has_experts: bool = False
    has_qkv_bias: bool = False
    has_query_key_norms: bool = False
    has_out_norms: bool = False
    is_embedding_scaled: bool = False
    no_rope_interval: int | None = None
    global_interval: int | None = None
    local_rope_theta: float = 10_000.0
    few_heads_num_layers: int | None = None
    end_of_turn: str | None = None


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(is_interleaved=True),
    "smollm3": GgufArchitecture(is_interleaved=True, no_rope_interval=4),
    "qwen2": GgufArchitecture(has_qkv_bias=True),
    "qwen3": GgufArchitecture(has_query_key_norms=True),
    "qwen3moe": GgufArchitecture(has_query_key_norms=True, has_experts=True),
    "gemma3": GgufArchitecture(
        activation=Activation.GELU_TANH,
        has_query_key_norms=True,
        has_out_norms=True,
        is_embedding_scaled=True,
        global_interval=6,
        few_heads_num_layers=62,
        end_of_turn="<end_of_turn>",
    ),
}

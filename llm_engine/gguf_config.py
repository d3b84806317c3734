"""A model's shape as its GGUF metadata states it. Refuses what the model code does not compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from llm_engine.gguf_architectures import ARCHITECTURES, GgufArchitecture
from llm_engine.gguf_file import GgufFile
from llm_engine.layer_config import MIN_ROPE_THETA, LayerConfig, Rope
from llm_engine.model_config import ExpertsConfig, ModelConfig
from llm_engine.rope_scaling import LinearScaling
from serving_core.engine_config import MIN_MODEL_LEN
from serving_core.errors import ModelFileError
from serving_core.gguf_header import ArrayLength
from serving_core.model_numbers import MIN_NUMBER, checked_count, checked_number

_NEUTRAL: Mapping[str, tuple[int, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.temperature_length": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
}
"""Keys that would change the arithmetic, and the values with which they do not."""


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Read the metadata. Raises ModelFileError for another architecture, a missing value or an unsupported variant."""
    architecture = read_architecture(file)
    reader = _MetadataReader(file, str(file.metadata["general.architecture"]))
    for key, values in _NEUTRAL.items():
        reader.refuse_unless(key, *values)
    hidden_size = reader.count("embedding_length")
    num_heads = reader.count("attention.head_count")
    head_dim = reader.count("attention.key_length", default=max(1, hidden_size // num_heads))
    num_kv_heads = reader.count("attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{file.path} states {num_heads} query heads of {head_dim} on {num_kv_heads} key-value heads; the first must "
            "be a multiple of the last, and a head's size even."
        )
    reader.refuse_unless("attention.value_length", head_dim)
    reader.refuse_unless("rope.dimension_count", head_dim)
    num_layers = reader.count("block_count")
    has_few_heads = num_layers == architecture.few_heads_num_layers
    vocab_size = _vocab_size(file)
    return ModelConfig(
        layers=_read_layers(reader, architecture, num_layers),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        feed_forward_size=reader.count("feed_forward_length"),
        vocab_size=vocab_size,
        num_tokens=_num_tokens(file, vocab_size),
        max_model_len=reader.count("context_length", smallest=MIN_MODEL_LEN),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
        attention_scale=1 / math.sqrt(hidden_size / num_heads if has_few_heads else head_dim),
        is_tied="output.weight" not in file.tensors,
        activation=architecture.activation,
        embedding_scale=math.sqrt(hidden_size) if architecture.is_embedding_scaled else 1.0,
        logit_soft_cap=reader.optional_number("final_logit_softcapping"),
        experts=_read_experts(reader, architecture),
        has_qkv_bias=architecture.has_qkv_bias,
        has_query_key_norms=architecture.has_query_key_norms,
        has_out_norms=architecture.has_out_norms,
    )


def read_architecture(file: GgufFile) -> GgufArchitecture:
    """What the file's architecture implies. Raises ModelFileError for one that is not supported."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(repr(name) for name in ARCHITECTURES)
        raise ModelFileError(f"{file.path} holds a model of architecture {name!r}; supported are {supported}.")
    return ARCHITECTURES[name]


def read_eos_token_ids(file: GgufFile) -> frozenset[int]:
    """The ids that end an answer: end of sequence, and end of turn and of message where the file names them or its architecture
    does. Raises ModelFileError for one that is no token."""
    num_tokens = _num_tokens(file, _vocab_size(file))
    reader = _MetadataReader(file, "tokenizer.ggml")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {reader.token_id(key, num_tokens) for key in keys if reader.states(key)}
    end_of_turn = read_architecture(file).end_of_turn
    if end_of_turn is not None and not reader.states("eot_token_id"):
        ids |= set(file.token_ids(end_of_turn))
    return frozenset(ids)


def _read_layers(reader: _MetadataReader, architecture: GgufArchitecture, num_layers: int) -> tuple[LayerConfig, ...]:
    reader.check_number_of("layers", num_layers)
    scaling = reader.refuse_unless("rope.scaling.type", "none", "linear")
    factor = reader.number("rope.scaling.factor", default=1.0) if scaling == "linear" else 1.0
    theta = reader.number("rope.freq_base", default=10_000.0, smallest=MIN_ROPE_THETA)
    global_rope = Rope(theta=theta, scaling=LinearScaling(factor=factor) if factor != 1.0 else None)
    global_interval, no_rope_interval = architecture.global_interval, architecture.no_rope_interval
    global_layer = LayerConfig(rope=global_rope, has_experts=architecture.has_experts)
    if global_interval is None:
        reader.refuse_unless("attention.sliding_window", 0)
        nowhere = LayerConfig(rope=None, has_experts=architecture.has_experts)
        return tuple(
            nowhere if no_rope_interval is not None and number % no_rope_interval == 0 else global_layer
            for number in range(1, num_layers + 1)
        )
    reader.refuse_unless("attention.sliding_window_pattern", global_interval)
    local_layer = LayerConfig(
        rope=Rope(theta=reader.number("rope.freq_base_swa", default=architecture.local_rope_theta, smallest=MIN_ROPE_THETA)),
        sliding_window=reader.count("attention.sliding_window"),
        has_experts=architecture.has_experts,
    )
    return tuple(local_layer if number % global_interval else global_layer for number in range(1, num_layers + 1))


def _read_experts(reader: _MetadataReader, architecture: GgufArchitecture) -> ExpertsConfig | None:
    if not architecture.has_experts:
        reader.refuse_unless("expert_count", 0)
        return None
    num_experts, num_chosen = reader.count("expert_count"), reader.count("expert_used_count")
    if num_chosen > num_experts:
        raise reader.wrong("expert_used_count", f"at most {num_experts}, the number of experts")
    reader.refuse_unless("expert_gating_func", 1)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        feed_forward_size=reader.count("expert_feed_forward_length"),
        is_normalized=True,
    )


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{file.path} lacks the tensor token_embd.weight.")
    return embedding.shape[0]


def _num_tokens(file: GgufFile, vocab_size: int) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, ArrayLength):
        return vocab_size
    if tokens.length > vocab_size:
        raise ModelFileError(f"{file.path} has {tokens.length} tokens but embeddings for {vocab_size}.")
    return tokens.length


class _MetadataReader:
    """Values of the keys that begin with ``prefix``."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix

    def states(self, key: str) -> bool:
        return self._key(key) in self._file.metadata

    def count(self, key: str, *, default: int | None = None, smallest: int = 1) -> int:
        return checked_count(self._get(key, default), partial(self.wrong, key), smallest=smallest)

    def number(self, key: str, *, default: float | None = None, smallest: float = MIN_NUMBER) -> float:
        return checked_number(self._get(key, default), partial(self.wrong, key), smallest=smallest)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self._file.metadata.get(self._key(key), 0) != 0 else None

    def token_id(self, key: str, num_tokens: int) -> int:
        value = self._file.metadata[self._key(key)]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self.wrong(key, f"a token's id, below {num_tokens}")
        return value

    def refuse_unless(self, key: str, *supported: int | str) -> int | str:
        """The key's value, or the first of ``supported`` when the file does not state it."""
        value = self._file.metadata.get(self._key(key), supported[0])
        for candidate in supported:
            if value == candidate:
                return candidate
        raise self.wrong(key, " or ".join(repr(candidate) for candidate in supported))

    def check_number_of(self, noun: str, number: int) -> None:
        """Raises for more layers, say, than there are tensors, before something is made for each of them."""
        if number > len(self._file.tensors):
            raise ModelFileError(
                f"{self._file.path} states {number} {noun} and holds {len(self._file.tensors)} tensors in all."
            )

    def wrong(self, key: str, right: str) -> ModelFileError:
        value = self._file.metadata.get(self._key(key))
        found = "lacks" if value is None else f"has {value!r} for"
        return ModelFileError(f"{self._file.path} {found} {self._key(key)}, which must be {right}.")

    def _get(self, key: str, default: object) -> object:
        return self._file.metadata.get(self._key(key), default)

    def _key(self, key: str) -> str:
        return f"{self._prefix}.{key}"

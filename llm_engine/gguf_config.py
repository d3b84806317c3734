"""A model's shape as its GGUF metadata states it. Refuses what the model code does not compute."""

from __future__ import annotations

from llm_engine.gguf_file import GgufFile
from llm_engine.model_config import ModelConfig
from llm_engine.rope_scaling import LinearScaling
from serving_core.errors import ModelFileError
from serving_core.gguf_header import ArrayLength


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Read the metadata. Raises ModelFileError for another architecture, a missing value or an unsupported variant."""
    reader = _MetadataReader(file)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelFileError(f"{file.path} holds a model of architecture {architecture!r}; supported is 'llama'.")
    reader.refuse_unless("llama.expert_count", 0)
    reader.refuse_unless("llama.attention.causal", True)
    scaling = reader.refuse_unless("llama.rope.scaling.type", "none", "linear")

    hidden_size = reader.count("llama.embedding_length")
    num_heads = reader.count("llama.attention.head_count")
    head_dim = reader.count("llama.attention.key_length", default=hidden_size // num_heads)
    reader.refuse_unless("llama.attention.value_length", head_dim)
    reader.refuse_unless("llama.rope.dimension_count", head_dim)
    num_kv_heads = reader.count("llama.attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{file.path} states {num_heads} query heads of {head_dim} on {num_kv_heads} key-value heads; the first must "
            "be a multiple of the last, and a head's size even."
        )
    factor = reader.number("llama.rope.scaling.factor", default=1.0) if scaling == "linear" else 1.0
    num_layers = reader.count("llama.block_count")
    if num_layers > len(file.tensors):
        raise ModelFileError(f"{file.path} states {num_layers} layers and holds {len(file.tensors)} tensors in all.")
    vocab_size = _vocab_size(file)
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        feed_forward_size=reader.count("llama.feed_forward_length"),
        vocab_size=vocab_size,
        num_tokens=_num_tokens(file, vocab_size),
        max_model_len=reader.count("llama.context_length"),
        rope_theta=reader.number("llama.rope.freq_base", default=10_000.0),
        rope_scaling=LinearScaling(factor=factor) if factor != 1.0 else None,
        rms_norm_eps=reader.number("llama.attention.layer_norm_rms_epsilon"),
        is_tied="output.weight" not in file.tensors,
    )


def read_eos_token_ids(file: GgufFile) -> frozenset[int]:
    """The ids that end an answer: end of sequence, and end of turn and of message where the file names them. Raises
    ModelFileError for one that is no token."""
    reader = _MetadataReader(file)
    num_tokens = _num_tokens(file, _vocab_size(file))
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return frozenset(reader.token_id(key, num_tokens) for key in keys if key in file.metadata)


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
    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def count(self, key: str, *, default: int | None = None) -> int:
        value = self._file.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a number of at least 1")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._file.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(key, "a number above 0")
        return float(value)

    def token_id(self, key: str, num_tokens: int) -> int:
        value = self._file.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self._wrong(key, f"a token's id, below {num_tokens}")
        return value

    def refuse_unless(self, key: str, *supported: int | str) -> int | str:
        """The key's value, or the first of ``supported`` when the file does not state it."""
        value = self._file.metadata.get(key, supported[0])
        for candidate in supported:
            if value == candidate:
                return candidate
        raise self._wrong(key, " or ".join(repr(candidate) for candidate in supported))

    def _wrong(self, key: str, right: str) -> ModelFileError:
        value = self._file.metadata.get(key)
        found = "lacks" if value is None else f"has {value!r} for"
        return ModelFileError(f"{self._file.path} {found} {key}, which must be {right}.")

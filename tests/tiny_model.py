"""Writes a tiny random Llama as a GGUF file, tokenizer and chat template included, so that tests need no real weights.

The tokenizer is byte-level: every text has a token for each of its UTF-8 bytes, bar a few merged pairs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2. The last is the end-of-sequence token."""

TINY_EOS_TOKEN_ID = 2
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "Ġt he", "o n", "e r", "Ġ s")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_NORMAL, _CONTROL = 1, 3


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    feed_forward_size: int = 128,
    max_model_len: int = 512,
    is_tied: bool = True,
    weight_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    omit: frozenset[str] = frozenset(),
    extra_tensors: dict[str, np.ndarray] | None = None,
    tokens: dict[int, str] | None = None,
) -> Path:
    """Write the file and return ``path``. Equal arguments give equal bytes. Vocabulary: 267 tokens.

    ``weight_type`` is the stored type of every matrix; norms stay float32. ``omit`` leaves tensors out by name, for tests of
    broken files. ``extra_tensors`` are stored as they are, whatever ``omit`` says. ``tokens`` replaces texts of tokens by id.
    """
    rng = np.random.default_rng(seed)
    hidden_size = num_heads * head_dim
    kv_size = num_kv_heads * head_dim
    texts = [(tokens or {}).get(token_id, text) for token_id, text in enumerate(tiny_vocabulary())]

    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(num_layers)
    writer.add_context_length(max_model_len)
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(feed_forward_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(texts))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts)
    writer.add_token_types([_CONTROL] * len(SPECIAL_TOKENS) + [_NORMAL] * (len(texts) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(TINY_EOS_TOKEN_ID)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    def add_matrix(name: str, num_out: int, num_in: int, *, scale: float = 1.0) -> None:
        array = (rng.standard_normal((num_out, num_in)) * scale / np.sqrt(num_in)).astype(np.float32)
        if name in omit:
            return
        if weight_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            writer.add_tensor(name, array.astype(np.float16) if weight_type is GGMLQuantizationType.F16 else array)
        else:
            writer.add_tensor(name, quantize(array, weight_type), raw_dtype=weight_type)

    def add_norm(name: str) -> None:
        array = (1 + 0.1 * rng.standard_normal(hidden_size)).astype(np.float32)
        if name not in omit:
            writer.add_tensor(name, array)

    add_matrix("token_embd.weight", len(texts), hidden_size)
    if not is_tied:
        add_matrix("output.weight", len(texts), hidden_size, scale=3.0)
    add_norm("output_norm.weight")
    for layer in range(num_layers):
        add_norm(f"blk.{layer}.attn_norm.weight")
        add_norm(f"blk.{layer}.ffn_norm.weight")
        add_matrix(f"blk.{layer}.attn_q.weight", hidden_size, hidden_size, scale=2.0)
        add_matrix(f"blk.{layer}.attn_k.weight", kv_size, hidden_size, scale=2.0)
        add_matrix(f"blk.{layer}.attn_v.weight", kv_size, hidden_size)
        # Loud layers drown the embedding in the residual stream; else a tied head would only repeat the last token.
        add_matrix(f"blk.{layer}.attn_output.weight", hidden_size, hidden_size, scale=2.0)
        add_matrix(f"blk.{layer}.ffn_gate.weight", feed_forward_size, hidden_size)
        add_matrix(f"blk.{layer}.ffn_up.weight", feed_forward_size, hidden_size)
        add_matrix(f"blk.{layer}.ffn_down.weight", hidden_size, feed_forward_size, scale=2.0)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_vocabulary() -> list[str]:
    """Special tokens, the 256 byte symbols in byte order, then one token a merge."""
    return [*SPECIAL_TOKENS, *_byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]


def _byte_symbols() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 stays, the rest moves up past 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]

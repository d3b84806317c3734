"""Loads a GGUF file into a model: checks every tensor's name and shape first, then decodes them straight into place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llm_engine.gguf_file import GgufFile
from llm_engine.kv_cache import TORCH_DTYPES
from llm_engine.llama import Llama, LlamaWeights
from llm_engine.model_config import ModelConfig, read_eos_token_ids
from serving_core.errors import ModelFileError
from serving_core.kv_page_layout import KVDType

_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. ``weight_bytes`` is its size in memory; ``model_print`` tells models apart (see ``GgufFile``)."""

    config: ModelConfig
    model: Llama
    model_print: str
    eos_token_ids: frozenset[int]
    weight_bytes: int


def read_model_config(path: Path) -> ModelConfig:
    """The model's sizes, from the header alone. Raises ModelFileError."""
    with GgufFile(path) as file:
        return ModelConfig.from_gguf(file)


def load_model(path: Path, *, dtype: KVDType, on_progress: Callable[[int, int], None] | None = None) -> LoadedModel:
    """Load the weights as ``dtype``. ``on_progress`` is called with (bytes of the file decoded, bytes in all) as it goes.

    Raises ModelFileError, before any weight is read, for a file that is not a whole, supported Llama-family model.
    """
    with GgufFile(path) as file:
        config = ModelConfig.from_gguf(file)
        _check_tensors(file, config)
        weights = LlamaWeights.empty(config, dtype=TORCH_DTYPES[dtype])
        _fill(weights, file, config, on_progress or _ignore_progress)
        return LoadedModel(
            config=config,
            model=Llama(config, weights),
            model_print=file.model_print(),
            eos_token_ids=read_eos_token_ids(file),
            weight_bytes=_weight_bytes(weights),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Destination:
    """Where a tensor of the file goes: a whole tensor of the model, or some rows of one.

    ``head_dim`` is set for query and key matrices. The file interleaves the two halves of each of their heads (row 2i, row
    2i + 1); the model keeps the halves one after the other (row i, row i + head_dim / 2).
    """

    name: str
    tensor: Tensor
    head_dim: int | None = None

    def rows_of(self, first: int, count: int) -> Tensor:
        """The model's rows for rows ``first ..`` of the file."""
        rows = torch.arange(first, first + count)
        if self.head_dim is None:
            return rows
        head, within = rows // self.head_dim, rows % self.head_dim
        return head * self.head_dim + within % 2 * (self.head_dim // 2) + within // 2


def _destinations(weights: LlamaWeights, config: ModelConfig, *, has_rope_factors: bool) -> Iterator[_Destination]:
    """Every tensor that the file must hold, in the order in which it is loaded."""
    yield _Destination(name="token_embd.weight", tensor=weights.embedding)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        prefix = f"blk.{index}"
        query, key, value = torch.split(layer.qkv, [query_size, kv_size, kv_size])
        gate, up = layer.gate_up.chunk(2)
        yield _Destination(name=f"{prefix}.attn_norm.weight", tensor=layer.attention_norm)
        yield _Destination(name=f"{prefix}.attn_q.weight", tensor=query, head_dim=config.head_dim)
        yield _Destination(name=f"{prefix}.attn_k.weight", tensor=key, head_dim=config.head_dim)
        yield _Destination(name=f"{prefix}.attn_v.weight", tensor=value)
        yield _Destination(name=f"{prefix}.attn_output.weight", tensor=layer.attention_out)
        yield _Destination(name=f"{prefix}.ffn_norm.weight", tensor=layer.feed_forward_norm)
        yield _Destination(name=f"{prefix}.ffn_gate.weight", tensor=gate)
        yield _Destination(name=f"{prefix}.ffn_up.weight", tensor=up)
        yield _Destination(name=f"{prefix}.ffn_down.weight", tensor=layer.down)
    yield _Destination(name="output_norm.weight", tensor=weights.final_norm)
    if not config.is_tied:
        yield _Destination(name="output.weight", tensor=weights.head)
    if has_rope_factors:
        yield _Destination(name=_ROPE_FACTORS, tensor=weights.rope_factors)


def _check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Names and shapes, neither more nor less, against a model of the same sizes that takes no memory."""
    expected = set()
    shapes = LlamaWeights.empty(config, dtype=torch.float32, device="meta")
    for destination in _destinations(shapes, config, has_rope_factors=_ROPE_FACTORS in file.tensors):
        expected.add(destination.name)
        info = file.tensors.get(destination.name)
        if info is None:
            raise ModelFileError(f"{file.path} lacks the tensor {destination.name}.")
        if info.shape != tuple(destination.tensor.shape):
            raise ModelFileError(
                f"{file.path}: tensor {info.name} has shape {list(info.shape)}; the model's sizes ask for "
                f"{list(destination.tensor.shape)}."
            )
    for name in file.tensors:
        if name not in expected:
            raise ModelFileError(f"{file.path} holds the tensor {name}, which a plain Llama model does not have.")


def _fill(weights: LlamaWeights, file: GgufFile, config: ModelConfig, on_progress: Callable[[int, int], None]) -> None:
    num_done, num_all = 0, file.weight_bytes
    on_progress(num_done, num_all)
    for destination in _destinations(weights, config, has_rope_factors=_ROPE_FACTORS in file.tensors):
        tensor = destination.tensor.view(-1, destination.tensor.shape[-1])
        for first, rows, num_bytes in file.iter_rows(file.tensors[destination.name]):
            tensor.index_copy_(0, destination.rows_of(first, len(rows)), torch.from_numpy(rows).to(tensor.dtype))
            num_done += num_bytes
            on_progress(num_done, num_all)


def _weight_bytes(weights: LlamaWeights) -> int:
    tensors = [weights.embedding, weights.final_norm, weights.rope_factors]
    if weights.head is not weights.embedding:
        tensors.append(weights.head)
    for layer in weights.layers:
        tensors += [layer.attention_norm, layer.qkv, layer.attention_out]
        tensors += [layer.feed_forward_norm, layer.gate_up, layer.down]
    return sum(tensor.nbytes for tensor in tensors)


def _ignore_progress(num_done: int, num_all: int) -> None:
    pass

"""Loads a checkpoint into a model: decodes every tensor straight into its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llm_engine.checkpoint import Checkpoint
from llm_engine.kv_cache import TORCH_DTYPES
from llm_engine.llama import Llama, LlamaWeights
from llm_engine.llama_tensors import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, layer_tensor
from llm_engine.model_config import ModelConfig
from llm_engine.open_checkpoint import open_checkpoint
from serving_core.kv_page_layout import KVDType


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. ``weight_bytes`` is its size in memory; ``model_print`` tells models apart (see ``Checkpoint``)."""

    config: ModelConfig
    model: Llama
    model_print: str
    eos_token_ids: frozenset[int]
    weight_bytes: int


def load_model(path: Path, *, dtype: KVDType, on_progress: Callable[[int, int], None] | None = None) -> LoadedModel:
    """Load the weights of a GGUF file or a Hugging Face folder as ``dtype``. ``on_progress`` is called with (stored bytes
    decoded, stored bytes in all) as it goes.

    Raises ModelFileError, before any weight is read, for anything that is not a whole, supported Llama-family model.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        config = checkpoint.config
        weights = LlamaWeights.empty(config, dtype=TORCH_DTYPES[dtype])
        _fill(weights, checkpoint, on_progress or _ignore_progress)
        return LoadedModel(
            config=config,
            model=Llama(config, weights),
            model_print=checkpoint.model_print(),
            eos_token_ids=checkpoint.eos_token_ids,
            weight_bytes=_weight_bytes(weights),
        )


def _destinations(weights: LlamaWeights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by name, with its place in the model: a whole tensor of it, or some rows of one."""
    yield EMBEDDING, weights.embedding
    qkv_sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    for index, layer in enumerate(weights.layers):
        query, key, value = torch.split(layer.qkv, qkv_sizes)
        gate, up = layer.gate_up.chunk(2)
        places = {
            "input_layernorm.weight": layer.attention_norm,
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.o_proj.weight": layer.attention_out,
            "post_attention_layernorm.weight": layer.feed_forward_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
        }
        if layer.qkv_bias is not None and layer.attention_out_bias is not None:
            query, key, value = torch.split(layer.qkv_bias, qkv_sizes)
            places |= {"self_attn.q_proj.bias": query, "self_attn.k_proj.bias": key, "self_attn.v_proj.bias": value}
            places["self_attn.o_proj.bias"] = layer.attention_out_bias
        if layer.gate_up_bias is not None and layer.down_bias is not None:
            gate, up = layer.gate_up_bias.chunk(2)
            places |= {"mlp.gate_proj.bias": gate, "mlp.up_proj.bias": up, "mlp.down_proj.bias": layer.down_bias}
        for part, tensor in places.items():
            yield layer_tensor(index, part), tensor
    yield FINAL_NORM, weights.final_norm
    if not config.is_tied:
        yield HEAD, weights.head


def _fill(weights: LlamaWeights, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
    """Write every tensor of the checkpoint, whose shapes have been checked, exactly once."""
    destinations = dict(_destinations(weights, checkpoint.config))
    if ROPE_FACTORS in checkpoint.tensors:
        destinations[ROPE_FACTORS] = weights.rope_factors
    assert destinations.keys() == checkpoint.tensors.keys(), "what was checked is what is loaded"
    num_done, num_all = 0, sum(stored.num_bytes for stored in checkpoint.tensors.values())
    on_progress(num_done, num_all)
    for name, destination in destinations.items():
        tensor = destination.view(-1, destination.shape[-1])
        for piece in checkpoint.iter_pieces(name):
            tensor.index_copy_(0, torch.from_numpy(piece.rows), torch.from_numpy(piece.values).to(tensor.dtype))
            num_done += piece.num_bytes
            on_progress(num_done, num_all)


def _weight_bytes(weights: LlamaWeights) -> int:
    tensors = [weights.embedding, weights.final_norm, weights.rope_factors]
    if weights.head is not weights.embedding:
        tensors.append(weights.head)
    for layer in weights.layers:
        parts = (getattr(layer, field.name) for field in dataclasses.fields(layer))
        tensors += [part for part in parts if part is not None]
    return sum(tensor.nbytes for tensor in tensors)


def _ignore_progress(num_done: int, num_all: int) -> None:
    pass

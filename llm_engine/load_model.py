"""Loads a checkpoint into a model: decodes every tensor straight into its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_engine.checkpoint import Checkpoint
from llm_engine.decoder import Decoder
from llm_engine.decoder_tensors import ROPE_FACTORS
from llm_engine.decoder_weights import DecoderWeights
from llm_engine.kv_cache import TORCH_DTYPES
from llm_engine.model_config import ModelConfig
from llm_engine.open_checkpoint import open_checkpoint
from serving_core.kv_page_layout import KVDType


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. ``weight_bytes`` is its size in memory; ``model_print`` tells models apart (see ``Checkpoint``)."""

    config: ModelConfig
    model: Decoder
    model_print: str
    eos_token_ids: frozenset[int]
    weight_bytes: int


def load_model(path: Path, *, dtype: KVDType, on_progress: Callable[[int, int], None] | None = None) -> LoadedModel:
    """Load the weights of a GGUF file or a Hugging Face folder as ``dtype``. ``on_progress`` is called with (stored bytes
    decoded, stored bytes in all) as it goes.

    Raises ModelFileError, before any weight is read, for anything that is not a whole, supported model.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        config = checkpoint.config
        weights = DecoderWeights.empty(config, dtype=TORCH_DTYPES[dtype])
        _fill(weights, checkpoint, on_progress or _ignore_progress)
        return LoadedModel(
            config=config,
            model=Decoder(config, weights),
            model_print=checkpoint.model_print(),
            eos_token_ids=checkpoint.eos_token_ids,
            weight_bytes=sum(place.nbytes for place in weights.places(config).values()) + weights.rope_factors.nbytes,
        )


def _fill(weights: DecoderWeights, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
    """Write every tensor of the checkpoint, whose shapes have been checked, exactly once."""
    destinations = weights.places(checkpoint.config)
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


def _ignore_progress(num_done: int, num_all: int) -> None:
    pass

"""Loads a checkpoint into the models that a worker's phases compute with: each tensor is decoded straight into its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llm_engine.checkpoint import Checkpoint, StoredModel
from llm_engine.decoder import Decoder
from llm_engine.decoder_tensors import ROPE_FACTORS
from llm_engine.decoder_weights import DecoderWeights, WeightSource
from llm_engine.kv_cache import TORCH_DTYPES
from llm_engine.model_config import ModelConfig
from llm_engine.native.library import NativeLibrary, load_library
from llm_engine.open_checkpoint import open_checkpoint
from llm_engine.packed_weights import PackedWeights
from llm_engine.plain_weights import PlainWeights
from llm_engine.tensor_reader import TensorReader
from llm_engine.weight_plan import plan_weights, usable_quantization
from serving_core.engine_config import DEFAULT_QUANTIZATIONS, Quantization
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PhaseModel:
    """A model in one form of its weights. ``arithmetic`` names form and kernels: where it is equal, equal weights give equal
    bits. ``library`` has the kernels that the weights are packed for, None where torch computes."""

    decoder: Decoder
    library: NativeLibrary | None
    arithmetic: str
    weight_bytes: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A model ready to run, in the form that each phase asked for; phases of one form share it. ``model_print`` tells models
    apart, whatever their form (see ``Checkpoint``)."""

    config: ModelConfig
    phases: Mapping[PhaseName, PhaseModel]
    model_print: str
    eos_token_ids: frozenset[int]

    @property
    def weight_bytes(self) -> int:
        """Size in memory, of all forms together."""
        return sum(model.weight_bytes for model in set(self.phases.values()))


def load_model(
    path: Path,
    *,
    dtype: KVDType,
    quantizations: Mapping[PhaseName, Quantization] = DEFAULT_QUANTIZATIONS,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load the weights of a GGUF file or a Hugging Face folder for the phases that ``quantizations`` names, and no others.
    ``on_progress`` is called with (stored bytes decoded, stored bytes in all) as it goes.

    Raises ModelFileError, before any weight is read, for anything that is not a whole, supported model, and ConfigError for a
    quantization that cannot be.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        library = load_library() if dtype is KVDType.BFLOAT16 and _wants_library(quantizations) else None
        usable = {phase: _usable(asked, dtype, checkpoint, library) for phase, asked in quantizations.items()}
        progress = _Progress(on_progress, num_loads=len(set(usable.values())), checkpoint=checkpoint)
        models = {own: _load(checkpoint, dtype, own, library, progress) for own in dict.fromkeys(usable.values())}
        phases = {phase: models[own] for phase, own in usable.items()}
        for phase, model in phases.items():
            _log.info("%s computes with %s", phase.value, model.arithmetic)
        return LoadedModel(
            config=checkpoint.config,
            phases=phases,
            model_print=checkpoint.model_print(),
            eos_token_ids=checkpoint.eos_token_ids,
        )


class _Progress:
    """Counts stored bytes, of each form that is loaded."""

    def __init__(self, on_progress: Callable[[int, int], None] | None, *, num_loads: int, checkpoint: Checkpoint) -> None:
        self._on_progress = on_progress
        self._num_done = 0
        self._num_all = num_loads * sum(stored.num_bytes for stored in checkpoint.tensors.values())
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._num_all)


def _load(
    checkpoint: Checkpoint, dtype: KVDType, quantization: Quantization, library: NativeLibrary | None, progress: _Progress
) -> PhaseModel:
    reader = TensorReader(checkpoint, progress.advance)
    source: WeightSource
    if quantization is Quantization.NONE:
        library = None
        source, arithmetic = PlainWeights(reader, TORCH_DTYPES[dtype]), f"torch {dtype.value}"
    else:
        assert library is not None
        plan = plan_weights(StoredModel(config=checkpoint.config, tensors=checkpoint.tensors), quantization)
        source, arithmetic = PackedWeights(reader, plan, library), f"native {quantization.value}"
    weights = DecoderWeights.read(checkpoint.config, source, has_rope_factors=ROPE_FACTORS in checkpoint.tensors)
    return PhaseModel(
        decoder=Decoder(checkpoint.config, weights), library=library, arithmetic=arithmetic, weight_bytes=source.num_bytes
    )


def _wants_library(quantizations: Mapping[PhaseName, Quantization]) -> bool:
    return any(asked is not Quantization.NONE for asked in quantizations.values())


def _usable(asked: Quantization, dtype: KVDType, checkpoint: Checkpoint, library: NativeLibrary | None) -> Quantization:
    usable = usable_quantization(asked, dtype=dtype, config=checkpoint.config, has_kernels=library is not None)
    if asked is not usable and library is not None:
        _log.info("%s has rows that the native kernels do not take: torch computes with it", checkpoint.path)
    return usable

"""Loads a checkpoint into the models that a worker's phases compute with: each tensor is decoded straight into its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_engine.checkpoint import Checkpoint, StoredModel
from llm_engine.cuda.choose_kernel import choose_kernel, cuda_arithmetic
from llm_engine.cuda.device_memory import room_for
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.decoder import Decoder
from llm_engine.decoder_tensors import ROPE_FACTORS
from llm_engine.decoder_weights import DecoderWeights, WeightSource
from llm_engine.device import CPU
from llm_engine.kv_cache import TORCH_DTYPES
from llm_engine.model_config import ModelConfig
from llm_engine.native.library import NativeLibrary, find_library
from llm_engine.open_checkpoint import open_checkpoint
from llm_engine.packed_weights import PackedWeights
from llm_engine.plain_weights import PlainWeights
from llm_engine.tensor_reader import TensorReader
from llm_engine.weight_plan import has_native_form, plan_weights, simplest_alike, usable_quantization, weight_bytes
from serving_core.engine_config import DEFAULT_PAGE_SIZE, DEFAULT_QUANTIZATIONS, Quantization
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PhaseModel:
    """A model in one form of its weights. ``arithmetic`` names form and kernels: where it is equal, equal weights give equal
    bits. ``library`` has the kernels that the weights are packed for, None where torch computes; ``paged_kernel`` attends on
    CUDA, None where torch does."""

    decoder: Decoder
    library: NativeLibrary | None
    paged_kernel: PagedKernel | None
    arithmetic: str
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What phases with equal forms share one model of. ``library``: see ``PhaseModel``."""

    quantization: Quantization
    library: NativeLibrary | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A model ready to run, in the form that each phase asked for; phases of one form share it. ``model_print`` tells models
    apart, whatever their form (see ``Checkpoint``)."""

    config: ModelConfig
    phases: Mapping[PhaseName, PhaseModel]
    model_print: str
    eos_token_ids: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return next(iter(self.phases.values())).decoder.device

    @property
    def default_page_size(self) -> int:
        """Tokens of a KV page, as what attends likes them."""
        kernel = next(iter(self.phases.values())).paged_kernel
        return DEFAULT_PAGE_SIZE if kernel is None else kernel.page_size

    @property
    def weight_bytes(self) -> int:
        """Size in memory, of all forms together."""
        return sum(model.weight_bytes for model in set(self.phases.values()))


def load_model(
    path: Path,
    *,
    dtype: KVDType,
    quantizations: Mapping[PhaseName, Quantization] = DEFAULT_QUANTIZATIONS,
    eager_phases: Collection[PhaseName] = (),
    device: torch.device = CPU,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load the weights of a GGUF file or a Hugging Face folder for the phases that ``quantizations`` names, and no others.
    ``eager_phases`` are computed by torch's own operators even where the native kernels run. The weights end up on ``device``,
    on any but the CPU all of ``dtype``. ``on_progress`` is called with (stored bytes decoded, stored bytes in all) as it goes.

    Raises ModelFileError, before any weight is read, for anything that is not a whole, supported model, and ConfigError for a
    quantization that cannot be, and for weights that do not fit onto the device.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        is_library_wanted = device == CPU and not quantizations.keys() <= set(eager_phases)
        library, why_no_kernels = _library_for(checkpoint, dtype) if is_library_wanted else (None, None)
        stored = StoredModel(config=checkpoint.config, tensors=checkpoint.tensors)
        forms: dict[PhaseName, _Form] = {}
        for phase, asked in quantizations.items():
            is_eager = phase in eager_phases
            usable = usable_quantization(
                asked,
                phase,
                dtype=dtype,
                config=checkpoint.config,
                has_kernels=library is not None,
                is_eager=is_eager,
                has_gpu=device != CPU,
                why_no_kernels=why_no_kernels,
            )
            own_library = None if is_eager else library
            form = usable if own_library is None else simplest_alike(stored, usable)
            forms[phase] = _Form(quantization=form, library=own_library)
        progress = _Progress(on_progress, num_loads=len(set(forms.values())), checkpoint=checkpoint)
        models = {
            own: _load(checkpoint, dtype, own.quantization, library=own.library, device=device, progress=progress)
            for own in dict.fromkeys(forms.values())
        }
        phases = {phase: models[own] for phase, own in forms.items()}
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
    checkpoint: Checkpoint,
    dtype: KVDType,
    quantization: Quantization,
    *,
    library: NativeLibrary | None,
    device: torch.device,
    progress: _Progress,
) -> PhaseModel:
    reader = TensorReader(checkpoint, progress.advance)
    source: WeightSource
    form = dtype.value if quantization is Quantization.NONE else quantization.value
    paged_kernel: PagedKernel | None = None
    room: AbstractContextManager[None] = nullcontext()
    stored = StoredModel(config=checkpoint.config, tensors=checkpoint.tensors)
    if device != CPU:
        plain_bytes = weight_bytes(stored, dtype, [quantization], has_kernels=False)
        room = room_for(device, plain_bytes, f"the weights of {checkpoint.path} take", "give a smaller model")
        paged_kernel = choose_kernel(device, TORCH_DTYPES[dtype], checkpoint.config.head_dim)
        source = PlainWeights(reader, TORCH_DTYPES[dtype], device)
        arithmetic = cuda_arithmetic(device, form, paged_kernel)
    elif library is None:
        source, arithmetic = PlainWeights(reader, TORCH_DTYPES[dtype]), f"torch {form}"
    else:
        plan = plan_weights(stored, quantization)
        source, arithmetic = PackedWeights(reader, plan, library), f"native {form}"
    with room:
        weights = DecoderWeights.read(checkpoint.config, source, has_rope_factors=ROPE_FACTORS in checkpoint.tensors)
    return PhaseModel(
        decoder=Decoder(checkpoint.config, weights),
        library=library,
        paged_kernel=paged_kernel,
        arithmetic=arithmetic,
        weight_bytes=source.num_bytes,
    )


def _library_for(checkpoint: Checkpoint, dtype: KVDType) -> tuple[NativeLibrary | None, str | None]:
    """None where torch computes the model, and why there are no kernels where that is the reason."""
    if not has_native_form(dtype, checkpoint.config, has_kernels=True):
        if dtype is KVDType.BFLOAT16:
            _log.info("%s has rows that the native kernels do not take: torch computes with it", checkpoint.path)
        return None, None
    found = find_library()
    return (None, found) if isinstance(found, str) else (found, None)

"""In which form each matrix of a phase is held: decided here, once, for the loader and for whoever counts memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llm_engine.checkpoint import StoredModel, StoredTensor
from llm_engine.decoder_matrices import HEAD_MATRIX, Matrix, decoder_matrices
from llm_engine.decoder_tensors import EMBEDDING, is_norm, tensor_shapes
from llm_engine.model_config import ModelConfig
from llm_engine.weight_form import GROUP_SIZE, WeightForm
from serving_core.engine_config import Quantization
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_CHANNEL_MULTIPLE = 32
_EAGER = "needs the native kernels, which --enforce-eager leaves out"
_GPU = "only CPUs compute, and this worker has a GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The matrices of a phase that computes with the native kernels. ``forms`` has the form of each by its name;
    ``is_embedding_shared``: tokens are looked up in the head, whose form holds the embedding exactly."""

    forms: Mapping[str, WeightForm]
    is_embedding_shared: bool


def usable_quantization(
    asked: Quantization,
    phase: PhaseName,
    *,
    dtype: KVDType,
    config: ModelConfig,
    has_kernels: bool,
    is_eager: bool = False,
    has_gpu: bool = False,
    flag: str | None = None,
    why_no_kernels: str | None = None,
) -> Quantization:
    """What is done of what was asked for in ``phase``: NONE where AUTO finds no kernels to compute with, or is to use none
    (``is_eager``, ``has_gpu``).

    Raises ConfigError for INT8 and INT4 that cannot be. It names the ``flag`` that asked for them, by default the phase's own,
    and says why there are no kernels, where that is known, as ``NoKernels`` puts it.
    """
    obstacle = _GPU if has_gpu else _EAGER if is_eager else _obstacle(dtype, config, has_kernels, why_no_kernels)
    if asked is Quantization.NONE or obstacle is None:
        return asked
    if asked is Quantization.AUTO:
        return Quantization.NONE
    flag = flag or f"--{phase.value}-quantization"
    raise ConfigError(f"{flag} is {asked.value}, which {obstacle}; give {flag} none.")


def has_native_form(dtype: KVDType, config: ModelConfig, *, has_kernels: bool) -> bool:
    """Whether the native kernels compute the model, in whatever form its weights are."""
    return _obstacle(dtype, config, has_kernels) is None


def plan_weights(stored: StoredModel, quantization: Quantization) -> WeightPlan:
    """For a model that the native kernels compute."""
    config, tensors = stored.config, stored.tensors
    matrices = decoder_matrices(config)
    forms = {name: _form(matrix, tensors, quantization) for name, matrix in matrices.items()}
    is_shared = config.is_tied and forms[HEAD_MATRIX].holds(tensors[EMBEDDING].exact_form)
    return WeightPlan(forms=forms, is_embedding_shared=is_shared)


def simplest_alike(stored: StoredModel, quantization: Quantization) -> Quantization:
    """NONE or AUTO where it comes to the same plan: for a model without stored blocks, AUTO is NONE."""
    plan = plan_weights(stored, quantization)
    for other in (Quantization.NONE, Quantization.AUTO):
        if plan_weights(stored, other) == plan:
            return other
    return quantization


def weight_bytes(stored: StoredModel, dtype: KVDType, quantizations: Iterable[Quantization], *, has_kernels: bool) -> int:
    """What the weights take in memory: once for each plan that the phases, with these usable quantizations, compute with."""
    if not has_native_form(dtype, stored.config, has_kernels=has_kernels):
        return _plain_bytes(stored.config, dtype)
    distinct = {simplest_alike(stored, quantization) for quantization in quantizations}
    return sum(_packed_bytes(stored.config, plan_weights(stored, quantization)) for quantization in distinct)


def _plain_bytes(config: ModelConfig, dtype: KVDType) -> int:
    """All of type ``dtype``, but for norms, which are float32."""
    return sum(
        math.prod(shape) * (_FLOAT32_BYTES if is_norm(name) else dtype.num_bytes)
        for name, shape in tensor_shapes(config).items()
    )


def _packed_bytes(config: ModelConfig, plan: WeightPlan) -> int:
    """Norms and biases are float32."""
    vectors = [shape for shape in tensor_shapes(config).values() if len(shape) == 1]
    table = 0 if plan.is_embedding_shared else config.vocab_size * config.hidden_size * _BFLOAT16_BYTES
    matrices = sum(_matrix_bytes(matrix, plan.forms[name]) for name, matrix in decoder_matrices(config).items())
    return _FLOAT32_BYTES * sum(map(math.prod, vectors)) + table + matrices


def _form(matrix: Matrix, tensors: Mapping[str, StoredTensor], quantization: Quantization) -> WeightForm:
    """One for the whole matrix. The router of a mixture, which is small and decides, is never quantised; a head, whose errors
    are those of the logits, not below eight bits unless it is stored so."""
    match quantization:
        case Quantization.INT8 | Quantization.INT4 if matrix.is_router:
            return WeightForm.BFLOAT16
        case Quantization.INT8:
            return WeightForm.INT8
        case Quantization.INT4:
            return WeightForm.INT8 if matrix.is_head else WeightForm.INT4
        case Quantization.NONE:
            return WeightForm.BFLOAT16
        case _:
            return max((tensors[name].form for name in matrix.weights), key=lambda form: form.num_bits)


def _obstacle(dtype: KVDType, config: ModelConfig, has_kernels: bool, why_no_kernels: str | None = None) -> str | None:
    if dtype is not KVDType.BFLOAT16:
        return f"computes in bfloat16, but --dtype is {dtype.value}"
    odd = [matrix for matrix in decoder_matrices(config).values() if matrix.num_in % GROUP_SIZE]
    if odd:
        return f"needs rows of a multiple of {GROUP_SIZE} weights, and this model has some of {odd[0].num_in}"
    if not has_kernels:
        return f"needs the native kernels, which {why_no_kernels or 'do not run on this machine'}"
    return None


def _matrix_bytes(matrix: Matrix, form: WeightForm) -> int:
    num_out = -(-matrix.num_out // _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE
    num_weights = num_out * matrix.num_in
    scales = 2 * _FLOAT32_BYTES * num_weights // GROUP_SIZE if form.is_quantized else 0
    return num_weights * form.num_bits // 8 + scales

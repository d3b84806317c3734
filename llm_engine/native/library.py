"""The native kernels: a model's arithmetic on processors with AVX-512 and BF16, compiled on the machine that runs them."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from llm_engine.model_config import Activation
from llm_engine.native.cache_slots import CacheSlots
from llm_engine.native.calls import ActivateMultiplyCall, AttendCall, LinearCall, RmsNormCall, RotateAndStoreCall
from llm_engine.native.kernels import Kernels, NoKernels, open_kernels
from llm_engine.native.packed_weight import PackedWeight
from llm_engine.native.prompt_places import DIM_MULTIPLE, KEY_MULTIPLE, PromptPlaces
from llm_engine.native.recording import Recording
from llm_engine.native.step_places import StepPlaces
from llm_engine.weight_form import WeightForm

_log = logging.getLogger(__name__)
_NO_WINDOW = 2**40
CACHE_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8"}
"""Types of a KV cache that the kernels read and write."""


@functools.cache
def find_library() -> NativeLibrary | str:
    """The kernels, compiled when this machine runs them for the first time. Where they do not run, why, as ``NoKernels`` puts
    it; that is logged. The same for the life of the process."""
    try:
        return NativeLibrary(open_kernels())
    except NoKernels as error:
        _log.warning("Torch computes: the native kernels %s.", error)
        return str(error)


def load_library() -> NativeLibrary | None:
    """The same, None where they cannot run."""
    found = find_library()
    return found if isinstance(found, NativeLibrary) else None


class _OfThread(threading.local):
    recording: Recording | None = None


class NativeLibrary:
    """One method a kernel. Activations are bfloat16; what a method returns is newly allocated, in a recording from its memory.

    A row's result depends on that row alone, bit for bit, and not on the number of threads, which is torch's.

    Products and attention, where nearly all of the time goes, release Python's global lock: a step that kept it would let the
    worker's asyncio thread run every 5 ms at best, which is Python's switch interval. On a busy machine, a thread that woke
    every 2 ms came 2 to 4 ms late instead of 9 to 13; steps took 4 to 14 % longer, and a third while it computed for 1 ms each
    time. The other kernels take a few microseconds, in a full prefill step up to half a millisecond, and keep the lock: that
    halves how often a step may have to wait for it. A replay releases it once.

    Within ``recording`` its thread runs no kernel: its calls are kept, to be replayed. Those that cannot be fail an assertion.

    Sizes are read from shapes: ``len`` of a tensor is a function in Python, and took 1 % of a step of one sequence.
    """

    def __init__(self, kernels: Kernels) -> None:
        holding, releasing = kernels.holding, kernels.releasing
        self._of_thread = _OfThread()
        self._replay = _function(releasing, "twinpool_replay", c_void_p, c_int64, c_int64)
        self._linear = {form: _function(releasing, f"twinpool_linear_{form.value}", c_void_p) for form in WeightForm}
        self._rms_norm = _function(holding, "twinpool_rms_norm_bfloat16", c_void_p)
        self._add_rms_norm = _function(holding, "twinpool_add_rms_norm_float32", c_void_p)
        self._rotate_and_store = {
            dtype: _function(holding, f"twinpool_rotate_and_store_{name}", c_void_p) for dtype, name in CACHE_TYPES.items()
        }
        self._attend = {dtype: _function(releasing, f"twinpool_attend_{name}", c_void_p) for dtype, name in CACHE_TYPES.items()}
        attend = (*[c_void_p] * 9, *[c_int64] * 10, c_float)
        self._attend_prompts = {
            dtype: _function(releasing, f"twinpool_attend_prompts_{name}", *attend) for dtype, name in CACHE_TYPES.items()
        }
        self._sample = _function(releasing, "twinpool_sample", *[c_void_p] * 8, *[c_int64] * 3)
        self._multiply = {
            Activation.SILU: _function(holding, "twinpool_silu_multiply", c_void_p),
            Activation.GELU_TANH: _function(holding, "twinpool_gelu_tanh_multiply", c_void_p),
        }

    @contextmanager
    def recording(self, max_tokens: int) -> Iterator[Recording]:
        """Keep the calls that are made within, of ``max_tokens`` tokens each, on memory of the recording."""
        assert self._of_thread.recording is None
        recording = self._of_thread.recording = Recording(max_tokens)
        try:
            yield recording
        finally:
            self._of_thread.recording = None

    def replay(self, recording: Recording, num_tokens: int) -> None:
        """Make the recorded calls, of the first ``num_tokens`` of the tokens that they were recorded with."""
        recording.replay(self._replay, num_tokens)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x [num_rows, num_in], bias float32 [num_out] → x times the weight, plus bias, bfloat16 or float32 [num_rows,
        num_out]."""
        assert _is_plain(x, torch.bfloat16)
        num_rows, num_in = x.shape
        assert num_in == weight.num_in
        assert bias is None or (_is_plain(bias, torch.float32) and bias.shape[0] == weight.num_out)
        output = self._empty(num_rows, weight.num_out, dtype=out_dtype)
        call = LinearCall(
            num_rows,
            x.data_ptr(),
            weight.data.data_ptr(),
            None if weight.scales is None else weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            out_dtype is torch.float32,
            num_in,
            weight.num_out,
        )
        self._make(self._linear[weight.form], call)
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last dimension: x [num_rows, size] or heads, [num_tokens, num_heads, size], whose tokens may lie apart;
        weight float32 [size]. Returns bfloat16 of the same shape."""
        size = x.shape[-1]
        num_heads = x.shape[1] if x.dim() == 3 else 1
        assert x.dtype is torch.bfloat16
        assert x.stride(-1) == 1
        assert x.dim() == 2 or (x.dim() == 3 and x.stride(1) == size)
        assert _is_plain(weight, torch.float32)
        assert weight.shape[0] == size
        output = self._empty(*x.shape)
        addresses = (x.data_ptr(), None, weight.data_ptr(), output.data_ptr())
        self._make(self._rms_norm, RmsNormCall(x.shape[0], *addresses, num_heads, size, x.stride(0), eps))
        return output

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta`` to ``x`` where it lies, then norm the sum. x float32 and delta [num_rows, size], weight float32 [size].
        Returns bfloat16 [num_rows, size]."""
        assert _is_plain(x, torch.float32)
        assert delta is None or (_is_plain(delta, torch.bfloat16) and delta.shape == x.shape)
        assert _is_plain(weight, torch.float32)
        num_rows, size = x.shape
        assert weight.shape[0] == size
        output = self._empty(num_rows, size)
        addresses = (x.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), output.data_ptr())
        self._make(self._add_rms_norm, RmsNormCall(num_rows, *addresses, 1, size, size, eps))
        return output

    def activate_multiply(self, activation: Activation, gate_up: Tensor) -> Tensor:
        """gate_up [num_rows, 2 * size] → the activated first half times the second, [num_rows, size]."""
        assert _is_plain(gate_up, torch.bfloat16)
        num_rows, both_sizes = gate_up.shape
        output = self._empty(num_rows, both_sizes // 2)
        call = ActivateMultiplyCall(num_rows, gate_up.data_ptr(), output.data_ptr(), both_sizes // 2)
        self._make(self._multiply[activation], call)
        return output

    def rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        *,
        cache: Tensor,
        layer: int,
        slots: CacheSlots,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries and keys, and put keys and values into ``cache``. Returns the queries, [num_tokens, num_heads,
        head_dim].

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], whose tokens may lie
        apart; angles: cosines and sines, float32 [num_tokens, head_dim / 2], None for no rotation; cache [num_pages,
        num_layers, 2, page_size, num_kv_heads, head_dim], and with int8 scales [num_pages, num_layers, 2, page_size,
        num_kv_heads], as ``KVCache`` has them.
        """
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        for heads in (query, key, value):
            assert heads.dtype is torch.bfloat16
            assert heads.stride()[1:] == (head_dim, 1)
        _check_cache(cache, scales)
        assert cache.shape[4:] == key.shape[1:] == value.shape[1:]
        assert slots.slots.shape[0] == key.shape[0] == value.shape[0] == num_tokens
        cos, sin = angles if angles is not None else (None, None)
        assert cos is None or (_is_plain(cos, torch.float32) and cos.shape == (num_tokens, head_dim // 2))
        assert sin is None or (_is_plain(sin, torch.float32) and sin.shape == (num_tokens, head_dim // 2))
        output = self._empty(num_tokens, num_heads, head_dim)
        call = RotateAndStoreCall(
            num_tokens,
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            *(output.data_ptr(), _layer_pointer(cache, layer), slots.slots.data_ptr(), cache.stride(2)),
            None if scales is None else _layer_pointer(scales, layer),
            None if slots.scale_slots is None else slots.scale_slots.data_ptr(),
            0 if scales is None else scales.stride(2),
            *(num_heads, num_kv_heads, head_dim),
        )
        self._make(self._rotate_and_store[cache.dtype], call)
        return output

    def attend(
        self,
        query: Tensor,
        *,
        cache: Tensor,
        layer: int,
        places: StepPlaces,
        scale: float,
        sliding_window: int | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Attention of each token to the keys of its sequence up to its own. query [num_tokens, num_heads, head_dim] →
        [num_tokens, num_heads * head_dim]."""
        _check_cache(cache, scales)
        assert _is_plain(query, torch.bfloat16)
        num_tokens, num_heads, head_dim = query.shape
        assert places.num_keys.shape[0] == places.tables.shape[0] == num_tokens
        num_kv_heads = cache.shape[4]
        output = self._empty(num_tokens, num_heads * head_dim)
        call = AttendCall(
            num_tokens,
            *(query.data_ptr(), _layer_pointer(cache, layer), None if scales is None else _layer_pointer(scales, layer)),
            *(places.page_ids.data_ptr(), places.tables.data_ptr(), places.num_keys.data_ptr(), output.data_ptr()),
            *(num_heads, num_kv_heads, head_dim, cache.shape[3], cache.stride(0), cache.stride(2)),
            *((0, 0) if scales is None else (scales.stride(0), scales.stride(2))),
            _NO_WINDOW if sliding_window is None else sliding_window,
            scale,
        )
        self._make(self._attend[cache.dtype], call)
        return output

    def attend_prompts(
        self,
        query: Tensor,
        *,
        cache: Tensor,
        layer: int,
        prompts: PromptPlaces,
        scale: float,
        sliding_window: int | None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """The same for rows of many tokens each."""
        assert self._of_thread.recording is None
        _check_cache(cache, scales)
        assert _is_plain(query, torch.bfloat16)
        num_tokens, num_heads, head_dim = query.shape
        num_rows, num_kv_heads = len(prompts.num_keys), cache.shape[4]
        assert len(prompts.tables) == num_rows == len(prompts.first_tokens) - 1
        assert prompts.packed.shape[0] % KEY_MULTIPLE == prompts.packed.shape[3] % DIM_MULTIPLE == 0
        assert prompts.packed.shape[1] == num_kv_heads
        output = query.new_empty(num_tokens, num_heads * head_dim)
        self._attend_prompts[cache.dtype](
            *(query.data_ptr(), _layer_pointer(cache, layer), None if scales is None else _layer_pointer(scales, layer)),
            *(prompts.page_ids.data_ptr(), prompts.tables.data_ptr(), prompts.first_tokens.data_ptr()),
            *(prompts.num_keys.data_ptr(), prompts.packed.data_ptr(), output.data_ptr()),
            *(num_rows, num_heads, num_kv_heads, head_dim, cache.shape[3], cache.stride(0), cache.stride(2)),
            *((0, 0) if scales is None else (scales.stride(0), scales.stride(2))),
            _NO_WINDOW if sliding_window is None else sliding_window,
            scale,
        )
        return output

    def sample(
        self, logits: Tensor, *, rows: bytes, ids: bytes, biases: bytes, max_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose a token from each row of logits, float32 [num_rows, vocab_size]. ``rows``, ``ids`` and ``biases`` as
        ``NativeSampler`` packs them: what each row asks for, the int32 ids and the float64 biases that it names.

        Returns tokens, int64 [num_rows], -1 where a logit is not finite and -2 where every token is banned; and what logprobs
        were asked for: of the tokens, float64 [num_rows], and of the likeliest, int32 and float64 [num_rows, max_top].
        """
        assert self._of_thread.recording is None
        assert _is_plain(logits, torch.float32)
        num_rows, vocab_size = logits.shape
        tokens, logprobs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float64)
        top_ids = torch.empty(num_rows, max_top, dtype=torch.int32)
        top_logprobs = torch.empty(num_rows, max_top, dtype=torch.float64)
        self._sample(
            *(logits.data_ptr(), rows, ids, biases, tokens.data_ptr(), logprobs.data_ptr()),
            *(top_ids.data_ptr(), top_logprobs.data_ptr(), num_rows, vocab_size, max_top),
        )
        return tokens, logprobs, top_ids, top_logprobs

    def _make(self, kernel: Any, call: Structure) -> None:
        recording = self._of_thread.recording
        if recording is None:
            kernel(byref(call))
        else:
            recording.add(kernel, call)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        recording = self._of_thread.recording
        return torch.empty(shape, dtype=dtype) if recording is None else recording.empty(*shape, dtype=dtype)


def _function(library: ctypes.CDLL, name: str, *types: Any) -> Any:
    function = library[name]
    function.argtypes = types
    function.restype = None
    return function


def _check_cache(cache: Tensor, scales: Tensor | None) -> None:
    """Within a page nothing lies apart."""
    assert cache.dtype in CACHE_TYPES
    assert cache[0].is_contiguous()
    assert (scales is not None) == (cache.dtype is torch.int8)
    if scales is not None:
        assert scales.dtype is torch.float32
        assert scales[0].is_contiguous()
        assert scales.shape == cache.shape[:-1]


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.is_contiguous()


def _layer_pointer(cache: Tensor, layer: int) -> int:
    return cache.data_ptr() + layer * cache.stride(1) * cache.element_size()

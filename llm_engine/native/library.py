"""The native kernels: decode's arithmetic on processors with AVX-512 and BF16, compiled on the machine that runs them."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from llm_engine.model_config import Activation
from llm_engine.native.compiler import CannotBuild, Kernels, open_kernels
from llm_engine.native.packed_weight import PackedWeight
from llm_engine.native.step_places import StepPlaces
from llm_engine.weight_form import WeightForm
from serving_core.cpu_features import has_avx512_bfloat16

_log = logging.getLogger(__name__)
_NO_WINDOW = 2**40


@functools.cache
def load_library() -> NativeLibrary | None:
    """The kernels, compiled when this machine runs them for the first time. None where they cannot run, which is logged; the
    same for the life of the process."""
    if not has_avx512_bfloat16():
        _log.info("Decode runs on torch's kernels: the native ones need a processor with AVX-512 BF16.")
        return None
    try:
        return NativeLibrary(open_kernels())
    except CannotBuild as error:
        _log.warning("Decode runs on torch's kernels: the native ones cannot be built (%s).", error)
        return None


class NativeLibrary:
    """One method a kernel. Activations are bfloat16; what a method returns is newly allocated.

    A row's result depends on that row alone, bit for bit, and not on the number of threads, which is torch's.

    Products and attention, where nearly all of the time goes, release Python's global lock: a step that kept it would let the
    worker's asyncio thread run every 5 ms at best, which is Python's switch interval. On a busy machine, a thread that woke
    every 2 ms came 2 to 4 ms late instead of 9 to 13; steps took 4 to 14 % longer, and a third while it computed for 1 ms each
    time. The other kernels take a few microseconds and keep the lock: that halves how often a step may have to wait for it.
    """

    def __init__(self, kernels: Kernels) -> None:
        holding, releasing = kernels.holding, kernels.releasing
        self._linear = {
            form: _function(releasing, f"twinpool_linear_{form.value}", *[c_void_p] * 5, *[c_int64] * 3) for form in WeightForm
        }
        self._rms_norm = _function(holding, "twinpool_rms_norm", *[c_void_p] * 4, *[c_int64] * 4, c_float)
        self._rotate_and_store = _function(
            holding, "twinpool_rotate_and_store", *[c_void_p, c_int64] * 3, *[c_void_p] * 5, *[c_int64] * 5
        )
        self._attend = _function(releasing, "twinpool_attend", *[c_void_p] * 6, *[c_int64] * 8, c_float)
        multiply = (c_void_p, c_void_p, c_int64, c_int64)
        self._multiply = {
            Activation.SILU: _function(holding, "twinpool_silu_multiply", *multiply),
            Activation.GELU_TANH: _function(holding, "twinpool_gelu_tanh_multiply", *multiply),
        }

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [num_rows, num_in], bias float32 [num_out] → x times the weight, plus bias, [num_rows, num_out]."""
        assert _is_plain(x, torch.bfloat16)
        num_rows, num_in = x.shape
        assert num_in == weight.num_in
        assert bias is None or (_is_plain(bias, torch.float32) and len(bias) == weight.num_out)
        output = x.new_empty(num_rows, weight.num_out)
        self._linear[weight.form](
            x.data_ptr(),
            weight.data.data_ptr(),
            None if weight.scales is None else weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            num_rows,
            num_in,
            weight.num_out,
        )
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last dimension: x [num_rows, size] or heads, [num_tokens, num_heads, size], whose tokens may lie apart;
        weight float32 [size]. Returns the same shape."""
        size = x.shape[-1]
        num_heads = x.shape[1] if x.dim() == 3 else 1
        assert x.dtype is torch.bfloat16
        assert x.stride(-1) == 1
        assert x.dim() == 2 or (x.dim() == 3 and x.stride(1) == size)
        assert _is_plain(weight, torch.float32)
        assert len(weight) == size
        output = x.new_empty(x.shape)
        self._rms_norm(
            *(x.data_ptr(), None, weight.data_ptr(), output.data_ptr()), *(len(x), num_heads, size, x.stride(0)), eps
        )
        return output

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta`` to ``x`` where it lies, then norm the sum. x and delta [num_rows, size], weight float32 [size]."""
        assert _is_plain(x, torch.bfloat16)
        assert delta is None or (_is_plain(delta, torch.bfloat16) and delta.shape == x.shape)
        assert _is_plain(weight, torch.float32)
        num_rows, size = x.shape
        assert len(weight) == size
        output = x.new_empty(num_rows, size)
        self._rms_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            *(num_rows, 1, size, size),
            eps,
        )
        return output

    def activate_multiply(self, activation: Activation, gate_up: Tensor) -> Tensor:
        """gate_up [num_rows, 2 * size] → the activated first half times the second, [num_rows, size]."""
        assert _is_plain(gate_up, torch.bfloat16)
        num_rows, both_sizes = gate_up.shape
        output = gate_up.new_empty(num_rows, both_sizes // 2)
        self._multiply[activation](gate_up.data_ptr(), output.data_ptr(), num_rows, both_sizes // 2)
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
        places: StepPlaces,
    ) -> Tensor:
        """Rotate queries and keys, and put keys and values into ``cache``. Returns the queries, [num_tokens, num_heads,
        head_dim].

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim], whose tokens may lie
        apart; angles: cosines and sines, float32 [num_tokens, head_dim / 2], None for no rotation; cache [num_pages,
        num_layers, 2, page_size, num_kv_heads, head_dim].
        """
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        for heads in (query, key, value):
            assert heads.dtype is torch.bfloat16
            assert heads.stride()[1:] == (head_dim, 1)
        assert _is_plain(cache, torch.bfloat16)
        assert cache.shape[4:] == key.shape[1:] == value.shape[1:]
        assert len(places.slots) == len(key) == len(value) == num_tokens
        cos, sin = angles if angles is not None else (None, None)
        assert cos is None or (_is_plain(cos, torch.float32) and cos.shape == (num_tokens, head_dim // 2))
        assert sin is None or (_is_plain(sin, torch.float32) and sin.shape == (num_tokens, head_dim // 2))
        output = query.new_empty(num_tokens, num_heads, head_dim)
        self._rotate_and_store(
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            *(output.data_ptr(), _layer_pointer(cache, layer), places.slots.data_ptr(), cache.stride(2)),
            *(num_tokens, num_heads, num_kv_heads, head_dim),
        )
        return output

    def attend(
        self, query: Tensor, *, cache: Tensor, layer: int, places: StepPlaces, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Attention of each token to the keys of its sequence up to its own. query [num_tokens, num_heads, head_dim] →
        [num_tokens, num_heads * head_dim]."""
        assert _is_plain(query, torch.bfloat16)
        num_tokens, num_heads, head_dim = query.shape
        assert len(places.num_keys) == len(places.tables) == num_tokens
        num_kv_heads = cache.shape[4]
        output = query.new_empty(num_tokens, num_heads * head_dim)
        self._attend(
            *(query.data_ptr(), _layer_pointer(cache, layer)),
            *(places.page_ids.data_ptr(), places.tables.data_ptr(), places.num_keys.data_ptr(), output.data_ptr()),
            *(num_tokens, num_heads, num_kv_heads, head_dim, cache.shape[3], cache.stride(0), cache.stride(2)),
            _NO_WINDOW if sliding_window is None else sliding_window,
            scale,
        )
        return output


def _function(library: ctypes.CDLL, name: str, *types: Any) -> Any:
    function = library[name]
    function.argtypes = types
    function.restype = None
    return function


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.is_contiguous()


def _layer_pointer(cache: Tensor, layer: int) -> int:
    return cache.data_ptr() + layer * cache.stride(1) * cache.element_size()

"""Puts together what computes a phase's steps on a CUDA device."""

from __future__ import annotations

import logging

from llm_engine.attention import ROW_MULTIPLE, TorchAttention
from llm_engine.cuda.bucket_forward import BucketForward
from llm_engine.cuda.device_memory import room_for
from llm_engine.cuda.graph import GraphRecorder, Recorder
from llm_engine.cuda.paged_attention import PagedAttention
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.cuda.placed_attention import PlacedAttention
from llm_engine.decoder import Decoder
from llm_engine.forward import DeviceForward, EagerForward
from llm_engine.kv_cache import KVCache
from llm_engine.model_config import ModelConfig
from serving_core.errors import ConfigError
from serving_core.worker_status import PhaseName

_log = logging.getLogger(__name__)


def cuda_forward(
    phase: PhaseName,
    decoder: Decoder,
    config: ModelConfig,
    cache: KVCache,
    kernel: PagedKernel | None,
    *,
    max_graph_rows: int,
    recorder: Recorder | None = None,
) -> DeviceForward:
    """Torch attends, over gathered pages, without a ``kernel`` and where the cache holds another type than the activations,
    which no kernel here reads. Decode steps of up to ``max_graph_rows`` rows are launched as CUDA graphs, 0 for none; a
    ``recorder`` takes the place of these. Raises ConfigError for pages that the kernel does not take, and for graphs that do
    not fit onto the device."""
    scale, windows = config.attention_scale, [layer.sliding_window for layer in config.layers]
    if kernel is not None and cache.tensor.dtype != decoder.dtype:
        _log.warning(
            "keys and values in %s are read by torch, which is slower than %s: --kv-cache-dtype auto",
            cache.layout.dtype.value,
            kernel.name,
        )
        kernel = None
    if kernel is None:
        inner = TorchAttention(cache, scale=scale, sliding_windows=windows)
        return EagerForward(decoder, PlacedAttention(inner, decoder.device), row_multiple=ROW_MULTIPLE)
    check_page_size(cache.layout.page_size, kernel)
    attention = PagedAttention(cache, kernel, scale=scale, sliding_windows=windows)
    eager = EagerForward(decoder, attention, row_multiple=1)
    if phase is not PhaseName.DECODE:
        return eager
    num_table_pages = cache.max_row_pages(config.max_model_len)
    forward = BucketForward(decoder, attention, cache, num_table_pages=num_table_pages, ragged=eager)
    if config.experts is not None:
        _log.info("decode steps are not captured: which experts compute is only known within the step")
    elif max_graph_rows > 0:
        with room_for(decoder.device, 0, "CUDA graphs take", "give --enforce-eager or a smaller --kv-cache-memory-bytes"):
            forward.record(recorder or GraphRecorder(decoder.device), max_graph_rows)
    return forward


def check_page_size(page_size: int, kernel: PagedKernel) -> None:
    """Raises ConfigError for pages that the kernel does not take."""
    if page_size % kernel.page_size_multiple:
        raise ConfigError(
            f"--block-size is {page_size}, but {kernel.name} reads pages of a multiple of {kernel.page_size_multiple} tokens: "
            f"give --block-size {kernel.page_size}."
        )

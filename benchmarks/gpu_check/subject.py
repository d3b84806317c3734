"""What is checked and measured: a random model, and the engine's forward passes over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.random_weights import RandomWeights
from llm_engine.cuda.choose_kernel import choose_kernel
from llm_engine.cuda.cuda_forward import cuda_forward
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel
from llm_engine.decoder import Decoder
from llm_engine.decoder_weights import DecoderWeights
from llm_engine.device import CPU
from llm_engine.forward import DeviceForward
from llm_engine.kv_cache import KVCache
from llm_engine.layer_config import LayerConfig, Rope
from llm_engine.model_config import ModelConfig
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName

LLAMA_3_8B = ModelConfig(
    layers=(LayerConfig(rope=Rope(theta=500_000.0)),) * 32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    feed_forward_size=14_336,
    vocab_size=128_256,
    num_tokens=128_256,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    attention_scale=128**-0.5,
    is_tied=False,
)
TINY = ModelConfig(
    layers=(LayerConfig(rope=Rope(theta=10_000.0)),) * 2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    feed_forward_size=128,
    vocab_size=300,
    num_tokens=300,
    max_model_len=128,
    rms_norm_eps=1e-5,
    attention_scale=0.25,
    is_tied=False,
)
_TORCH_PAGE_SIZE = 16


class RepeatRecorder:
    """See ``Recorder``. In the place of CUDA graphs on a CPU: computes again."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Subject:
    """``kernel`` is what attends over pages, None where torch does; on a CPU it is the definition of one."""

    config: ModelConfig
    decoder: Decoder
    kernel: PagedKernel | None
    weight_bytes: int

    @classmethod
    def random(cls, config: ModelConfig, device: torch.device) -> Subject:
        """In bfloat16."""
        source = RandomWeights(config, torch.bfloat16, device)
        decoder = Decoder(config, DecoderWeights.read(config, source))
        kernel = PlainPagedKernel() if device == CPU else choose_kernel(device, torch.bfloat16, config.head_dim)
        return cls(config=config, decoder=decoder, kernel=kernel, weight_bytes=source.num_bytes)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def page_size(self) -> int:
        return _TORCH_PAGE_SIZE if self.kernel is None else self.kernel.page_size

    def new_cache(self, num_tokens_each: int, num_sequences: int) -> KVCache:
        """With pages for so many sequences, each of so many tokens."""
        layout = self.config.page_layout(page_size=self.page_size, dtype=KVDType.BFLOAT16)
        num_pages = num_sequences * layout.num_pages_for(num_tokens_each)
        return KVCache(layout, num_pages, device=self.device, has_spare_page=True)

    def by_torch(self, cache: KVCache) -> DeviceForward:
        """The reference."""
        return self._forward(PhaseName.PREFILL, cache, None)

    def prefill(self, cache: KVCache) -> DeviceForward:
        """As a prefill worker computes."""
        return self._forward(PhaseName.PREFILL, cache, self.kernel)

    def decode(self, cache: KVCache, *, max_graph_rows: int) -> DeviceForward:
        """As a decode worker computes."""
        return self._forward(PhaseName.DECODE, cache, self.kernel, max_graph_rows=max_graph_rows)

    def _forward(
        self, phase: PhaseName, cache: KVCache, kernel: PagedKernel | None, *, max_graph_rows: int = 0
    ) -> DeviceForward:
        recorder = RepeatRecorder() if self.device == CPU else None
        return cuda_forward(phase, self.decoder, self.config, cache, kernel, max_graph_rows=max_graph_rows, recorder=recorder)

"""What forms of weights and types of KV cache cost: the logits of the default model on real text, against those of float32.

The stored weights are four bits already, and are kept as they are. What quantising anew costs is therefore measured on weights
that have been moved off their grid.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.attention import AttentionBackend, AttentionRow, TorchAttention
from llm_engine.checkpoint import StoredModel
from llm_engine.decoder import Decoder
from llm_engine.decoder_weights import DecoderWeights
from llm_engine.gguf_checkpoint import GgufCheckpoint
from llm_engine.kv_cache import KVCache
from llm_engine.model_config import ModelConfig
from llm_engine.native.library import NativeLibrary, load_library
from llm_engine.native_attention import NativeAttention
from llm_engine.native_prefill_attention import NativePrefillAttention
from llm_engine.packed_weights import PackedWeights
from llm_engine.plain_weights import PlainWeights
from llm_engine.tensor_reader import TensorReader
from llm_engine.weight_plan import plan_weights
from router.tokenizer import read_tokenizer
from serving_core.engine_config import Quantization
from serving_core.ids import PageId
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.unit.llm_engine.tiny_engine import skip_without_kernels
from tests.weights import DitheredCheckpoint
from twinpool.model_source import DEFAULT_MODEL, find_model

PATH = find_model(DEFAULT_MODEL).path
QUESTIONS = Path(__file__).parents[1] / "data" / "mt_bench_80.jsonl"
NUM_TOKENS, PAGE_SIZE = 256, 16


def native_library() -> NativeLibrary:
    library = load_library()
    assert library is not None
    return library


def real_tokens() -> list[int]:
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:8]]
    text = " ".join(turn for question in questions for turn in question["turns"])
    return list(read_tokenizer(PATH).encode(text, add_special_tokens=False))[:NUM_TOKENS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The default model in one form of its weights. Without a quantization torch computes in float32, else the native kernels
    do in bfloat16."""

    config: ModelConfig
    weights: DecoderWeights
    quantization: Quantization | None

    @classmethod
    def read(cls, open_file: Callable[[Path], GgufCheckpoint], quantization: Quantization | None) -> Weighed:
        with closing(open_file(PATH)) as checkpoint:
            reader = TensorReader(checkpoint, lambda num_bytes: None)
            config = checkpoint.config
            if quantization is None:
                weights = DecoderWeights.read(config, PlainWeights(reader, torch.float32))
            else:
                plan = plan_weights(StoredModel(config=config, tensors=checkpoint.tensors), quantization)
                weights = DecoderWeights.read(config, PackedWeights(reader, plan, native_library()))
        return cls(config=config, weights=weights, quantization=quantization)

    def logits(self, cache_dtype: KVDType, *, phase: PhaseName = PhaseName.PREFILL) -> Tensor:
        """After each token of the text, float32 [NUM_TOKENS, num_tokens of the tokenizer]."""
        cache = KVCache(self.config.page_layout(page_size=PAGE_SIZE, dtype=cache_dtype), NUM_TOKENS // PAGE_SIZE)
        scale, windows = self.config.attention_scale, [None] * self.config.num_layers
        attention: AttentionBackend = TorchAttention(cache, scale=scale, sliding_windows=windows)
        if phase is PhaseName.DECODE:
            attention = NativeAttention(cache, native_library(), scale=scale, sliding_windows=windows)
        elif self.quantization is not None:
            attention = NativePrefillAttention(cache, native_library(), scale=scale, sliding_windows=windows)
        pages = tuple(map(PageId, range(cache.num_pages)))
        step = attention.begin_step([AttentionRow(num_tokens=NUM_TOKENS, start_position=0, page_ids=pages)])
        decoder = Decoder(self.config, self.weights)
        with torch.inference_mode():
            return decoder.logits(decoder.hidden_states(torch.tensor(real_tokens()), torch.arange(NUM_TOKENS), step))


def perplexity(logits: Tensor) -> float:
    return float(functional.cross_entropy(logits[:-1], torch.tensor(real_tokens()[1:])).exp())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("open_file", "bounds"),
    [
        pytest.param(GgufCheckpoint, {Quantization.NONE: (0.08, 0.01), Quantization.AUTO: (0.08, 0.01)}, id="as stored"),
        pytest.param(DitheredCheckpoint, {Quantization.INT8: (0.17, 0.01), Quantization.INT4: (2.0, 0.1)}, id="quantised anew"),
    ],
)
def test_logits_are_as_near_as_the_docs_say(
    open_file: Callable[[Path], GgufCheckpoint], bounds: dict[Quantization, tuple[float, float]]
) -> None:
    """``bounds``: of the root mean square of the logits' errors, where logits spread by 5.8; and of perplexity's rise."""
    skip_without_kernels()
    exact = Weighed.read(open_file, None).logits(KVDType.FLOAT32)
    for quantization, (max_error, max_rise) in bounds.items():
        logits = Weighed.read(open_file, quantization).logits(KVDType.BFLOAT16)
        assert_near(quantization.value, logits, exact, max_error, max_rise)


@pytest.mark.timeout(900)
def test_logits_over_each_cache_are_as_near_as_the_docs_say() -> None:
    # 1. What the cache alone costs.
    model = Weighed.read(GgufCheckpoint, None)
    exact = model.logits(KVDType.FLOAT32)
    for cache_dtype, max_error, max_rise in (
        (KVDType.FLOAT16, 0.005, 0.0005),
        (KVDType.BFLOAT16, 0.03, 0.002),
        (KVDType.INT8, 0.14, 0.004),
    ):
        logits = model.logits(cache_dtype)
        assert_near(f"float32 over {cache_dtype.value}", logits, exact, max_error, max_rise)

    # 2. Beside weights as they are stored, which cost something, too; in prefill's arithmetic and in decode's.
    skip_without_kernels()
    model = Weighed.read(GgufCheckpoint, Quantization.AUTO)
    for cache_dtype, max_error in ((KVDType.BFLOAT16, 0.08), (KVDType.FLOAT16, 0.08), (KVDType.INT8, 0.15)):
        for phase in PhaseName:
            logits = model.logits(cache_dtype, phase=phase)
            assert_near(f"auto over {cache_dtype.value}, {phase.value}", logits, exact, max_error, 0.01)


def assert_near(name: str, logits: Tensor, exact: Tensor, max_error: float, max_rise: float) -> None:
    error = float((logits - exact).square().mean().sqrt())
    rise = perplexity(logits) / perplexity(exact) - 1
    agreement = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
    figures = f"{name}: error {error:.3f}, perplexity {rise:+.2%}, same first token {agreement:.1%}"
    print(figures)
    assert error < max_error, figures
    assert abs(rise) < max_rise, figures

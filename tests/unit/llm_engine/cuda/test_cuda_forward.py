"""What computes on a device, put together. Torch's meta device stands for one: it computes nothing, but refuses to mix tensors
with those of the CPU, as CUDA does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_engine.cuda.bucket_forward import BucketForward
from llm_engine.cuda.cuda_forward import check_page_size, cuda_forward
from llm_engine.cuda.paged_kernel import PagedKernel
from llm_engine.cuda.paged_places import PagedPlaces
from llm_engine.cuda.plain_paged_kernel import PlainPagedKernel
from llm_engine.decoder import Decoder
from llm_engine.decoder_weights import DecoderWeights
from llm_engine.forward import EagerForward
from llm_engine.kv_cache import KVCache
from llm_engine.load_model import LoadedModel, load_model
from llm_engine.model_config import ExpertsConfig, ModelConfig
from llm_engine.step_plan import PlanRow, StepPlan
from serving_core.engine_config import Quantization
from serving_core.errors import ConfigError
from serving_core.ids import PageId, RequestId, SequenceKey
from serving_core.kv_page_layout import KVDType
from serving_core.worker_status import PhaseName
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import greedy_spec

META = torch.device("meta")
EXPERTS = ExpertsConfig(num_experts=4, num_chosen=2, feed_forward_size=64, is_normalized=True)


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr("llm_engine.load_model.choose_kernel", lambda device, dtype, head_dim: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "meta")
    return load_model(write_tiny_gguf(tmp_path / "tiny.gguf"), dtype=KVDType.BFLOAT16, device=META)


def make_cache(config: ModelConfig, dtype: KVDType = KVDType.BFLOAT16, *, page_size: int = 16) -> KVCache:
    return KVCache(config.page_layout(page_size=page_size, dtype=dtype), 8, device=META, has_spare_page=True)


def test_all_weights_are_on_the_device_in_the_plain_form(loaded: LoadedModel) -> None:
    model = loaded.phases[PhaseName.DECODE]
    assert model is loaded.phases[PhaseName.PREFILL], "both phases have one form"
    assert model.decoder.device == META
    assert model.library is None
    assert model.arithmetic == f"meta, torch {torch.__version__}, bfloat16, attention by torch"


def test_pages_are_as_large_as_what_attends_likes_them(loaded: LoadedModel) -> None:
    assert loaded.default_page_size == 16
    kernel = PlainPagedKernel()
    kernel.page_size = 256
    model = dataclasses.replace(loaded.phases[PhaseName.DECODE], paged_kernel=kernel)
    assert dataclasses.replace(loaded, phases={PhaseName.DECODE: model}).default_page_size == 256


def test_forms_of_the_native_kernels_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="--decode-quantization is int8, which only CPUs compute, and this worker has a GPU"):
        load_model(path, dtype=KVDType.BFLOAT16, quantizations={PhaseName.DECODE: Quantization.INT8}, device=META)


@torch.inference_mode()
def test_torch_attends_without_a_kernel_and_no_tensor_is_left_behind(loaded: LoadedModel) -> None:
    forward = _forward(loaded.phases[PhaseName.PREFILL].decoder, loaded.config, kernel=None)
    rows = [
        PlanRow(
            key=SequenceKey(RequestId(str(page))),
            token_ids=(1, 2, 3),
            start_position=14,
            page_ids=(PageId(page), PageId(page + 1)),
            sample=greedy_spec(),
        )
        for page in (0, 2)
    ]
    logits = forward.logits(StepPlan(phase=PhaseName.DECODE, rows=tuple(rows)))
    assert logits is not None
    assert logits.device == META
    assert logits.shape == (4, 267)


class ShapeKernel(PlainPagedKernel):
    """Looks at where things are, and computes nothing, since a device without numbers gives it none."""

    def __call__(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        places: PagedPlaces,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        tensors = [query, key_pages, value_pages, places.page_table, places.num_keys, places.first_tokens, places.first_keys]
        assert {tensor.device for tensor in tensors} == {META}
        return torch.empty_like(query)


@torch.inference_mode()
@pytest.mark.parametrize("num_unsampled", [0, 1])
def test_buckets_leave_no_tensor_behind(loaded: LoadedModel, num_unsampled: int) -> None:
    forward = _forward(loaded.phases[PhaseName.PREFILL].decoder, loaded.config, ShapeKernel())
    rows = [
        PlanRow(
            key=SequenceKey(RequestId(str(page))),
            token_ids=(1,),
            start_position=16 * page,
            page_ids=tuple(map(PageId, range(page + 1))),
            sample=None if page < num_unsampled else greedy_spec(),
        )
        for page in range(3)
    ]
    logits = forward.logits(StepPlan(phase=PhaseName.DECODE, rows=tuple(rows)))
    assert logits is not None
    assert logits.device == META
    assert logits.shape == (3 - num_unsampled, 267)


def test_decode_takes_buckets_and_prefill_does_not(loaded: LoadedModel) -> None:
    decoder = loaded.phases[PhaseName.PREFILL].decoder
    assert isinstance(_forward(decoder, loaded.config, PlainPagedKernel()), BucketForward)
    assert isinstance(_forward(decoder, loaded.config, PlainPagedKernel(), phase=PhaseName.PREFILL), EagerForward)
    assert isinstance(_forward(decoder, loaded.config, None), EagerForward)


class CountingRecorder:
    """See ``Recorder``."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        return compute


@pytest.mark.parametrize(
    ("phase", "max_graph_rows", "has_experts", "num_recorded"),
    [
        (PhaseName.DECODE, 4, False, 3),
        (PhaseName.DECODE, 0, False, 0),
        (PhaseName.PREFILL, 4, False, 0),
        (PhaseName.DECODE, 4, True, 0),
    ],
)
def test_decode_alone_is_recorded_and_no_mixture(
    phase: PhaseName, max_graph_rows: int, has_experts: bool, num_recorded: int, loaded: LoadedModel
) -> None:
    config, recorder = loaded.config, CountingRecorder()
    if has_experts:
        config = dataclasses.replace(config, experts=EXPERTS)
    decoder = loaded.phases[PhaseName.PREFILL].decoder
    kernel = ShapeKernel()
    cuda_forward(phase, decoder, config, make_cache(config), kernel, max_graph_rows=max_graph_rows, recorder=recorder)
    assert recorder.num_recorded == num_recorded


def test_what_runs_out_of_memory_is_refused(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class GreedyRecorder(CountingRecorder):
        def record(self, compute: Callable[[], None]) -> Callable[[], None]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def overflow(*_: object, **__: object) -> DecoderWeights:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(DecoderWeights, "read", overflow)
    config, decoder = loaded.config, loaded.phases[PhaseName.DECODE].decoder
    with pytest.raises(
        ConfigError, match=r"^the weights of .* take more than there is: meta has 1.0 GiB left; give a smaller model"
    ):
        load_model(tmp_path / "tiny.gguf", dtype=KVDType.BFLOAT16, device=META)
    with pytest.raises(ConfigError, match=r"^CUDA graphs take more than there is: meta has 1.0 GiB left; give --enforce-eager"):
        cuda_forward(
            PhaseName.DECODE, decoder, config, make_cache(config), ShapeKernel(), max_graph_rows=1, recorder=GreedyRecorder()
        )


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [KVDType.FLOAT32, KVDType.FLOAT16, KVDType.INT8, KVDType.FP8])
def test_torch_reads_a_cache_of_another_type(dtype: KVDType, loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    decoder, cache = loaded.phases[PhaseName.PREFILL].decoder, make_cache(loaded.config, dtype)
    forward = cuda_forward(PhaseName.DECODE, decoder, loaded.config, cache, ShapeKernel(), max_graph_rows=4)
    assert f"keys and values in {dtype.value} are read by torch, which is slower than" in caplog.text
    row = PlanRow(
        key=SequenceKey(RequestId("a")), token_ids=(1,), start_position=3, page_ids=(PageId(0),), sample=greedy_spec()
    )
    logits = forward.logits(StepPlan(phase=PhaseName.DECODE, rows=(row,)))
    assert logits is not None
    assert logits.device == META


def test_pages_that_a_kernel_does_not_take_are_refused() -> None:
    kernel = PlainPagedKernel()
    kernel.page_size_multiple, kernel.page_size, kernel.name = 256, 256, "flash-attn 2.8.3"
    check_page_size(512, kernel)
    with pytest.raises(
        ConfigError,
        match=r"--block-size is 16, but flash-attn 2.8.3 reads pages of a multiple of 256 tokens: give --block-size 256",
    ):
        check_page_size(16, kernel)


def _forward(
    decoder: Decoder, config: ModelConfig, kernel: PagedKernel | None, *, phase: PhaseName = PhaseName.DECODE
) -> BucketForward | EagerForward:
    forward = cuda_forward(phase, decoder, config, make_cache(config), kernel, max_graph_rows=0)
    assert isinstance(forward, BucketForward | EagerForward)
    return forward

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from llm_engine.decoder_matrices import decoder_matrices
from llm_engine.decoder_weights import DecoderWeights
from llm_engine.embedding import EmbeddingTable, PackedEmbedding
from llm_engine.kv_cache import TORCH_DTYPES
from llm_engine.native.packed_weight import unpack
from llm_engine.open_checkpoint import open_checkpoint, read_stored_model
from llm_engine.packed_weights import PackedWeights
from llm_engine.plain_weights import PlainWeights
from llm_engine.tensor_reader import TensorReader
from llm_engine.weight_form import WeightForm
from llm_engine.weight_plan import plan_weights, weight_bytes
from serving_core.engine_config import Quantization
from serving_core.kv_page_layout import WEIGHT_DTYPES, KVDType
from tests.tiny_families import FAMILIES, QWEN2, make_tiny_model, write_tiny_family_folder
from tests.tiny_model import write_tiny_gguf

NO_KERNELS: Any = None  # nothing is computed here


def ignore(num_bytes: int) -> None:
    pass


@pytest.mark.parametrize(
    ("weight_type", "form"),
    [
        (GGMLQuantizationType.Q4_0, WeightForm.INT4),
        (GGMLQuantizationType.Q4_1, WeightForm.INT4),
        (GGMLQuantizationType.Q5_0, WeightForm.INT8),
        (GGMLQuantizationType.Q5_1, WeightForm.INT8),
        (GGMLQuantizationType.Q8_0, WeightForm.INT8),
        (GGMLQuantizationType.BF16, WeightForm.BFLOAT16),
    ],
)
def test_every_matrix_has_the_stored_weights_in_their_places(
    weight_type: GGMLQuantizationType, form: WeightForm, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=weight_type)
    stored = read_stored_model(path)
    plan = plan_weights(stored, Quantization.AUTO)
    assert set(plan.forms.values()) == {form}
    with closing(open_checkpoint(path)) as checkpoint:
        packed = PackedWeights(TensorReader(checkpoint, ignore), plan, NO_KERNELS)
        plain = PlainWeights(TensorReader(checkpoint, ignore), torch.float32)
        for name in decoder_matrices(checkpoint.config):
            linear = packed.head() if name == "head" else packed.matrix(name)
            assert linear.weight.form is form
            expected = plain.head() if name == "head" else plain.matrix(name)
            assert torch.equal(unpack(linear.weight), expected.weight), name
        token_ids = torch.tensor([0, 5, 266])
        assert isinstance(packed.embedding(), PackedEmbedding)
        assert torch.equal(packed.embedding()(token_ids), plain.embedding()(token_ids))


def test_weights_that_are_quantised_anew_are_near_and_the_embedding_stays(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    plan = plan_weights(read_stored_model(path), Quantization.INT4)
    with closing(open_checkpoint(path)) as checkpoint:
        packed = PackedWeights(TensorReader(checkpoint, ignore), plan, NO_KERNELS)
        plain = PlainWeights(TensorReader(checkpoint, ignore), torch.float32)
        exact = plain.matrix("layers.0.qkv").weight
        assert (unpack(packed.matrix("layers.0.qkv").weight) - exact).square().mean().sqrt() < 0.085 * exact.std()
        assert (unpack(packed.head().weight) - plain.head().weight).square().mean().sqrt() < 0.006 * plain.head().weight.std()
        token_ids = torch.arange(267)
        assert isinstance(packed.embedding(), EmbeddingTable)
        assert torch.equal(packed.embedding()(token_ids), plain.embedding()(token_ids).bfloat16().float())


def test_biases_are_float32_and_in_order(tmp_path: Path) -> None:
    folder = write_tiny_family_folder(tmp_path / "qwen2", make_tiny_model(QWEN2))
    with closing(open_checkpoint(folder)) as checkpoint:
        plan = plan_weights(read_stored_model(folder), Quantization.INT8)
        packed = PackedWeights(TensorReader(checkpoint, ignore), plan, NO_KERNELS).matrix("layers.1.qkv")
        plain = PlainWeights(TensorReader(checkpoint, ignore), torch.float32).matrix("layers.1.qkv")
    assert packed.bias is not None
    assert plain.bias is not None
    assert torch.equal(packed.bias, plain.bias)


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3 moe", "gemma3", "smollm3 untied"])
def test_the_memory_is_what_was_counted_beforehand(name: str, quantization: Quantization, tmp_path: Path) -> None:
    folder = write_tiny_family_folder(tmp_path / "tiny", make_tiny_model(FAMILIES[name]))
    stored = read_stored_model(folder)
    with closing(open_checkpoint(folder)) as checkpoint:
        packed = PackedWeights(TensorReader(checkpoint, ignore), plan_weights(stored, quantization), NO_KERNELS)
        DecoderWeights.read(checkpoint.config, packed)
    assert packed.num_bytes == weight_bytes(stored, KVDType.BFLOAT16, [quantization], has_kernels=True)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3 moe", "smollm3 untied"])
def test_so_is_that_of_weights_for_torch(name: str, dtype: KVDType, tmp_path: Path) -> None:
    folder = write_tiny_family_folder(tmp_path / "tiny", make_tiny_model(FAMILIES[name]))
    with closing(open_checkpoint(folder)) as checkpoint:
        plain = PlainWeights(TensorReader(checkpoint, ignore), TORCH_DTYPES[dtype])
        DecoderWeights.read(checkpoint.config, plain)
    assert plain.num_bytes == weight_bytes(read_stored_model(folder), dtype, [Quantization.NONE], has_kernels=False)

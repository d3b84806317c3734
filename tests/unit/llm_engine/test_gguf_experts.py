from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llm_engine.gguf_checkpoint import GgufCheckpoint
from llm_engine.gguf_file import GgufFile
from llm_engine.open_checkpoint import read_model_config
from serving_core.errors import ModelFileError
from tests.tiny_families import QWEN3_MOE, TinyFamily, make_tiny_model, write_tiny_family_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_family_gguf(tmp_path_factory.mktemp("moe") / "tiny.gguf", QWEN3_MOE, make_tiny_model(QWEN3_MOE))


def test_a_stack_is_read_expert_by_expert(path: Path) -> None:
    checkpoint = GgufCheckpoint(path)
    with GgufFile(path) as file:
        info = file.tensors["blk.2.ffn_down_exps.weight"]
        whole = np.concatenate([values for _, values, _ in file.iter_rows(info)]).reshape(info.shape)
    for expert in range(8):
        pieces = list(checkpoint.iter_pieces(f"layers.2.experts.{expert}.down.weight"))
        assert np.array_equal(np.concatenate([piece.values for piece in pieces]), whole[expert])
    stored = [tensor for tensor in checkpoint.tensors.values() if tensor.name == info.name]
    assert sum(tensor.num_bytes for tensor in stored) == info.num_bytes
    checkpoint.close()


@pytest.mark.parametrize("num_experts", [7, 2**30])
def test_a_number_of_experts_that_no_stack_has_is_refused(num_experts: int, tmp_path: Path) -> None:
    metadata = {"expert_count": num_experts, "expert_used_count": 3, "expert_feed_forward_length": 32}
    family = TinyFamily(model_type="qwen3_moe", architecture="qwen3moe", config=QWEN3_MOE.config, gguf=metadata)
    path = write_tiny_family_gguf(tmp_path / "tiny.gguf", family, make_tiny_model(QWEN3_MOE))
    with pytest.raises(ModelFileError, match=rf"states {num_experts} experts, and its tensors hold those of \[8\]"):
        read_model_config(path)


def test_a_wrong_expert_size_is_named(tmp_path: Path) -> None:
    metadata = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 48}
    family = TinyFamily(model_type="qwen3_moe", architecture="qwen3moe", config=QWEN3_MOE.config, gguf=metadata)
    path = write_tiny_family_gguf(tmp_path / "tiny.gguf", family, make_tiny_model(QWEN3_MOE))
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_gate_exps\.weight has shape \[32, 64\]; .* \[48, 64\]"):
        read_model_config(path)

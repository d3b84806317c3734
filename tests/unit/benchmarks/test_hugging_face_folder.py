"""What is written as a Hugging Face folder is, to our own reader, the model it was written from."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks.engines.hugging_face_folder import UnsupportedModel, hugging_face_name, write_hugging_face_folder
from llm_engine.open_checkpoint import open_checkpoint
from serving_core.kv_page_layout import KVDType
from tests.tiny_model import write_tiny_gguf
from tests.unit.llm_engine.tiny_engine import TinyEngine


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_same_model(tmp_path: Path, *, is_tied: bool) -> None:
    path, folder = write_tiny_gguf(tmp_path / "tiny.gguf", is_tied=is_tied), tmp_path / "folder"
    folder.mkdir()
    write_hugging_face_folder(path, folder)
    with closing(open_checkpoint(path)) as stored, closing(open_checkpoint(folder)) as written:
        assert written.config == stored.config
        assert written.eos_token_ids == stored.eos_token_ids

    # norms are bfloat16 in the folder and float32 in the file, so the two differ a little
    engines = [TinyEngine(own, KVDType.BFLOAT16) for own in (path, folder)]
    first, second = (engine.stored(engine.prefill(range(3, 40), chunk=64, max_tokens=64)) for engine in engines)
    torch.testing.assert_close(first, second, rtol=0.02, atol=0.25)


def test_names() -> None:
    assert hugging_face_name("output_norm.weight") == "model.norm.weight"
    assert hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="smollm3", num_layers=4)
    with pytest.raises(UnsupportedModel, match="not a plain model of the Llama family"):
        write_hugging_face_folder(path, tmp_path)

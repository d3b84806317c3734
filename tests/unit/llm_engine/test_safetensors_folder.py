from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_engine.load_model import load_model
from llm_engine.safetensors_folder import INDEX_NAME, SINGLE_NAME, SafetensorsFolder
from serving_core.errors import ModelFileError
from serving_core.kv_page_layout import KVDType
from tests.tiny_model_folder import change_json, save_tensors, write_tiny_folder

SECOND_SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny", num_shards=3)


def rows_of(folder: SafetensorsFolder, name: str) -> torch.Tensor:
    return torch.cat([torch.from_numpy(values) for _, values, _ in folder.iter_rows(name)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_read_exactly(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_engine.safetensors_folder.PIECE_ELEMENTS", 10)
    matrix, vector = torch.randn(7, 4).to(dtype), torch.randn(13).to(dtype)
    save_tensors(tmp_path, {"matrix": matrix, "vector": vector})
    folder = SafetensorsFolder(tmp_path)
    assert torch.equal(rows_of(folder, "matrix"), matrix.float())
    assert torch.equal(rows_of(folder, "vector"), vector.float().unsqueeze(0))
    pieces = list(folder.iter_rows("matrix"))
    assert [first for first, _, _ in pieces] == [0, 2, 4, 6]
    assert sum(num_bytes for _, _, num_bytes in pieces) == folder.tensors["matrix"].num_bytes == matrix.nbytes


def test_shards_are_one_folder(sharded: Path, tmp_path: Path) -> None:
    whole = load_file(write_tiny_folder(tmp_path / "whole") / SINGLE_NAME)
    folder = SafetensorsFolder(sharded)
    assert folder.tensors.keys() == whole.keys()
    assert all(torch.equal(rows_of(folder, name).reshape(tensor.shape), tensor) for name, tensor in whole.items())


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / SECOND_SHARD).unlink()
    with pytest.raises(ModelFileError, match=f"lacks {SECOND_SHARD}, which its {INDEX_NAME} names"):
        SafetensorsFolder(sharded)


def test_a_missing_index_is_named(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(ModelFileError, match=f"{SECOND_SHARD}.* but no {INDEX_NAME}"):
        SafetensorsFolder(sharded)


@pytest.mark.parametrize("num_bytes", [0, 7, 100, -1024, -1])
def test_a_truncated_shard_is_named(num_bytes: int, sharded: Path) -> None:
    path = sharded / SECOND_SHARD
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelFileError, match=f"{SECOND_SHARD} is damaged or truncated"):
        SafetensorsFolder(sharded)


def test_a_stray_file_is_left_alone(sharded: Path) -> None:
    (sharded / "stray.safetensors").write_bytes(b"not safetensors at all")
    SafetensorsFolder(sharded)


def test_a_tensor_missing_from_its_shard_is_named(sharded: Path) -> None:
    path = sharded / SECOND_SHARD
    tensors = load_file(path)
    name, _ = tensors.popitem()
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=rf"{SECOND_SHARD} lacks the tensor {name}"):
        SafetensorsFolder(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    first = load_file(sharded / "model-00001-of-00003.safetensors")
    name = next(iter(first))
    save_file({**load_file(sharded / SECOND_SHARD), name: first[name]}, sharded / SECOND_SHARD)
    with pytest.raises(ModelFileError, match=rf"{name} twice|holds the tensor {name}, which {INDEX_NAME} does not place there"):
        SafetensorsFolder(sharded)


@pytest.mark.parametrize(
    "shard", ["../../x.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", "..", "", 7, None, ["a"]]
)
def test_an_index_leads_nowhere_but_into_the_folder(shard: object, sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    change_json(sharded / INDEX_NAME, weight_map={**weight_map, "model.norm.weight": shard})
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight"):
        SafetensorsFolder(sharded)


def test_an_index_without_a_map_is_named(sharded: Path) -> None:
    change_json(sharded / INDEX_NAME, weight_map=None)
    with pytest.raises(ModelFileError, match="lacks weight_map"):
        SafetensorsFolder(sharded)


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    save_tensors(tmp_path, {"x": torch.zeros(2, 2, dtype=torch.int8)})
    with pytest.raises(ModelFileError, match="tensor x is stored as I8; supported are F32, F16, BF16"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_an_empty_shape_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_tensors(tmp_path, {"x": torch.zeros(shape)})
    with pytest.raises(ModelFileError, match="tensor x has the empty shape"):
        SafetensorsFolder(tmp_path)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    folder, trap = write_tiny_folder(tmp_path / "tiny"), tmp_path / "pwned"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(trap)))
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text(f"open({str(trap)!r}, 'w')")
    load_model(folder, dtype=KVDType.FLOAT32)  # safetensors are there, so the pickle does not matter
    (folder / SINGLE_NAME).unlink()
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin only, a pickle, .* convert it to model\.safetensors"):
        load_model(folder, dtype=KVDType.FLOAT32)
    assert not trap.exists()


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).mkdir()
    with pytest.raises(ModelFileError, match="holds no weights"):
        SafetensorsFolder(tmp_path)

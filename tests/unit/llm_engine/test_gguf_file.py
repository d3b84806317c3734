from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from llm_engine.gguf_file import SUPPORTED_TYPES, GgufFile
from llm_engine.load_model import load_model
from serving_core.errors import ModelFileError
from serving_core.kv_page_layout import KVDType
from tests.tiny_model import write_tiny_gguf

NUM_ROWS, ROW_LENGTH = 6, 512


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_one_tensor(path: Path, data: npt.NDArray[np.uint8], tensor_type: GGMLQuantizationType) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("x", data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_bytes(tensor_type: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """[NUM_ROWS, bytes of a row] of the type. K types cannot be made by the library, so their blocks are random bytes."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(NUM_ROWS, ROW_LENGTH)).astype(np.float32)
    if tensor_type is GGMLQuantizationType.F32:
        return values.view(np.uint8)
    if tensor_type.name.endswith("_K"):
        elements, num_bytes = GGML_QUANT_SIZES[tensor_type]
        # Bytes below 0x40 keep the blocks' half-precision scales finite.
        return rng.integers(0, 0x40, size=(NUM_ROWS, ROW_LENGTH // elements * num_bytes), dtype=np.uint8)
    quantized: npt.NDArray[np.uint8] = np.ascontiguousarray(quantize(values, tensor_type)).view(np.uint8)
    return quantized


@pytest.mark.parametrize("tensor_type", sorted(SUPPORTED_TYPES), ids=lambda tensor_type: tensor_type.name)
def test_every_supported_type_decodes(tensor_type: GGMLQuantizationType, tmp_path: Path) -> None:
    data = stored_bytes(tensor_type)
    with GgufFile(write_one_tensor(tmp_path / "x.gguf", data, tensor_type)) as file:
        info = file.tensors["x"]
        assert info.shape == (NUM_ROWS, ROW_LENGTH)
        assert info.num_bytes == data.nbytes
        pieces = list(file.iter_rows(info))
    rows = np.concatenate([piece for _, piece, _ in pieces])
    assert rows.dtype == np.float32
    assert rows.any()
    assert np.array_equal(rows, dequantize(data, tensor_type))


def test_large_tensors_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_engine.gguf_file.PIECE_ELEMENTS", 2 * ROW_LENGTH)
    data = stored_bytes(GGMLQuantizationType.Q4_1)
    with GgufFile(write_one_tensor(tmp_path / "x.gguf", data, GGMLQuantizationType.Q4_1)) as file:
        pieces = list(file.iter_rows(file.tensors["x"]))
    assert [(first, len(rows)) for first, rows, _ in pieces] == [(0, 2), (2, 2), (4, 2)]
    assert sum(num_bytes for _, _, num_bytes in pieces) == data.nbytes
    assert np.array_equal(np.concatenate([rows for _, rows, _ in pieces]), dequantize(data, GGMLQuantizationType.Q4_1))


def test_metadata(tiny: Path) -> None:
    with GgufFile(tiny) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.block_count"] == 2
        assert file.metadata["tokenizer.ggml.add_bos_token"] is False
        assert file.weight_bytes == sum(info.num_bytes for info in file.tensors.values())


def test_prints_tell_files_apart(tiny: Path, tmp_path: Path) -> None:
    def model_print(path: Path) -> str:
        with GgufFile(path) as file:
            return file.model_print()

    assert model_print(write_tiny_gguf(tmp_path / "same.gguf")) == model_print(tiny)
    assert model_print(write_tiny_gguf(tmp_path / "other.gguf", seed=1)) != model_print(tiny)
    assert model_print(write_tiny_gguf(tmp_path / "window.gguf", max_model_len=511)) != model_print(tiny)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"x", 1, 32, 10, 0), "stored as Q2_K; supported are"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"x", 1, 32, 999, 0), "unknown type number 999"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"x", 1, 33, 2, 0), "not a multiple of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"x", 1, 0, 0, 0), "empty shape"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"x", 1, 2**62, 0, 0), "truncated: tensor x"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + struct.pack("<Q1sIQIQ", 1, b"x", 1, 1, 0, 0) * 2 + bytes(64), "x twice"),
    ],
)
def test_one_sentence_for_a_tensor_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "the tensors token_embd.weight and blk.0.ffn_up.weight lie on top of each other"),
        (1, "tensor blk.0.ffn_up.weight begins at byte 1 of the data, no multiple of 32"),
    ],
)
def test_a_tensor_has_a_place_of_its_own(offset: int, message: str, tiny: Path, tmp_path: Path) -> None:
    content, name = bytearray(tiny.read_bytes()), b"blk.0.ffn_up.weight"
    struct.pack_into("<Q", content, content.index(name) + len(name) + struct.calcsize("<IQQI"), offset)
    path = tmp_path / "overlapping.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        GgufFile(path)


def test_a_file_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 4000, 61), *range(4000, len(whole), 9973), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"truncated|empty|not a GGUF"):
            GgufFile(cut)


def test_a_damaged_header_never_ends_in_another_error(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(3)
    refusals: list[str] = []
    for _ in range(150):
        content = bytearray(whole)
        for place in rng.integers(0, 12_000, size=3):
            content[place] = rng.integers(256)
        damaged.write_bytes(content)
        try:
            load_model(damaged, dtype=KVDType.FLOAT32)
        except ModelFileError as error:
            refusals.append(str(error))
    assert refusals
    assert all(str(damaged) in refusal for refusal in refusals)


def test_close_may_be_repeated(tiny: Path) -> None:
    with GgufFile(tiny) as file:
        file.close()
    file.close()

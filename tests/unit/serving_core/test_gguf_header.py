from __future__ import annotations

import struct
from pathlib import Path

import pytest

from serving_core.errors import ModelFileError
from serving_core.gguf_header import ArrayLength, GgufHeader, map_gguf, read_gguf_header
from tests.tiny_model import write_tiny_gguf


def read(path: Path, *, with_arrays: bool) -> GgufHeader:
    with map_gguf(path) as data:
        return read_gguf_header(data, path, with_arrays=with_arrays)


def test_arrays_are_read_or_passed_over(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole, short = read(path, with_arrays=True), read(path, with_arrays=False)
    assert (whole.num_bytes, whole.tensor_rows) == (short.num_bytes, short.tensor_rows)
    assert whole.metadata["general.architecture"] == "llama"
    arrays = {key: value for key, value in whole.metadata.items() if isinstance(value, list)}
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"} <= arrays.keys(), "of texts and of numbers"
    assert short.metadata == whole.metadata | {key: ArrayLength(len(items)) for key, items in arrays.items()}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf cannot be read: No such file"):
        map_gguf(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("with_arrays", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04 a zip archive", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "has GGUF version 1;"),
        (b"GGUF" + struct.pack(">I", 3), "versions 2 and 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"x", 9), "9 dimensions"),
    ],
)
def test_one_sentence_for_what_is_not_a_whole_header(content: bytes, message: str, with_arrays: bool, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        read(path, with_arrays=with_arrays)
    assert str(path) in str(caught.value)

"""Bytes of a device through host memory. On the CPU there is no stream, but the same arithmetic of places."""

from __future__ import annotations

import pytest
import torch

from llm_engine.cuda.staged_bytes import StagedBytes


def test_pieces_are_read_and_written_where_they_lie() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    staged = StagedBytes(memory)
    before = staged.read(memory[10:15])
    assert bytes(before) == bytes(range(10, 15))
    staged.write(memory[12:14], memoryview(bytes([200, 201])))
    assert bytes(staged.read(memory[10:15])) == bytes([10, 11, 200, 201, 14])
    assert bytes(before) == bytes(range(10, 15)), "what was read is a copy"
    assert memory[:10].tolist() == list(range(10))
    with pytest.raises(TypeError):
        before[0] = 1


def test_a_payload_of_wider_elements_is_written_as_bytes() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    StagedBytes(memory).write(memory[4:], memoryview(b"\x01\x02\x03\x04").cast("i"))
    assert memory.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]


def test_runs_are_filled_and_what_lies_between_them_stays() -> None:
    memory = torch.zeros(9, dtype=torch.uint8)
    StagedBytes(memory).write(memory[1:8].as_strided((2, 2), (5, 1)), memoryview(b"\x01\x02\x03\x04"))
    assert memory.tolist() == [0, 1, 2, 0, 0, 0, 3, 4, 0]

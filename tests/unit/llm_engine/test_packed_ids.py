from __future__ import annotations

from array import array

import pytest

from llm_engine.packed_ids import PackedIds


def test_ids_come_back_whatever_they_were_packed_from() -> None:
    token_ids = [0, 5, 2**31 - 1, 5]
    packed = PackedIds.of(token_ids)
    assert packed == PackedIds.of(array("i", token_ids)) == PackedIds.of(array("q", token_ids)) == PackedIds.of(iter(token_ids))
    assert packed.numpy().tolist() == token_ids
    assert len(packed) == 4
    assert packed != PackedIds.of(token_ids[::-1])


def test_what_it_was_packed_from_may_change_later() -> None:
    token_ids = array("i", [1, 2])
    packed = PackedIds.of(token_ids)
    token_ids.append(3)
    assert packed.numpy().tolist() == [1, 2]
    assert not packed.numpy().flags.writeable


def test_an_id_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(OverflowError):
        PackedIds.of([2**31])

"""An answer survives the wire; anything else is refused as malformed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.page_answer import MAX_ANSWER_BYTES, decode_answer, encode_accepted, encode_refused
from serving_core.errors import RefusalCode, Refused


@given(st.integers(0, 2**64 - 1))
def test_a_count_survives(num_accepted: int) -> None:
    assert decode_answer(encode_accepted(num_accepted)) == num_accepted


@given(st.sampled_from(RefusalCode), st.text(max_size=200).filter(lambda text: text.isprintable()))
def test_a_refusal_survives(code: RefusalCode, sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        decode_answer(encode_refused(Refused(code, sentence)))
    assert refused.value.code is code
    assert str(refused.value) == sentence


def test_a_sentence_that_is_too_long_is_cut_even_inside_a_character() -> None:
    answer = encode_refused(Refused(RefusalCode.DRAINING, "€" * MAX_ANSWER_BYTES))
    assert len(answer) == MAX_ANSWER_BYTES
    with pytest.raises(Refused) as refused:
        decode_answer(answer)
    assert refused.value.code is RefusalCode.DRAINING
    assert str(refused.value).startswith("€€€")


@given(st.binary(max_size=40))
def test_arbitrary_bytes_raise_nothing_but_a_refusal(answer: bytes) -> None:
    try:
        num_accepted = decode_answer(answer)
    except Refused:
        return
    assert answer == encode_accepted(num_accepted)


@pytest.mark.parametrize(
    "answer", [b"", b"\0", b"\0" * 10, b"\2" * 9, b"\1\0\0\0\0", b"\1\xff\0\0\0why", b"\1\1\0\0\0" + b"x" * MAX_ANSWER_BYTES]
)
def test_what_is_no_answer_is_malformed(answer: bytes) -> None:
    with pytest.raises(Refused) as refused:
        decode_answer(answer)
    assert refused.value.code is RefusalCode.MALFORMED

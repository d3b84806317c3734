from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import Detokenizer
from tests.unit.router.default_model import default_tokenizer, text_of

TEXTS = [
    "Hello, world!",
    "다음 문장을 그대로: 삼겹살과 김치찌개",
    "日本語のテキスト 𠜎𠜱",
    "🙂🎉👩‍👩‍👧🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "é e\u0301 \u200d\ufe0f",
    "\ufffd already a replacement",
]


def stream(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(default_tokenizer())
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_hold_no_part_of_a_character(text: str) -> None:
    pieces = stream(list(default_tokenizer().encode(text, add_special_tokens=False)))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_inside_a_character_shows_at_the_very_end_only(text: str) -> None:
    token_ids = list(default_tokenizer().encode(text, add_special_tokens=False))
    for num_tokens in range(len(token_ids)):
        joined = "".join(stream(token_ids[:num_tokens]))
        assert joined == text_of(token_ids[:num_tokens])
        whole, cut = joined.rstrip("\ufffd"), len(joined) - len(joined.rstrip("\ufffd"))
        assert text.startswith(whole)
        assert cut <= 1 or text.startswith(joined[:-1])


@given(st.lists(st.integers(0, 49_400), max_size=60))
def test_streamed_equals_whole_for_any_ids(token_ids: list[int]) -> None:
    assert "".join(stream(token_ids)) == text_of(token_ids)


@given(st.lists(st.sampled_from(range(17, 300)), max_size=60))
def test_streamed_equals_whole_for_single_bytes(token_ids: list[int]) -> None:
    assert "".join(stream(token_ids)) == text_of(token_ids)


def test_special_tokens_add_nothing_even_inside_a_character() -> None:
    first, *rest = default_tokenizer().encode("𠜎", add_special_tokens=False)
    assert rest
    assert "".join(stream([first, 2, *rest, 0])) == "𠜎"


def test_ids_beyond_the_vocabulary_add_nothing() -> None:
    assert stream([10**6, -1]) == ["", "", ""]

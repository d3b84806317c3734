from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from llm_engine.page_hash import num_cacheable_pages, page_hashes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=24).map(tuple)


def test_only_full_pages_have_a_hash() -> None:
    for num_tokens, num_pages in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        assert len(page_hashes(range(num_tokens), page_size=4, salt=b"")) == num_pages


@given(token_ids=tokens, page_size=st.integers(1, 5), salt=st.binary(max_size=8), num_known=st.integers(0, 24))
def test_a_chain_can_be_gone_on_with(token_ids: tuple[int, ...], page_size: int, salt: bytes, num_known: int) -> None:
    whole = page_hashes(token_ids, page_size=page_size, salt=salt)
    known = page_hashes(token_ids[:num_known], page_size=page_size, salt=salt)
    assert known == whole[: len(known)]
    assert page_hashes(token_ids, page_size=page_size, salt=salt, known=known) == whole
    assert page_hashes(token_ids[:num_known], page_size=page_size, salt=salt, known=whole) == known


@given(ours=tokens, theirs=tokens, our_salt=st.binary(max_size=2), their_salt=st.binary(max_size=2))
def test_hashes_are_equal_exactly_for_equal_beginnings_under_one_salt(
    ours: tuple[int, ...], theirs: tuple[int, ...], our_salt: bytes, their_salt: bytes
) -> None:
    one = page_hashes(ours, page_size=2, salt=our_salt)
    other = page_hashes(theirs, page_size=2, salt=their_salt)
    for index, (our_hash, their_hash) in enumerate(zip(one, other, strict=False)):
        end = 2 * (index + 1)
        assert (our_hash == their_hash) == (our_salt == their_salt and ours[:end] == theirs[:end])


def test_a_salt_cannot_stand_for_the_beginning_of_another_text() -> None:
    first, second = page_hashes(range(8), page_size=4, salt=b"")
    content = first + b"".join(token_id.to_bytes(4, "little") for token_id in range(4, 8))
    for salt in (first, second, content):
        (forged,) = page_hashes(range(4, 8), page_size=4, salt=salt)
        assert forged != second
        assert page_hashes(range(12), page_size=4, salt=b"")[2] != page_hashes(range(8, 12), page_size=4, salt=salt)[0]


def test_every_process_comes_to_the_same() -> None:
    code = "from llm_engine.page_hash import page_hashes; print(page_hashes(range(40), page_size=16, salt=b's')[1].hex())"
    env = {**os.environ, "PYTHONHASHSEED": "123"}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert printed == page_hashes(range(40), page_size=16, salt=b"s")[1].hex()


def test_the_last_token_is_never_cacheable() -> None:
    assert [num_cacheable_pages(num_tokens, 4) for num_tokens in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]

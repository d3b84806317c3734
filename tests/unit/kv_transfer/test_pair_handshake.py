"""The messages of a pair's call: what is written is read, and nothing else is."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.page_answer import encode_accepted, encode_refused
from kv_transfer.page_frame import HEADER_BYTES, encode_header
from kv_transfer.pair_handshake import PairHello, PairWelcome, decode_announcement, encode_announcement, print_of
from serving_core.errors import RefusalCode, Refused
from serving_core.ids import Incarnation
from tests.contract.page_path import cut_page, make_ticket

HELLO = PairHello(num_slots=8, is_cuda=True, incarnation_print=print_of(Incarnation("first")))


def test_each_message_comes_back() -> None:
    assert PairHello.decode(HELLO.encode()) == HELLO
    welcome = PairWelcome.draw(65535)
    assert PairWelcome.decode(welcome.encode()) == welcome
    headers = [encode_header(segment) for segment in cut_page(make_ticket(), 0)]
    decoded = decode_announcement(encode_announcement(headers), max_headers=len(headers))
    assert [(header.attempt, header.page_ordinal, header.offset) for header in decoded] == [
        (segment.attempt, segment.page_ordinal, segment.offset) for segment in cut_page(make_ticket(), 0)
    ]


def test_no_two_welcomes_are_alike() -> None:
    one, other = PairWelcome.draw(1), PairWelcome.draw(1)
    parts = {part for welcome in (one, other) for part in (welcome.name, welcome.sender_proof, welcome.receiver_proof)}
    assert len(parts) == 6


def test_a_refusal_in_the_place_of_a_welcome_is_raised() -> None:
    refusal = Refused(RefusalCode.RESOURCE_EXHAUSTED, "It has 32 pairs, and takes no more.")
    with pytest.raises(Refused, match="32 pairs") as refused:
        PairWelcome.decode(encode_refused(refusal))
    assert refused.value.code is RefusalCode.RESOURCE_EXHAUSTED
    with pytest.raises(Refused) as refused:
        PairWelcome.decode(encode_accepted(0))
    assert refused.value.code is RefusalCode.MALFORMED


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_anything_else_is_malformed(message: bytes) -> None:
    for decode in (PairHello.decode, PairWelcome.decode, partial(decode_announcement, max_headers=2)):
        with pytest.raises(Refused) as refused:
            decode(message)
        assert refused.value.code is RefusalCode.MALFORMED or message[0] == 1  # as a receiver's refusal reads


def test_an_announcement_may_have_as_many_headers_as_it_is_told() -> None:
    headers = [encode_header(segment) for segment in cut_page(make_ticket(), 0)]
    with pytest.raises(Refused, match=f"has {len(headers)} headers, but may have {len(headers) - 1}"):
        decode_announcement(encode_announcement(headers), max_headers=len(headers) - 1)

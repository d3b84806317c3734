"""Whom a cluster's token lets in."""

from __future__ import annotations

import pytest

from serving_core.rpc.cluster_token import OPEN, PROOF_BYTES, ClusterToken

TOKEN = ClusterToken("0123456789abcdef")


def test_who_shows_it_is_let_in() -> None:
    assert TOKEN.admits(TOKEN.metadata)
    assert TOKEN.admits((("user-agent", "grpc"), *TOKEN.metadata))
    assert TOKEN.admits((("authorization", b"Bearer 0123456789abcdef"),))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        OPEN.metadata,
        ClusterToken("0123456789abcdeF").metadata,
        ClusterToken("0123456789abcde").metadata,
        ClusterToken("0123456789abcdef0").metadata,
        (("authorization", "0123456789abcdef"),),
        (("authorization", ""),),
        (("authorization", b"\xff\x00"),),
        (("authorization", "Bearer \N{LATIN SMALL LETTER E WITH ACUTE}"),),
        (("x-authorization", "Bearer 0123456789abcdef"),),
    ],
)
def test_nobody_else_is(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    assert not TOKEN.admits(metadata)
    assert OPEN.admits(metadata)


def test_a_proof_is_for_one_purpose_and_one_token() -> None:
    proofs = {TOKEN.proof(b"one"), TOKEN.proof(b"other"), ClusterToken("fedcba9876543210").proof(b"one"), OPEN.proof(b"one")}
    assert len(proofs) == 4
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}
    assert TOKEN.proof(b"one") == ClusterToken(TOKEN.value).proof(b"one")


def test_it_is_drawn_anew_and_shown_nowhere() -> None:
    drawn = ClusterToken.draw()
    assert drawn != ClusterToken.draw()
    assert len(drawn.value) == 64
    assert drawn.value not in f"{drawn} {drawn!r}"

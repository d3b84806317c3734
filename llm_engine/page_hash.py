"""What a full page holds, as a number: equal hashes mean equal tokens in it, equal tokens before it, and an equal salt.

A chain: each page's hash is taken over that of the page before it and its own token ids; the salt stands before the first. It
depends on nothing but these, so that every process comes to the same. Sources: RFC 7693 (BLAKE2), whose *personalisation* keeps
a salt that a client has chosen from ever meaning what a page means.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

PageHash = NewType("PageHash", bytes)
"""32 bytes."""

_DIGEST_BYTES = 32


def page_hashes(
    token_ids: Sequence[int], *, page_size: int, salt: bytes, known: Sequence[PageHash] = ()
) -> tuple[PageHash, ...]:
    """The hashes of all full pages of ``token_ids``, in order. ``known`` are the first of them, from an earlier call."""
    assert page_size >= 1
    hashes = list(known[: len(token_ids) // page_size])
    parent = hashes[-1] if hashes else _root(salt)
    pack = struct.Struct(f"<{page_size}I").pack
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        content = parent + pack(*token_ids[start : start + page_size])
        parent = PageHash(hashlib.blake2b(content, digest_size=_DIGEST_BYTES, person=b"twinpool page").digest())
        hashes.append(parent)
    return tuple(hashes)


def num_cacheable_pages(num_prompt_tokens: int, page_size: int) -> int:
    """Leading pages of a prompt that may come from a cache. Its last token is computed in any case, for what follows it."""
    return (num_prompt_tokens - 1) // page_size


def _root(salt: bytes) -> PageHash:
    return PageHash(hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=b"twinpool salt").digest())

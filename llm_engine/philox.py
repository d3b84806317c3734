"""Philox4x32-10, the counter-based random generator that makes a sampled token a function of its place alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), algorithm and constants.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _KEY_STEP_0) & _MASK
        k1 = (k1 + _KEY_STEP_1) & _MASK
    return c0, c1, c2, c3


def uniform(*, seed: int, output_index: int, choice_index: int) -> float:
    """A number in [0, 1) with 53 random bits. Key: ``seed`` (64 bits); counter: (``output_index``, ``choice_index``, 0, 0)."""
    high, low, _, _ = philox4x32((output_index & _MASK, choice_index & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53

"""Rounding up to whole multiples."""

from __future__ import annotations


def padded(count: int, multiple: int) -> int:
    """The smallest multiple that is at least ``count``."""
    return -(-count // multiple) * multiple

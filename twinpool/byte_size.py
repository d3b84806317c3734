"""Sizes in bytes as people write them: 512MiB, 1G, 250MB."""

from __future__ import annotations

import re

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FORM = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[kmgt]?)(?P<kind>ib|b)?", re.IGNORECASE)


def parse_byte_size(text: str) -> int:
    """Bytes in ``text``: a number with K, M, G, T or KiB … TiB (powers of 1024), KB … TB (powers of 1000), or nothing (bytes).

    Raises ``ValueError`` for anything else.
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise ValueError(f"{text!r} is no size: write it like 512MiB, 1G or 1073741824")
    unit, kind = form["unit"].lower(), (form["kind"] or "").lower()
    if kind == "ib" and not unit:
        raise ValueError(f"{text!r} is no size: write it like 512MiB, 1G or 1073741824")
    factor = _DECIMAL[unit] if kind == "b" and unit else _BINARY[unit]
    return int(float(form["number"]) * factor)


def format_byte_size(num_bytes: int) -> str:
    """``num_bytes`` for a reader, rounded: 1.0 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

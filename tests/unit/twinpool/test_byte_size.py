from __future__ import annotations

import pytest

from twinpool.byte_size import parse_byte_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("512MiB", 512 * 2**20),
        ("1G", 2**30),
        ("1g", 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("250MB", 250 * 10**6),
        ("2TiB", 2 * 2**40),
        ("64B", 64),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1G", "1X", "1iB", "1GiBiB", "ten", "9" * 400, "1.5" + "0" * 400])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_byte_size(text)

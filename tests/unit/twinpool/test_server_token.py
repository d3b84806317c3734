"""Where the cluster token comes from."""

from __future__ import annotations

import pytest

from serving_core.errors import ConfigError
from twinpool.server_token import TOKEN_VARIABLE, server_token


def test_it_is_drawn_anew_unless_the_environment_has_one() -> None:
    assert server_token({}) != server_token({})
    assert server_token({TOKEN_VARIABLE: "0123456789abcdef"}).value == "0123456789abcdef"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("", "0 characters, but must have 16 at least"),
        ("short", "5 characters, but must have 16 at least"),
        *(
            (value, "other characters than")
            for value in (" " * 20, "0123456789abcdef\n", "0123456789 abcdef", "\N{SNOWMAN}" * 20)
        ),
    ],
)
def test_one_that_is_unfit_is_refused_and_not_shown(value: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"^{TOKEN_VARIABLE} has {fault}") as error:
        server_token({TOKEN_VARIABLE: value})
    assert not value.strip() or value not in str(error.value)

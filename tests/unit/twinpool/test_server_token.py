"""Where the cluster token comes from."""

from __future__ import annotations

import pytest

from serving_core.errors import ConfigError
from twinpool.server_token import TOKEN_VARIABLE, server_token


def test_it_is_drawn_anew_unless_the_environment_has_one() -> None:
    assert server_token({}) != server_token({})
    assert server_token({TOKEN_VARIABLE: "0123456789abcdef"}).value == "0123456789abcdef"


@pytest.mark.parametrize("value", ["", "short", " " * 20, "0123456789abcdef\n", "0123456789 abcdef", "\N{SNOWMAN}" * 20])
def test_one_that_is_unfit_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{TOKEN_VARIABLE} has {len(value)} characters, but must be at least 16") as error:
        server_token({TOKEN_VARIABLE: value})
    assert not value.strip() or value not in str(error.value)

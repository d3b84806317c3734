"""An invalid SamplingParams cannot be constructed, and the error names the parameter and its value."""

from __future__ import annotations

from typing import Any

import pytest

from serving_core.errors import InvalidRequest
from serving_core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop_token_ids", (-1,)),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
    ],
)
def test_out_of_range(param: str, value: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 16} | {param: value}
    with pytest.raises(InvalidRequest) as invalid:
        SamplingParams(**fields)
    assert invalid.value.param == ("logprobs" if param == "num_logprobs" else param)
    assert repr(value) in str(invalid.value)


def test_edges_are_valid() -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0, top_p=1.0, top_k=0, seed=2**64 - 1, min_tokens=1)
    assert sampling.is_greedy

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
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", 50),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.5),
        ("repetition_penalty", float("inf")),
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


@pytest.mark.parametrize(
    "logit_bias",
    [((-1, 0.0),), ((1, 100.5),), ((1, float("nan")),), ((1, 0.0), (1, 1.0)), tuple((i, 0.0) for i in range(1025))],
)
def test_bad_biases(logit_bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias") as invalid:
        SamplingParams(max_tokens=1, logit_bias=logit_bias)
    assert invalid.value.param == "logit_bias"

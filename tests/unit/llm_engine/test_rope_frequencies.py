from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llm_engine.rope_frequencies import rope_frequencies
from llm_engine.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_window=8192)
YARN = YarnScaling(factor=16.0, original_window=4096, attention_factor=1.0, beta_fast=32.0, beta_slow=1.0, is_rounded=True)


def reference(rope_type: str, **values: Any) -> torch.Tensor:
    rope = {"rope_type": rope_type, "rope_theta": 500_000.0, **values}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))[0]
    return frequencies


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (LinearScaling(factor=4.0), reference("linear", factor=4.0)),
        (
            LLAMA3,
            reference("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        ),
        (YARN, reference("yarn", factor=16.0, original_max_position_embeddings=4096)),
    ],
)
def test_frequencies_equal_those_of_transformers(scaling: RopeScaling, expected: torch.Tensor) -> None:
    ours = rope_frequencies(500_000.0, 128, scaling)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert ours.dtype == torch.float32


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_short_waves_are_kept_and_long_ones_stretched_by_the_whole_factor(scaling: Llama3Scaling | YarnScaling) -> None:
    plain, scaled = rope_frequencies(500_000.0, 128, None), rope_frequencies(500_000.0, 128, scaling)
    ratio = plain / scaled
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(scaling.factor)
    assert bool((ratio.diff() >= -1e-5).all()), "the longer the wave, the more it is stretched"


def test_a_blend_without_width_is_a_step() -> None:
    scaling = YarnScaling(factor=4.0, original_window=64, attention_factor=1.0, beta_fast=1.0, beta_slow=1.0, is_rounded=False)
    ratio = rope_frequencies(10_000.0, 16, None) / rope_frequencies(10_000.0, 16, scaling)
    assert set(ratio.round().int().tolist()) == {1, 4}

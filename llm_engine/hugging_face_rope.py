"""Rotary embeddings as ``config.json`` states them, in the words of transformers before and since version 5."""

from __future__ import annotations

import math

from llm_engine.layer_config import MIN_ROPE_THETA, Rope
from llm_engine.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from serving_core.model_json import ModelJson
from serving_core.model_numbers import MAX_COUNT

_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(config: ModelJson, *, default_theta: float, window: int) -> Rope:
    """The one rotary embedding of a model. ``window`` is the longest sequence that ``config`` states. Raises ModelFileError for
    a kind that is not computed."""
    return _rope(_section(config), _theta(config, "rope_theta", default_theta), window)


def read_global_and_local_rope(
    config: ModelJson, *, default_theta: float, default_local_theta: float, window: int
) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers that attend to everything and of those with a sliding window."""
    section = _section(config)
    theta = _theta(config, "rope_theta", default_theta)
    local_theta = _theta(config, "rope_local_base_freq", default_local_theta)
    full, local = section.section("full_attention"), section.section("sliding_attention")
    if full is None and local is None:
        return _rope(section, theta, window), Rope(theta=local_theta)
    empty = ModelJson(section.origin, {})
    return _rope(full or empty, theta, window), _rope(local or empty, local_theta, window)


def _section(config: ModelJson) -> ModelJson:
    """``rope_parameters``, or ``rope_scaling`` as it was called before, or an empty section."""
    config.refuse_unless("partial_rotary_factor", 1, 1.0)
    return config.section("rope_parameters") or config.section("rope_scaling") or ModelJson(config.origin, {})


def _rope(section: ModelJson, theta: float, window: int) -> Rope:
    return Rope(theta=_theta(section, "rope_theta", theta), scaling=_scaling(section, window))


def _theta(config: ModelJson, key: str, default: float) -> float:
    return config.number(key, default=default, smallest=MIN_ROPE_THETA)


def _scaling(rope: ModelJson, window: int) -> RopeScaling | None:
    kind_key = "rope_type" if "rope_type" in rope else "type"
    rope.refuse_unless(kind_key, *_TYPES)
    rope.refuse_unless("partial_rotary_factor", 1, 1.0)
    kind = rope.text(kind_key) or "default"
    if kind == "default":
        return None
    factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    original_window = rope.count("original_max_position_embeddings", default=window)
    if kind == "yarn":
        if original_window * factor > MAX_COUNT:
            raise rope.wrong("factor", f"at most {MAX_COUNT // original_window} for a window of {original_window}")
        return YarnScaling(
            factor=factor,
            original_window=original_window,
            attention_factor=rope.number("attention_factor", default=_yarn_attention_factor(rope, factor)),
            beta_fast=rope.number("beta_fast", default=32.0),
            beta_slow=rope.number("beta_slow", default=1.0),
            is_rounded=rope.flag("truncate", default=True),
        )
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor, {low:g}")
    return Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_window=original_window)


def _yarn_attention_factor(rope: ModelJson, factor: float) -> float:
    """The paper's 0.1 ln(factor) + 1, or the ratio of two of them with weights of their own."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)

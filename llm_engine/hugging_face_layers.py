"""How the layers of each family differ, as ``config.json`` states it. Windows and defaults follow transformers."""

from __future__ import annotations

from llm_engine.hugging_face_rope import read_global_and_local_rope, read_rope
from llm_engine.layer_config import LayerConfig
from serving_core.model_json import ModelJson

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_llama_layers(config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]:
    """All alike."""
    config.refuse_unless("sliding_window")
    config.refuse_unless("layer_types")
    return (LayerConfig(rope=read_rope(config, default_theta=theta, window=window)),) * num_layers


def read_mistral_layers(config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]:
    """All with the sliding window, unless that is null."""
    config.refuse_unless("layer_types")
    has_window = not config.is_null("sliding_window")
    layer = LayerConfig(
        rope=read_rope(config, default_theta=theta, window=window),
        sliding_window=config.count("sliding_window", default=4096) if has_window else None,
    )
    return (layer,) * num_layers


def read_qwen_layers(config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]:
    """With ``use_sliding_window``, the layers from ``max_window_layers`` on have the window, or those that ``layer_types``
    names."""
    rope = read_rope(config, default_theta=theta, window=window)
    sliding_window = _sliding_window(config)
    first = config.count("max_window_layers", default=28, smallest=0)
    is_sliding = [sliding_window is not None and index >= first for index in range(num_layers)]
    return tuple(LayerConfig(rope=rope, sliding_window=own) for own in _windows(config, sliding_window, is_sliding))


def read_qwen_moe_layers(config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]:
    """With ``use_sliding_window``, all layers have the window. Every ``decoder_sparse_step``-th layer has experts, but for
    those in ``mlp_only_layers``."""
    config.refuse_unless("layer_types")
    rope = read_rope(config, default_theta=theta, window=window)
    sliding_window = _sliding_window(config)
    step, dense = config.count("decoder_sparse_step", default=1), config.ids("mlp_only_layers", kind="a layer's number")
    return tuple(
        LayerConfig(rope=rope, sliding_window=sliding_window, has_experts=index not in dense and (index + 1) % step == 0)
        for index in range(num_layers)
    )


def read_smollm3_layers(config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]:
    """Every fourth layer, or those with a 0 in ``no_rope_layers``, has no rotary embedding. With ``use_sliding_window`` these
    have the window, or those that ``layer_types`` names."""
    rope = read_rope(config, default_theta=theta, window=window)
    interval = config.count("no_rope_layer_interval", default=4)
    has_rope = [(index + 1) % interval != 0 for index in range(num_layers)]
    if "no_rope_layers" in config:
        stated = config.get("no_rope_layers")
        if not isinstance(stated, list) or len(stated) < num_layers or any(item not in (0, 1) for item in stated):
            raise config.wrong("no_rope_layers", f"a list of 0 or 1 for each of {num_layers} layers")
        has_rope = [bool(item) for item in stated[:num_layers]]
    sliding_window = _sliding_window(config)
    windows = _windows(config, sliding_window, [sliding_window is not None and not rotated for rotated in has_rope])
    return tuple(
        LayerConfig(rope=rope if rotated else None, sliding_window=own) for rotated, own in zip(has_rope, windows, strict=True)
    )


def read_gemma3_layers(config: ModelJson, num_layers: int, *, theta: float, window: int) -> tuple[LayerConfig, ...]:
    """Every sixth layer attends to everything, or those that ``layer_types`` names; the others have the window and a rotary
    embedding of their own."""
    config.refuse_unless("use_bidirectional_attention", False)
    rope, local_rope = read_global_and_local_rope(config, default_theta=theta, default_local_theta=10_000.0, window=window)
    interval = config.count("sliding_window_pattern", default=config.count("_sliding_window_pattern", default=6))
    sliding_window = config.count("sliding_window", default=4096)
    windows = _windows(config, sliding_window, [(index + 1) % interval != 0 for index in range(num_layers)])
    return tuple(LayerConfig(rope=rope if own is None else local_rope, sliding_window=own) for own in windows)


def _sliding_window(config: ModelJson) -> int | None:
    """The window, where ``use_sliding_window`` says that there is one."""
    has_window = config.flag("use_sliding_window", default=False)
    return config.count("sliding_window", default=4096) if has_window else None


def _windows(config: ModelJson, sliding_window: int | None, is_sliding: list[bool]) -> list[int | None]:
    """Each layer's window: which have one, ``layer_types`` says, or else ``is_sliding``."""
    if "layer_types" in config:
        types = config.get("layer_types")
        known = (_FULL,) if sliding_window is None else (_FULL, _SLIDING)
        if not isinstance(types, list) or len(types) != len(is_sliding) or any(kind not in known for kind in types):
            words = " or ".join(repr(kind) for kind in known)
            raise config.wrong("layer_types", f"{words} for each of {len(is_sliding)} layers")
        is_sliding = [kind == _SLIDING for kind in types]
    return [sliding_window if sliding else None for sliding in is_sliding]

"""The matrices that the decoder multiplies with: some hold several tensors of the checkpoint, one product instead of many."""

from __future__ import annotations

from dataclasses import dataclass

from llm_engine.decoder_tensors import EMBEDDING, tensor_shapes
from llm_engine.model_config import ModelConfig

HEAD_MATRIX = "head"

_HOMES = {"query": "qkv", "key": "qkv", "value": "qkv", "gate": "gate_up", "up": "gate_up"}
_ROUTER = "router"
_WEIGHT, _BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """``num_out`` rows of ``num_in`` weights: those of ``parts``, one after another, and of the last no more than fit."""

    name: str
    parts: tuple[str, ...]
    num_outs: tuple[int, ...]
    num_in: int
    has_bias: bool

    @property
    def num_out(self) -> int:
        return sum(self.num_outs)

    @property
    def weights(self) -> tuple[str, ...]:
        """The parts by the names of ``decoder_tensors``."""
        return tuple(part + _WEIGHT for part in self.parts)

    @property
    def biases(self) -> tuple[str, ...]:
        return tuple(part + _BIAS for part in self.parts) if self.has_bias else ()

    @property
    def is_head(self) -> bool:
        return self.name == HEAD_MATRIX

    @property
    def is_router(self) -> bool:
        return self.name.endswith(_ROUTER)


def decoder_matrices(config: ModelConfig) -> dict[str, Matrix]:
    """All of them by name, like ``layers.3.qkv`` or ``layers.3.experts.7.down``; the head without its padding, and made of the
    embedding where the two are tied."""
    shapes = tensor_shapes(config)
    parts: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if name.endswith(_WEIGHT) and len(shape) == 2 and name != EMBEDDING:
            path, dot, part = name.removesuffix(_WEIGHT).rpartition(".")
            parts.setdefault(path + dot + _HOMES.get(part, part), []).append(path + dot + part)
    if config.is_tied:
        parts[HEAD_MATRIX] = [EMBEDDING.removesuffix(_WEIGHT)]
    return {name: _matrix(name, tuple(own), config, shapes) for name, own in parts.items()}


def _matrix(name: str, parts: tuple[str, ...], config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Matrix:
    num_outs = tuple(shapes[part + _WEIGHT][0] for part in parts)
    return Matrix(
        name=name,
        parts=parts,
        num_outs=(config.num_tokens,) if name == HEAD_MATRIX else num_outs,
        num_in=shapes[parts[0] + _WEIGHT][1],
        has_bias=parts[0] + _BIAS in shapes,
    )

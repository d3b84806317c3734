"""Weights that no file holds: random ones, made where they are computed with."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_engine.decoder_matrices import HEAD_MATRIX, decoder_matrices
from llm_engine.embedding import EmbeddingTable
from llm_engine.gated_activation import TorchGate
from llm_engine.linear import Linear
from llm_engine.model_config import ModelConfig
from llm_engine.rms_norm import RmsNorm


class RandomWeights:
    """See ``WeightSource``. For models without biases. The scale of each matrix keeps what it multiplies at its size."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._matrices = decoder_matrices(config)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.num_bytes = 0

    def embedding(self) -> EmbeddingTable:
        return EmbeddingTable(self._random(self._config.vocab_size, self._config.hidden_size, scale=1.0))

    def head(self) -> Linear:
        return self.matrix(HEAD_MATRIX)

    def matrix(self, name: str) -> Linear:
        matrix = self._matrices[name]
        assert not matrix.has_bias
        return Linear(self._random(matrix.num_out, matrix.num_in, scale=matrix.num_in**-0.5))

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(torch.ones(self._config.hidden_size, device=self._device), self._config.rms_norm_eps)

    def gated_activation(self) -> TorchGate:
        return TorchGate(self._config.activation)

    def vector(self, name: str) -> Tensor:
        raise AssertionError(f"a random model has no {name}")

    def _random(self, num_out: int, num_in: int, *, scale: float) -> Tensor:
        weight = torch.empty(num_out, num_in, dtype=self._dtype, device=self._device)
        self.num_bytes += weight.nbytes
        return weight.normal_(0.0, scale, generator=self._generator)

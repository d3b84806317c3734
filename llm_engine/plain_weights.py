"""Weights as torch multiplies with them: each of the model's type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_engine.decoder_matrices import HEAD_MATRIX, decoder_matrices
from llm_engine.decoder_tensors import EMBEDDING
from llm_engine.device import CPU
from llm_engine.embedding import EmbeddingTable
from llm_engine.gated_activation import TorchGate
from llm_engine.linear import Linear
from llm_engine.rms_norm import RmsNorm
from llm_engine.tensor_reader import TensorReader


class PlainWeights:
    """See ``WeightSource``. Every tensor is read into host memory and then moved to ``device``."""

    def __init__(self, reader: TensorReader, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._reader = reader
        self._dtype = dtype
        self._device = device
        self._config = reader.checkpoint.config
        self._matrices = decoder_matrices(self._config)
        self._embedding = reader.read(EMBEDDING, dtype).to(device)
        self.num_bytes = self._embedding.nbytes

    def embedding(self) -> EmbeddingTable:
        return EmbeddingTable(self._embedding)

    def head(self) -> Linear:
        matrix = self._matrices[HEAD_MATRIX]
        if self._config.is_tied:
            return Linear(self._embedding[: matrix.num_out])
        weight = self._kept(self._reader.read(matrix.weights[0], self._dtype))
        return Linear(weight[: matrix.num_out])

    def matrix(self, name: str) -> Linear:
        matrix = self._matrices[name]
        weight = torch.empty(matrix.num_out, matrix.num_in, dtype=self._dtype)
        self._fill(matrix.weights, torch.split(weight, list(matrix.num_outs)))
        if not matrix.has_bias:
            return Linear(self._kept(weight))
        bias = torch.empty(matrix.num_out, dtype=self._dtype)
        self._fill(matrix.biases, torch.split(bias, list(matrix.num_outs)))
        return Linear(self._kept(weight), self._kept(bias))

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.vector(name), self._config.rms_norm_eps)

    def gated_activation(self) -> TorchGate:
        return TorchGate(self._config.activation)

    def vector(self, name: str) -> Tensor:
        return self._kept(self._reader.read(name, torch.float32))

    def _fill(self, names: tuple[str, ...], places: Sequence[Tensor]) -> None:
        for name, place in zip(names, places, strict=True):
            self._reader.fill(name, place)

    def _kept(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor.to(self._device)

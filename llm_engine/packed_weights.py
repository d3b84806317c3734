"""Weights as the native kernels read them, each matrix in the form that the plan has for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llm_engine.decoder_matrices import HEAD_MATRIX, Matrix, decoder_matrices
from llm_engine.decoder_tensors import EMBEDDING
from llm_engine.embedding import Embedding, EmbeddingTable, PackedEmbedding
from llm_engine.gated_activation import NativeGate
from llm_engine.linear import PackedLinear
from llm_engine.native.packed_weight import PackedWeight, pack_bfloat16, pack_int4, pack_int8
from llm_engine.rms_norm import NativeRmsNorm
from llm_engine.tensor_reader import TensorReader
from llm_engine.weight_form import WeightForm
from llm_engine.weight_memory import WeightMemory
from llm_engine.weight_plan import WeightPlan

if TYPE_CHECKING:
    from llm_engine.native.library import NativeLibrary


class PackedWeights:
    """See ``WeightSource``."""

    def __init__(self, reader: TensorReader, plan: WeightPlan, library: NativeLibrary) -> None:
        self._reader = reader
        self._plan = plan
        self._library = library
        self._config = reader.checkpoint.config
        self._matrices = decoder_matrices(self._config)
        self._memory = WeightMemory()
        self.num_bytes = 0
        self._head = self._packed(self._matrices[HEAD_MATRIX])

    def embedding(self) -> Embedding:
        if self._plan.is_embedding_shared:
            return PackedEmbedding(self._head)
        return EmbeddingTable(self._kept(self._reader.read(EMBEDDING, torch.bfloat16)), is_summed_wide=True)

    def head(self) -> PackedLinear:
        return PackedLinear(self._head, None, self._library, out_dtype=torch.float32)

    def matrix(self, name: str) -> PackedLinear:
        matrix = self._matrices[name]
        biases = [self.vector(bias) for bias in matrix.biases]
        return PackedLinear(self._packed(matrix), torch.cat(biases) if biases else None, self._library)

    def norm(self, name: str) -> NativeRmsNorm:
        return NativeRmsNorm(self.vector(name), self._config.rms_norm_eps, self._library)

    def gated_activation(self) -> NativeGate:
        return NativeGate(self._config.activation, self._library)

    def vector(self, name: str) -> Tensor:
        return self._kept(self._reader.read(name, torch.float32))

    def _packed(self, matrix: Matrix) -> PackedWeight:
        form = self._plan.forms[matrix.name]
        if form is WeightForm.BFLOAT16:
            parts = [self._reader.read(name, torch.bfloat16) for name in matrix.weights]
            packed = pack_bfloat16(torch.cat(parts)[: matrix.num_out])
        else:
            blocks = [self._reader.read_blocks(name, form) for name in matrix.weights]
            q, scale, zero = (
                torch.from_numpy(np.concatenate(parts)[: matrix.num_out])
                for parts in zip(*((block.q, block.scale, block.zero) for block in blocks), strict=True)
            )
            packed = (pack_int4 if form is WeightForm.INT4 else pack_int8)(q, scale, zero)
        self.num_bytes += packed.nbytes
        scales = None if packed.scales is None else self._memory.copy(packed.scales)
        return replace(packed, data=self._memory.copy(packed.data), scales=scales)

    def _kept(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor

"""A Llama in a GGUF file: its tensors under the names that the model code knows, its query and key rows in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llm_engine.checkpoint import StoredTensor, WeightPiece
from llm_engine.gguf_config import read_eos_token_ids, read_gguf_config
from llm_engine.gguf_file import GgufFile
from llm_engine.llama_tensors import EMBEDDING, FINAL_NORM, HEAD, ROPE_FACTORS, layer_tensor

_STORED_NAMES = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    HEAD: "output.weight",
    ROPE_FACTORS: "rope_freqs.weight",
}
_STORED_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_INTERLEAVED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
"""The file interleaves the two halves of each head of these (row 2i, row 2i + 1); the model keeps the halves one after the
other (row i, row i + head_dim / 2)."""


class GgufCheckpoint:
    """See ``Checkpoint``. Raises ModelFileError from the constructor for a file that is not a supported model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        try:
            self.config = read_gguf_config(self._file)
            self.eos_token_ids = read_eos_token_ids(self._file)
            self._stored_names = self._name_all()
            names = {stored: name for name, stored in self._stored_names.items()}
            self._tensors = {
                names.get(info.name, info.name): StoredTensor(name=info.name, shape=info.shape, num_bytes=info.num_bytes)
                for info in self._file.tensors.values()
            }
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def stored_name(self, name: str) -> str:
        return self._stored_names[name]

    def iter_pieces(self, name: str) -> Iterator[WeightPiece]:
        is_interleaved = name.endswith(_INTERLEAVED)
        for first, values, num_bytes in self._file.iter_rows(self._file.tensors[self.stored_name(name)]):
            rows = np.arange(first, first + len(values))
            yield WeightPiece(rows=self._in_halves(rows) if is_interleaved else rows, values=values, num_bytes=num_bytes)

    def model_print(self) -> str:
        return self._file.model_print()

    def close(self) -> None:
        self._file.close()

    def _name_all(self) -> dict[str, str]:
        names = dict(_STORED_NAMES)
        for layer in range(self.config.num_layers):
            names |= {layer_tensor(layer, part): f"blk.{layer}.{stored}" for part, stored in _STORED_PARTS.items()}
        return names

    def _in_halves(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        head_dim = self.config.head_dim
        head, within = rows // head_dim, rows % head_dim
        return head * head_dim + within % 2 * (head_dim // 2) + within // 2

"""A model in a folder as Hugging Face lays it out: config.json, tokenizer.json, safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llm_engine.checkpoint import BlockPiece, StoredTensor, WeightPiece
from llm_engine.decoder_tensors import HEAD, is_norm, tensor_shapes
from llm_engine.hugging_face_config import read_family, read_hugging_face_config
from llm_engine.hugging_face_tensors import hugging_face_name
from llm_engine.hugging_face_tokens import read_folder_tokens
from llm_engine.safetensors_folder import SafetensorsFolder
from llm_engine.weight_blocks import quantize
from llm_engine.weight_form import WeightForm

_DERIVED_SUFFIX = ".self_attn.rotary_emb.inv_freq"
"""Old checkpoints hold the rotary frequencies beside the weights they follow from."""

_SAMPLE_BYTES = 4096
_PRINTED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class HuggingFaceCheckpoint:
    """See ``Checkpoint``. Raises ModelFileError from the constructor for a folder that is not a supported model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        tokens = read_folder_tokens(path)
        self._norm_offset = read_family(path).norm_offset
        self._files = SafetensorsFolder(path)
        self.config = read_hugging_face_config(path, tokens=tokens, num_tensors=len(self._files.tensors))
        self.eos_token_ids = frozenset(token for token in tokens.eos_token_ids if token < self.config.num_tokens)
        stored = self._files.tensors
        names = {self.stored_name(name): name for name in tensor_shapes(self.config)}
        self._tensors = {
            name: StoredTensor(name=stored_name, shape=stored[stored_name].shape, num_bytes=stored[stored_name].num_bytes)
            for stored_name, name in names.items()
            if stored_name in stored
        }
        self._stray_names = [name for name in stored if name not in names and not self._is_redundant(name)]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @property
    def stray_names(self) -> Sequence[str]:
        return self._stray_names

    def stored_name(self, name: str) -> str:
        return hugging_face_name(name, has_out_norms=self.config.has_out_norms)

    def iter_pieces(self, name: str) -> Iterator[WeightPiece]:
        offset = self._norm_offset if is_norm(name) else 0.0
        for first, stored, num_bytes in self._files.iter_rows(self.stored_name(name)):
            values = stored + offset if offset else stored
            yield WeightPiece(rows=np.arange(first, first + len(values)), values=values, num_bytes=num_bytes)

    def iter_blocks(self, name: str, form: WeightForm) -> Iterator[BlockPiece]:
        for piece in self.iter_pieces(name):
            yield BlockPiece(rows=piece.rows, blocks=quantize(piece.values, form), num_bytes=piece.num_bytes)

    def model_print(self) -> str:
        """SHA-256 over the configuration and the tokenizer, the tensor table, and the first and last bytes of every tensor. How
        the tensors are dealt out to shards does not count."""
        digest = hashlib.sha256()
        for name in _PRINTED_FILES:
            path = self.path / name
            content = path.read_bytes() if path.exists() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        for name, entry in sorted(self._files.tensors.items()):
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            first, last = self._files.ends(name)
            digest.update(first[:_SAMPLE_BYTES] + last[-_SAMPLE_BYTES:])
        return digest.hexdigest()

    def close(self) -> None:
        self._files.close()

    def _is_redundant(self, stored_name: str) -> bool:
        is_copy_of_embedding = stored_name == self.stored_name(HEAD) and self.config.is_tied
        return is_copy_of_embedding or stored_name.endswith(_DERIVED_SUFFIX)

"""A model in a GGUF file: its tensors under the names that the model code knows, its query and key rows in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from llm_engine.checkpoint import BlockPiece, StoredTensor, WeightPiece
from llm_engine.decoder_tensors import ROPE_FACTORS, tensor_shapes
from llm_engine.gguf_blocks import exact_form, take_apart
from llm_engine.gguf_config import read_architecture, read_eos_token_ids, read_gguf_config
from llm_engine.gguf_file import GgufFile, TensorInfo, unpack
from llm_engine.gguf_tensors import GgufPlace, gguf_place, is_stack
from llm_engine.weight_blocks import quantize
from llm_engine.weight_form import WeightForm
from serving_core.errors import ModelFileError

_NEAR_FORMS = {GGMLQuantizationType.Q6_K: WeightForm.INT8}
"""Forms of types whose blocks no form of ours holds: their weights are quantised anew."""

_ROTATED = (".query.weight", ".key.weight")


class GgufCheckpoint:
    """See ``Checkpoint``. Raises ModelFileError from the constructor for a file that is not a supported model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        try:
            self._is_interleaved = read_architecture(self._file).is_interleaved
            self.config = read_gguf_config(self._file)
            self.eos_token_ids = read_eos_token_ids(self._file)
            self._infos = self._find_tensors()
        except BaseException:
            self.close()
            raise
        self._tensors = {
            name: StoredTensor(
                name=info.name,
                shape=info.shape,
                num_bytes=info.num_bytes,
                form=_NEAR_FORMS.get(info.type) or exact_form(info.type) or WeightForm.BFLOAT16,
                exact_form=exact_form(info.type) or WeightForm.BFLOAT16,
            )
            for name, info in self._infos.items()
        }
        known = {info.name for info in self._infos.values()}
        self._stray_names = [name for name in self._file.tensors if name not in known]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @property
    def stray_names(self) -> Sequence[str]:
        return self._stray_names

    def stored_name(self, name: str) -> str:
        return gguf_place(name).name

    def iter_pieces(self, name: str) -> Iterator[WeightPiece]:
        for first, values, num_bytes in self._file.iter_rows(self._infos[name]):
            yield WeightPiece(rows=self._rows(name, first, len(values)), values=values, num_bytes=num_bytes)

    def iter_blocks(self, name: str, form: WeightForm) -> Iterator[BlockPiece]:
        info = self._infos[name]
        stored_form = exact_form(info.type)
        for first, stored in self._file.iter_stored(info):
            if stored_form is not None and form.holds(stored_form):
                blocks = take_apart(stored, info.type).widened(form)
            else:
                blocks = quantize(unpack(stored, info.type), form)
            yield BlockPiece(rows=self._rows(name, first, len(stored)), blocks=blocks, num_bytes=stored.nbytes)

    def model_print(self) -> str:
        return self._file.model_print()

    def close(self) -> None:
        self._file.close()

    def _find_tensors(self) -> dict[str, TensorInfo]:
        self._check_experts()
        places = {name: gguf_place(name) for name in (*tensor_shapes(self.config), ROPE_FACTORS)}
        return {name: self._part(place) for name, place in places.items() if place.name in self._file.tensors}

    def _part(self, place: GgufPlace) -> TensorInfo:
        info = self._file.tensors[place.name]
        if place.expert is None:
            return info
        assert self.config.experts is not None
        num_experts = self.config.experts.num_experts
        if len(info.shape) != 3 or info.shape[0] != num_experts:
            raise ModelFileError(
                f"{self.path}: tensor {info.name} has shape {list(info.shape)}; the first of three sizes must be that of the "
                f"experts, {num_experts}."
            )
        return info.part(place.expert)

    def _check_experts(self) -> None:
        """Raises for a number of experts that no stack has, before something is made for each of them."""
        experts = self.config.experts
        sizes = {info.shape[0] for name, info in self._file.tensors.items() if is_stack(name)}
        if experts is not None and experts.num_experts not in sizes:
            raise ModelFileError(
                f"{self.path} states {experts.num_experts} experts, and its tensors hold those of {sorted(sizes) or 'none'}."
            )

    def _rows(self, name: str, first: int, num_rows: int) -> npt.NDArray[np.int64]:
        rows = np.arange(first, first + num_rows)
        return self._in_halves(rows) if self._is_interleaved and name.endswith(_ROTATED) else rows

    def _in_halves(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        head_dim = self.config.head_dim
        head, within = rows // head_dim, rows % head_dim
        return head * head_dim + within % 2 * (head_dim // 2) + within // 2

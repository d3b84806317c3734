"""Opens a model by the kind of its path. Needs no torch, so that a server can refuse a model before it starts a worker."""

from __future__ import annotations

from pathlib import Path

from llm_engine.checkpoint import Checkpoint, StoredModel, check_tensors
from llm_engine.gguf_checkpoint import GgufCheckpoint
from llm_engine.hugging_face_checkpoint import HuggingFaceCheckpoint
from llm_engine.model_config import ModelConfig


def open_checkpoint(path: Path) -> Checkpoint:
    """The model in a GGUF file or in a Hugging Face folder, checked as far as headers go. Whoever opens it closes it.

    Raises ModelFileError for anything that is not a whole, supported model.
    """
    checkpoint: Checkpoint = HuggingFaceCheckpoint(path) if path.is_dir() else GgufCheckpoint(path)
    try:
        check_tensors(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def read_stored_model(path: Path) -> StoredModel:
    """Sizes and tensors, once all headers have been checked. Raises ModelFileError."""
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return StoredModel(config=checkpoint.config, tensors=checkpoint.tensors)


def read_model_config(path: Path) -> ModelConfig:
    """The model's sizes alone."""
    return read_stored_model(path).config

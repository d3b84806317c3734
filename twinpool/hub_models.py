"""Fetches a model from the Hugging Face Hub into its local cache. Only what serving needs: no pickled weights, no code."""

from __future__ import annotations

import re
from pathlib import Path

from serving_core.errors import ModelFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
_UNWANTED = ("*/*",)  # copies of the weights in other formats lie in folders of their own


def is_hub_id(model: str) -> bool:
    """Whether ``model`` is written like ``org/name``."""
    return _HUB_ID.fullmatch(model) is not None and not model.lower().endswith(".gguf")


def fetch_hub_model(model: str) -> Path:
    """The folder of ``org/name``, downloaded first where the cache lacks it. ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_TOKEN``
    are honoured.

    Raises ``ModelFileError`` when the model does not exist, may not be read, or is not in the cache while the hub cannot be
    reached.
    """
    # heavy, and only this kind of model needs it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)))
    except GatedRepoError as error:
        raise ModelFileError(
            f"{model} may be read only by those who accepted its terms on huggingface.co: do so and set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelFileError(f"huggingface.co has no model {model} that can be read; a private one needs HF_TOKEN.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelFileError(
            f"{model} is not in the local cache and huggingface.co cannot be reached (or HF_HUB_OFFLINE is set): download it "
            "while online, or give the path of a folder that holds it."
        ) from error
    except HFValidationError as error:
        raise ModelFileError(f"{model} is not a name that a model on huggingface.co can have.") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFileError(f"{model} cannot be downloaded from huggingface.co: {reason[0]}.") from error

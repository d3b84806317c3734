"""What the engine must know of a model folder's tokenizer: how many tokens there are, and which end an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving_core.errors import ModelFileError
from serving_core.folder_special_tokens import read_folder_special_tokens
from serving_core.model_json import ModelJson

_MAX_TOKENS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTokens:
    """``num_tokens`` is one more than the highest id, ``num_plain_tokens`` one more than the highest that was not added later:
    a model need not have an embedding for a token that was."""

    num_tokens: int
    num_plain_tokens: int
    eos_token_ids: frozenset[int]


def read_folder_tokens(folder: Path) -> FolderTokens:
    """Read the tokenizer's table. An answer ends with any id that ``config.json``, ``generation_config.json`` or the
    tokenizer's own configuration calls the end of sequence. Raises ModelFileError."""
    plain_ids, ids = _token_ids(folder)
    num_tokens = max(ids.values()) + 1
    if num_tokens > _MAX_TOKENS:  # a table has a row for each id, though only a few of them were added
        raise ModelFileError(f"{folder} has a token with the id {num_tokens - 1}, which must be below {_MAX_TOKENS}.")
    eos_token_ids = set()
    for name in ("config.json", "generation_config.json"):
        file = ModelJson.read_optional(folder / name)
        for token_id in file.ids("eos_token_id"):
            if token_id >= num_tokens:
                raise file.wrong("eos_token_id", f"below {num_tokens}, the number of tokens")
            eos_token_ids.add(token_id)
    eos_token = read_folder_special_tokens(folder).eos
    if eos_token is not None:
        if eos_token not in ids:
            raise ModelFileError(f"{folder} names {eos_token!r} as eos_token, but its tokenizer has no such token.")
        eos_token_ids.add(ids[eos_token])
    return FolderTokens(
        num_tokens=num_tokens,
        num_plain_tokens=max(plain_ids.values(), default=-1) + 1,
        eos_token_ids=frozenset(eos_token_ids),
    )


def _token_ids(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of the tokenizer's own table, and all."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(f"{folder} lacks tokenizer.json, which must hold its tokenizer.")
    file = ModelJson.read(path)
    model = file.section("model")
    vocabulary = None if model is None else model.get("vocab")
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids.update(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: pairs of text and score, in the order of ids
        ids.update({str(pair[0]): token_id for token_id, pair in enumerate(vocabulary) if isinstance(pair, list) and pair})
    plain_ids = dict(ids)
    for token in file.sections("added_tokens"):
        ids[token.text("content") or ""] = token.count("id", smallest=0)
    if not ids or not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids.values()):
        raise ModelFileError(f"{path} holds no table of tokens with an id each.")
    return plain_ids, ids

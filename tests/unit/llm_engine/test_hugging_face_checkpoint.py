from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_engine.hugging_face_checkpoint import HuggingFaceCheckpoint
from llm_engine.load_model import load_model
from llm_engine.open_checkpoint import read_model_config
from serving_core.errors import ModelFileError
from serving_core.kv_page_layout import KVDType
from tests.tiny_model_folder import change_json, write_json, write_tiny_folder
from tests.unit.llm_engine.tiny_engine import TinyEngine

PROMPT = [5, 90, 17, 200, 33, 8]


def logprobs(folder: Path) -> dict[int, float]:
    token = TinyEngine(folder, KVDType.FLOAT32).prefill(PROMPT, chunk=16, max_tokens=16).results[-1]
    assert token.logprobs is not None
    return dict(token.logprobs.top)


def test_reading_the_config_checks_the_tensors_and_needs_no_torch(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", num_shards=2)
    code = (
        "import sys; from pathlib import Path; from llm_engine.open_checkpoint import read_model_config;"
        f"read_model_config(Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", omit=frozenset({name}))
    with pytest.raises(ModelFileError, match=f"lacks the tensor {name}"):
        read_model_config(folder)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    change_json(write_tiny_folder(tmp_path / "tiny") / "config.json", num_hidden_layers=3)
    with pytest.raises(ModelFileError, match=r"lacks the tensors model\.layers\.2\..* and 5 more"):
        read_model_config(tmp_path / "tiny")


def test_more_layers_than_tensors_are_refused_at_once(tmp_path: Path) -> None:
    change_json(write_tiny_folder(tmp_path / "tiny") / "config.json", num_hidden_layers=2**30)
    with pytest.raises(ModelFileError, match="states 1073741824 layers and holds 20 tensors"):
        read_model_config(tmp_path / "tiny")


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    change_json(write_tiny_folder(tmp_path / "tiny") / "config.json", intermediate_size=256)
    with pytest.raises(ModelFileError, match=r"mlp\.gate_proj\.weight has shape \[128, 64\]; .* \[256, 64\]"):
        read_model_config(tmp_path / "tiny")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.mlp.up_proj.weight",
        pytest.param("final_norm.weight", id="the name that our own code gives to another"),
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", extra_tensors={name: torch.zeros(16)})
    with pytest.raises(ModelFileError, match=f"holds the tensor {name}"):
        read_model_config(folder)


def test_biases_without_their_flag_are_refused_and_the_other_way_round(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", config={"attention_bias": True})
    change_json(folder / "config.json", attention_bias=False)
    with pytest.raises(ModelFileError, match=r"holds the tensor model\.layers\.0\.self_attn\.\w_proj\.bias"):
        read_model_config(folder)
    change_json(folder / "config.json", attention_bias=True, mlp_bias=True)
    with pytest.raises(ModelFileError, match=r"lacks the tensors model\.layers\.0\.mlp\.gate_proj\.bias"):
        read_model_config(folder)


def test_a_tied_head_beside_its_copy_is_the_embedding(tmp_path: Path) -> None:
    plain = write_tiny_folder(tmp_path / "plain")
    other = {"lm_head.weight": torch.full((267, 64), 9.0), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    with_copy = write_tiny_folder(tmp_path / "copy", extra_tensors=other)
    assert logprobs(with_copy) == logprobs(plain)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    change_json(write_tiny_folder(tmp_path / "tiny") / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelFileError, match=r"lacks the tensor lm_head\.weight"):
        read_model_config(tmp_path / "tiny")


@pytest.mark.parametrize("is_tied", [True, False])
def test_padding_of_the_head_is_never_chosen_nor_listed(tmp_path: Path, *, is_tied: bool) -> None:
    tied = {"tie_word_embeddings": is_tied}
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    plain = write_tiny_folder(tmp_path / "plain", config=tied)
    padded = write_tiny_folder(tmp_path / "padded", config=tied)
    tensors = load_file(plain / "model.safetensors")
    for padded_name in ("model.embed_tokens.weight", name):
        # as loud as can be: each of these rows would beat every other
        tensors[padded_name] = torch.cat([tensors[padded_name][:267], 100 * torch.randn(128, 64)])
    save_file(tensors, padded / "model.safetensors")
    change_json(padded / "config.json", vocab_size=267 + 128)
    config = read_model_config(padded)
    assert (config.vocab_size, config.num_tokens) == (395, 267)
    assert logprobs(padded) == pytest.approx(logprobs(plain), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 2}, {}, {"eos_token": None}, {2}),
        ({"eos_token_id": [2, 5]}, {"eos_token_id": [7, 2]}, {"eos_token": None}, {2, 5, 7}),
        ({"eos_token_id": 0}, {}, {"eos_token": {"content": "<|im_end|>", "lstrip": False}}, {0, 2}),
        ({"eos_token_id": None}, {}, {"eos_token": None}, set()),
    ],
)
def test_every_stated_end_token_ends_an_answer(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", config=config)
    write_json(folder / "generation_config.json", generation)
    change_json(folder / "tokenizer_config.json", **tokenizer)
    assert load_model(folder, dtype=KVDType.FLOAT32).eos_token_ids == expected


def test_an_older_folders_map_of_special_tokens_is_read(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", config={"eos_token_id": None})
    change_json(folder / "tokenizer_config.json", eos_token=None)
    write_json(folder / "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})
    assert load_model(folder, dtype=KVDType.FLOAT32).eos_token_ids == {2}


def test_an_end_token_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    change_json(folder / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(ModelFileError, match="names '</s>' as eos_token, but its tokenizer has no such token"):
        read_model_config(folder)


def test_an_end_token_beyond_the_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", config={"eos_token_id": 300})
    with pytest.raises(ModelFileError, match="has 300 for eos_token_id, which must be below 267"):
        read_model_config(folder)


def test_a_token_that_was_added_later_needs_no_embedding(tmp_path: Path) -> None:
    # Gemma's tokenizer has one for pictures, which the models of text alone do not know.
    folder = write_tiny_folder(tmp_path / "tiny")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    picture = {**tokenizer["added_tokens"][0], "id": 267, "content": "<picture>"}
    change_json(folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], picture])
    change_json(folder / "config.json", eos_token_id=[2, 267])
    with closing(HuggingFaceCheckpoint(folder)) as checkpoint:
        assert checkpoint.config.num_tokens == 267
        assert checkpoint.eos_token_ids == {2}, "what has no embedding can end no answer"


def test_an_id_as_high_as_no_table_is_long_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    change_json(folder / "tokenizer.json", added_tokens=[{"id": 2**29, "content": "<far>"}])
    with pytest.raises(ModelFileError, match="has a token with the id 536870912, which must be below 16777216"):
        read_model_config(folder)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"lacks tokenizer\.json"):
        read_model_config(folder)


def test_the_print_tells_models_apart_but_not_shards(tmp_path: Path) -> None:
    def print_of(folder: Path) -> str:
        return load_model(folder, dtype=KVDType.FLOAT32).model_print

    whole, sharded = write_tiny_folder(tmp_path / "whole"), write_tiny_folder(tmp_path / "sharded", num_shards=3)
    assert print_of(whole) == print_of(sharded)
    prints = {print_of(whole)}
    for file, key in (("config.json", "rope_theta"), ("tokenizer_config.json", "eos_token")):
        folder = write_tiny_folder(tmp_path / key)
        change_json(folder / file, **{key: None})
        prints.add(print_of(folder))
    tweak = {"model.layers.1.mlp.down_proj.weight": torch.zeros(64, 128)}
    prints.add(print_of(write_tiny_folder(tmp_path / "other", omit=frozenset(tweak), extra_tensors=tweak)))
    prints.add(print_of(write_tiny_folder(tmp_path / "half", dtype=torch.float16)))
    assert len(prints) == 5


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        write_tiny_folder(tmp_path / "tiny", dtype=torch.bfloat16, num_shards=2),
        dtype=KVDType.BFLOAT16,
        on_progress=lambda num_done, num_all: calls.append((num_done, num_all)),
    )
    assert calls == sorted(calls)
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 0

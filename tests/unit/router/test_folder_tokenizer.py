from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as BackEnd

from router.chat_template import ChatMessage, read_chat_template
from router.tokenizer import read_tokenizer
from serving_core.errors import InvalidRequest, ModelFileError
from tests.tiny_model import write_tiny_gguf
from tests.tiny_model_folder import change_json, write_json, write_tiny_folder, write_tiny_tokenizer
from tests.unit.router.default_model import text_of

HI = [ChatMessage(role="user", content="Hi")]
UNIGRAM = {"type": "Unigram", "unk_id": None}
TEXTS = ["", "Hi there, the one", "in 12 ²\n\n<|im_end|>x<|im_start|>", "naïve 日本語 🙂", "\x00\u200b"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``tokenizer.json`` in place."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text("utf-8"))
    change(values)
    write_json(path, values)


def test_it_equals_the_same_tokenizer_in_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    ours, other = read_tokenizer(folder), read_tokenizer(write_tiny_gguf(tmp_path / "tiny.gguf"))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == other.encode(text, add_special_tokens=True)
        assert text_of(ids, tokenizer=ours) == text_of(ids, tokenizer=other)
    assert ours.vocab_size == 267
    assert ours.special_token_ids == other.special_token_ids
    assert 1 not in ours.encode("Hi", add_special_tokens=True), "nothing asks for BOS"
    assert ours.token_bytes(267) == b"", "a model may pad its head"


def test_it_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_tiny_folder(tmp_path / "tiny")
    reference: Any = AutoTokenizer.from_pretrained(folder)
    ours = read_tokenizer(folder)
    for text in TEXTS:
        ids = list(ours.encode(text, add_special_tokens=True))
        assert ids == reference.encode(text)
        assert text_of(ids, tokenizer=ours) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    chat = [{"role": "user", "content": "Hi"}]
    assert read_chat_template(folder).render(HI) == reference.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_reading_needs_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from router.tokenizer import read_tokenizer;"
        f"read_tokenizer(Path({str(folder)!r}));"
        "sys.exit(bool({'torch', 'transformers', 'ray', 'grpc'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_limits_of_the_training_run_cut_nothing(folder: Path) -> None:
    def add_limits(values: dict[str, Any]) -> None:
        values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        values["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    expected = read_tokenizer(folder).encode("a longer text", add_special_tokens=True)
    edit(folder, add_limits)
    assert read_tokenizer(folder).encode("a longer text", add_special_tokens=True) == expected


def with_template(folder: Path, template: list[str]) -> None:
    back_end = BackEnd.from_file(str(folder / "tokenizer.json"))
    pairs = [(text, back_end.token_to_id(text)) for text in ("<|im_start|>", "<|im_end|>")]
    back_end.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(template, special_tokens=pairs)]
    )
    back_end.save(str(folder / "tokenizer.json"))


def test_bos_is_put_in_front_where_the_post_processor_does(folder: Path) -> None:
    with_template(folder, ["<|im_start|>", "$A"])
    tokenizer = read_tokenizer(folder)
    plain = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.encode("Hi", add_special_tokens=True) == (1, *plain)


def test_other_tokens_around_a_text_are_refused(folder: Path) -> None:
    with_template(folder, ["<|im_start|>", "$A", "<|im_end|>"])
    with pytest.raises(ModelFileError, match="adds other tokens to a text than BOS, 1"):
        read_tokenizer(folder)


def test_sentencepiece_pieces_become_bytes(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "▁h", "▁he"]
    back_end = BackEnd(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("▁h", "e")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    back_end.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    back_end.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    back_end.add_special_tokens([AddedToken(text, special=True) for text in pieces[:3]])
    back_end.add_tokens([AddedToken("<tool>", normalized=False)])
    back_end.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer.encode("he é<tool>", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" he", b" ", b"\xc3", b"\xa9", b"<tool>"]
    assert text_of((1, *ids, 2), tokenizer=tokenizer) == " he é<tool>"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_holes_among_the_ids_are_empty(folder: Path) -> None:
    edit(folder, lambda values: values["model"]["vocab"].update(far=300))
    tokenizer = read_tokenizer(folder)
    assert tokenizer.vocab_size == 301
    assert (tokenizer.token_bytes(299), tokenizer.token_bytes(300)) == (b"", b"far")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["model"].update(type="Made-up"), "is not a tokenizer that can be read"),
        (lambda values: values.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "kind WordPiece"),
        (lambda values: values.update(decoder=None), "decoder of kind none"),
        (lambda values: values.update(model={**UNIGRAM, "vocab": [["x", 0.0]]}), "makes no tokens of a plain text"),
    ],
)
def test_an_unsupported_tokenizer_is_named(change: Callable[[dict[str, Any]], None], message: str, folder: Path) -> None:
    edit(folder, change)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_tokenizer(folder)
    assert "tokenizer.json" in str(caught.value)


def test_a_text_without_tokens_is_a_bad_request(folder: Path) -> None:
    edit(folder, lambda values: values.update(model={**UNIGRAM, "vocab": [["a", 0.0]]}, added_tokens=[]))
    (folder / "tokenizer_config.json").unlink()
    tokenizer = read_tokenizer(folder)
    assert tokenizer.encode("aa", add_special_tokens=False) == (0, 0)
    with pytest.raises(InvalidRequest, match="cannot be turned into tokens"):
        tokenizer.encode("b", add_special_tokens=False)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"lacks tokenizer\.json"):
        read_tokenizer(tmp_path)


def test_a_special_token_that_is_none_is_named(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", eos_token="</s>")
    with pytest.raises(ModelFileError, match="names '</s>' as eos_token, but its tokenizer has no such token"):
        read_tokenizer(folder)


def test_a_template_in_a_file_of_its_own_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert read_chat_template(folder).render(HI) == "<|im_start|>Hi<|im_end|>"


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    assert read_chat_template(folder).render(HI) == "plain"
    change_json(folder / "tokenizer_config.json", chat_template=templates[:1])
    assert not read_chat_template(folder).is_available


@pytest.mark.parametrize("template", [7, ["x"], {"default": "x"}])
def test_a_template_of_another_kind_is_named(template: object, folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ModelFileError, match="for chat_template, which must be"):
        read_chat_template(folder)


def test_a_folder_without_template_is_known_at_start(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template=None)
    assert not read_chat_template(folder).is_available

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from router.gguf_metadata import read_gguf_metadata
from router.tokenizer import Tokenizer, read_tokenizer
from serving_core.errors import InvalidRequest, ModelFileError
from tests.tiny_model import write_tiny_gguf
from tests.unit.router.default_model import default_model_path, default_tokenizer, reference_tokenizer, text_of

VARIED_TEXTS = [
    "",
    " ",
    "The quick brown fox doesn't jump; it's 3.14 or 1,000,000 (2024-05-06).",
    "def f(x):\n    return {'a': x ** 2}\n\n\tprint(f(10))\r\n",
    "다음 문장 日本語のテキスト 中文字符。标点",
    "🙂🎉👩‍👩‍👧🇫🇷 mixed кириллица و عربي",
    "   leading,  double   and trailing   ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<repo_name>a<file_sep>b",
    "Room 12345, floor -7, 1e-9",
    "a\x00b\x06c\u200bd\ufeffe\u2028f",
    "https://example.org/?q=1&r=%20#x <html>&amp;</html>",
    "x" * 300 + "\n" * 7 + "-" * 90,
]


def test_ids_equal_those_of_transformers() -> None:
    reference = reference_tokenizer()
    for text in VARIED_TEXTS:
        ours = default_tokenizer().encode(text, add_special_tokens=True)
        assert list(ours) == reference.encode(text), text
        assert text_of(ours) == reference.decode(list(ours), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert default_tokenizer().vocab_size == len(reference)
    assert default_tokenizer().special_token_ids == set(reference.added_tokens_decoder)


@pytest.mark.parametrize(
    ("text", "tokens"), [("a  12", ["a", "ĠĠ", "1", "2"]), ("x\n\n1", ["x", "ĊĊ", "1"]), ("m ²", ["m", "Ġ", "Â²"])]
)
def test_digits_are_split_off_before_white_space_is_looked_at(text: str, tokens: list[str]) -> None:
    # Here AutoTokenizer differs: it takes no notice of the file's pre-tokenizer, smollm.
    texts = read_gguf_metadata(default_model_path()).require_list("tokenizer.ggml.tokens", str)
    assert [texts[token_id] for token_id in default_tokenizer().encode(text, add_special_tokens=False)] == tokens


@pytest.mark.parametrize("text", VARIED_TEXTS)
def test_lower_bound_holds(text: str) -> None:
    assert default_tokenizer().min_num_tokens(text) <= len(default_tokenizer().encode(text, add_special_tokens=False))


def test_lower_bound_is_worth_something() -> None:
    assert default_tokenizer().min_num_tokens("lorem ipsum dolor " * 300_000) > 8192


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        default_tokenizer().encode("A\ud83d", add_special_tokens=False)


def test_importing_and_reading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from pathlib import Path; from router.tokenizer import read_tokenizer; from router.app import create_app;"
        f"read_tokenizer(Path({str(path)!r})); sys.exit(bool({{'torch', 'transformers', 'ray', 'grpc'}} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def write_vocabulary(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str = "gpt-2",
    tokens: list[str],
    types: list[int],
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    adds_bos: bool = False,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(adds_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_tokenizer(path: Path) -> Tokenizer:
    pieces = {"▁": -9.0, "h": -9.1, "e": -9.2, "l": -9.3, "o": -9.4, "he": -2.0, "ll": -3.0, "hell": -4.0, "hello": -5.0}
    pieces |= {"▁hello": -1.5, "el": -1.0}
    specials = ["<unk>", "<s>", "</s>"]
    raw_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return read_tokenizer(
        write_vocabulary(
            path,
            model="llama",
            tokens=[*specials, *raw_bytes, *pieces],
            types=[2, 3, 3, *[6] * 256, *[1] * len(pieces)],
            scores=[0.0] * 259 + list(pieces.values()),
            adds_bos=True,
        )
    )


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path / "spm.gguf")
    ids = tokenizer.encode("hello é", add_special_tokens=True)
    assert ids[0] == 1
    assert [tokenizer.token_bytes(token_id) for token_id in ids[1:]] == [b" ", b"h", b"el", b"l", b"o", b" ", b"\xc3", b"\xa9"]
    # The space in front is the vocabulary's own; an answer's first token keeps it, since it follows the prompt.
    assert text_of(ids, tokenizer=tokenizer) == " hello é"
    assert tokenizer.encode("</s>", add_special_tokens=False) == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer of kind 'bert'"),
        ({"pre": "made-up"}, "the way 'made-up'"),
        ({"types": [1]}, "3 tokens but 1 token types"),
        ({"types": [1, 1, 77]}, "unknown type"),
        ({"merges": ["q z"]}, "merges that do not fit"),
        ({"merges": None}, r"no array tokenizer\.ggml\.merges"),
        ({"model": "llama", "merges": None}, r"no array tokenizer\.ggml\.scores"),
    ],
)
def test_an_unsupported_file_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"tokens": ["a", "b", "ab"], "types": [1, 1, 1], "merges": ["a b"]} | changes
    path = write_vocabulary(tmp_path / "odd.gguf", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match=message) as caught:
        read_tokenizer(path)
    assert str(path) in str(caught.value)


def test_llama_3_takes_digits_by_threes(tmp_path: Path) -> None:
    tokens = ["1", "2", "3", "4", "12", "123", "1234"]
    path = write_vocabulary(
        tmp_path / "l3.gguf", pre="llama-bpe", tokens=tokens, types=[1] * 7, merges=["1 2", "12 3", "123 4"]
    )
    tokenizer = read_tokenizer(path)
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("1234", add_special_tokens=False)] == [
        b"123",
        b"4",
    ]


def test_qwen_takes_digits_one_by_one_and_composes_letters(tmp_path: Path) -> None:
    tokens = ["1", "2", "12", "Ã", "©", "Ã©"]
    path = write_vocabulary(tmp_path / "q2.gguf", pre="qwen2", tokens=tokens, types=[1] * 6, merges=["1 2", "Ã ©"])
    tokenizer = read_tokenizer(path)
    assert tokenizer.encode("12", add_special_tokens=False) == (0, 1)
    assert tokenizer.encode("e\u0301", add_special_tokens=False) == tokenizer.encode("é", add_special_tokens=False) == (5,)


def test_smollm3_splits_as_llama_3_does(tmp_path: Path) -> None:
    tokens = ["1", "2", "3", "4", "12", "123", "1234"]
    path = write_vocabulary(
        tmp_path / "s3.gguf", pre="smaug-bpe", tokens=tokens, types=[1] * 7, merges=["1 2", "12 3", "123 4"]
    )
    assert read_tokenizer(path).encode("1234", add_special_tokens=False) == (5, 3)


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 7, 20, 200, 1000])
def test_a_truncated_file_is_named(tmp_path: Path, num_bytes: int) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:num_bytes])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is (truncated|empty|not a GGUF file)"):
        read_tokenizer(path)


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nope\.gguf cannot be read: No such file"):
        read_tokenizer(tmp_path / "nope.gguf")
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelFileError, match=r"foreign\.gguf is not a GGUF file"):
        read_tokenizer(foreign)

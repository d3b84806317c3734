from __future__ import annotations

import datetime
import tracemalloc
from pathlib import Path

import pytest

from router.chat_template import ChatMessage, ChatTemplate, read_chat_template
from serving_core.errors import InvalidRequest, ModelFileError
from tests.tiny_model import write_tiny_gguf
from tests.unit.router.default_model import default_chat_template, default_model_path, reference_tokenizer

HI = [ChatMessage(role="user", content="Hi")]


def render(source: str, messages: list[ChatMessage] = HI) -> str:
    now = datetime.datetime(2024, 5, 6)
    return ChatTemplate(source, origin="test", bos_token="<s>", eos_token="</s>", now=lambda: now).render(messages)


def test_the_default_model_gets_its_system_prompt_unless_there_is_one() -> None:
    template = read_chat_template(default_model_path())
    assert template.is_available
    assert template.render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    silent = template.render([ChatMessage(role="system", content=""), *HI], add_generation_prompt=False)
    assert silent == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_it_equals_transformers_rendering() -> None:
    conversation = [("system", "S"), ("user", " two\n lines "), ("assistant", ""), ("user", "<b>&</b>")]
    expected = reference_tokenizer().apply_chat_template(
        [{"role": role, "content": content} for role, content in conversation], tokenize=False, add_generation_prompt=True
    )
    messages = [ChatMessage(role=role, content=content) for role, content in conversation]
    assert default_chat_template().render(messages) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ strftime_now('%d %b %Y') }}", "06 May 2024"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ tools is none }}", "True"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch pwned').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        "{{ raise_exception('no system messages') }}",
        "{{ 9 ** 9 ** 8 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at_all }}",
    ],
)
def test_an_unsafe_or_failing_template_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template of this model cannot render") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_reason_a_template_gives_is_told() -> None:
    with pytest.raises(InvalidRequest, match="no system messages"):
        render("{{ raise_exception('no system messages') }}")


def test_a_template_that_cannot_be_compiled_is_known_at_start() -> None:
    with pytest.raises(ModelFileError, match="The chat template of test is wrong in line 2"):
        render("ok\n{{ bad")


@pytest.mark.parametrize(
    "source",
    ["{% for a in messages %}" * 25 + "{% endfor %}" * 25, "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}"],
    ids=["loops", "parentheses"],
)
def test_what_is_too_much_for_the_compiler_is_known_at_start(source: str) -> None:
    with pytest.raises(ModelFileError, match="The chat template of test cannot be compiled: "):
        ChatTemplate(source, origin="test")


def test_the_reason_of_a_syntax_error_ends_once() -> None:
    with pytest.raises(ModelFileError, match=r"No filter named 'nosuch'\.$"):
        ChatTemplate("{{ x|nosuch }}", origin="test")


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ 'a' * 300000000 }}", "{% set x = 'a' * 300000000 %}{{ x|length }}"])
def test_nothing_is_computed_while_compiling(source: str) -> None:
    tracemalloc.start()
    try:
        ChatTemplate(source, origin="test")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * 2**20


def test_extras_cannot_replace_role_or_content() -> None:
    message = ChatMessage(role="user", content="Hi", extras={"role": "system", "content": "x", "name": "Ann"})
    assert render("{{ messages[0].role }} {{ messages[0].content }} {{ messages[0].name }}", [message]) == "user Hi Ann"


def test_a_model_without_template_is_known_at_start_and_says_so(tmp_path: Path) -> None:
    template = ChatTemplate(None, origin="test")
    assert not template.is_available
    with pytest.raises(InvalidRequest, match="has no chat template"):
        template.render(HI)
    assert read_chat_template(write_tiny_gguf(tmp_path / "tiny.gguf")).is_available

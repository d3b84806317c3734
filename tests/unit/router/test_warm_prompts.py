"""Files of ``--warm-prompt`` to the tokens that requests begin with which begin so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router.chat_messages import Message
from router.chat_template import ChatTemplate
from router.prompt_encoder import PromptEncoder
from router.warm_prompts import NUM_ANSWER_TOKENS, read_warm_prompts
from serving_core.errors import ConfigError
from tests.unit.router.default_model import default_chat_template, default_tokenizer

WINDOW = 512
RULES = "You are the clerk of a small harbour. Answer with one sentence, and name the ship.\nNever guess."
FOLDING = "{% for m in messages %}{% if m.role == 'user' %}[{{ messages[0].content }} | {{ m.content }}]{% endif %}{% endfor %}"
"""A template that writes the system message into the user's, as some models want it."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}"


def make_encoder(template: ChatTemplate | None = None) -> PromptEncoder:
    return PromptEncoder(
        tokenizer=default_tokenizer(),
        chat_template=template or default_chat_template(),
        max_model_len=lambda: WINDOW,
    )


def read(*paths: Path, template: ChatTemplate | None = None, window: int = WINDOW) -> tuple[tuple[int, ...], ...]:
    return asyncio.run(read_warm_prompts(paths, make_encoder(template), max_model_len=window))


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def chat_ids(*messages: tuple[str, str], template: ChatTemplate | None = None) -> tuple[int, ...]:
    """The prompt of a chat request."""
    request = [Message.model_validate({"role": role, "content": content}) for role, content in messages]
    return asyncio.run(make_encoder(template).encode_chat(request))


def test_a_conversation_is_what_those_that_begin_so_share(tmp_path: Path) -> None:
    path = write(tmp_path, "rules.json", [{"role": "system", "content": RULES}])
    (warm,) = read(path)
    questions = [chat_ids(("system", RULES), ("user", question)) for question in ("Which ship?", "§ 12", "A1")]
    assert all(ids[: len(warm)] == warm for ids in questions)
    assert len({ids[len(warm)] for ids in questions}) == len(questions), "they share more"


def test_forms_of_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": RULES}]}]
    body = {"model": "any", "messages": messages, "temperature": 0}
    assert len(read(write(tmp_path, "list.json", messages), write(tmp_path, "body.json", body))) == 1


def test_what_ends_with_a_question_is_a_whole_prompt(tmp_path: Path) -> None:
    (warm,) = read(write(tmp_path, "chat.json", [{"role": "user", "content": "Which ship?"}]))
    assert warm == chat_ids(("user", "Which ship?"))


def test_an_answer_is_followed_by_a_question(tmp_path: Path) -> None:
    turns = [("user", "Which ship?"), ("assistant", "The Anna.")]
    (warm,) = read(write(tmp_path, "chat.json", [{"role": role, "content": content} for role, content in turns]))
    assert chat_ids(*turns, ("user", "When?"))[: len(warm)] == warm


def test_a_template_that_renders_nothing_without_a_user(tmp_path: Path) -> None:
    template = ChatTemplate(FOLDING, origin="test")
    (warm,) = read(write(tmp_path, "rules.json", [{"role": "system", "content": RULES}]), template=template)
    assert len(warm) > 10
    assert chat_ids(("system", RULES), ("user", "Which?"), template=template)[: len(warm)] == warm


def test_a_text_begins_prompts_and_is_a_system_message(tmp_path: Path) -> None:
    prompt, chat = read(write(tmp_path, "rules.txt", RULES + "\n"))
    assert prompt == default_tokenizer().encode(RULES, add_special_tokens=True)
    assert (chat,) == read(write(tmp_path, "rules.json", [{"role": "system", "content": RULES}]))


@pytest.mark.parametrize("source", [None, NO_SYSTEM])
def test_a_text_where_there_are_no_system_messages(tmp_path: Path, source: str | None) -> None:
    assert len(read(write(tmp_path, "rules.txt", RULES), template=ChatTemplate(source, origin="test"))) == 1


def test_order_and_doubles(tmp_path: Path) -> None:
    one, two = (write(tmp_path, f"{name}.json", [{"role": "user", "content": name}]) for name in ("one", "two"))
    assert read(two, one, two) == (*read(two), *read(one))
    assert read() == ()


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("empty.txt", " \n", "is empty"),
        ("empty.json", "", "is empty"),
        ("list.json", "[]", "messages"),
        ("broken.json", "[{", "is not valid JSON"),
        ("number.json", "3", r"messages is 3 but must be a list"),
        ("role.json", '[{"role": "king", "content": "x"}]', r"messages\[0\].role is 'king'"),
        ("silent.json", '[{"role": "system"}]', "no content"),
        ("long.txt", "ship " * WINDOW, "comes to 51[0-9] tokens, but must leave room for 2 more in a window of 512"),
        ("long.json", json.dumps([{"role": "user", "content": "ship " * WINDOW}]), "comes to 5[0-9][0-9] tokens"),
        ("hopeless.txt", "ship " * 10**6, "The context window is 512 tokens"),
        ("huge.txt", "ship " * 2 * 10**6, "is larger than 8388608 bytes"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, what: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ConfigError, match=f"--warm-prompt {path} .*{what}") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    for path, what in (
        (tmp_path / "missing.txt", "No such file"),
        (tmp_path, "Is a directory"),
        (latin, "UTF-8, but byte 3 is not"),
    ):
        with pytest.raises(ConfigError, match=f"--warm-prompt {path} .*{what}"):
            read(path)


def test_the_longest_that_leaves_room(tmp_path: Path) -> None:
    path = write(tmp_path, "chat.json", [{"role": "user", "content": "ship " * 20}])
    (warm,) = read(path)
    assert read(path, window=len(warm) + NUM_ANSWER_TOKENS) == (warm,)
    with pytest.raises(ConfigError, match="must leave room"):
        read(path, window=len(warm) + NUM_ANSWER_TOKENS - 1)

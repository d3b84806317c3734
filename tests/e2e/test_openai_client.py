"""The official client against the real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server_process import MODEL, ServerProcess

pytestmark = pytest.mark.e2e

CAPITAL = "What is the capital of France?"
MANY_SCRIPTS = "你好,世界🌍🚀 こんにちは 👩‍👩‍👧‍👦 안녕 🇫🇷 "


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": CAPITAL}], temperature=0, max_tokens=32
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert "Paris" in content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": CAPITAL}],
        "temperature": 0,
        "max_tokens": 32,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    not_cached = {"prompt_tokens_details"}  # which the second of two equal requests may have other than the first
    assert chunks[-1].usage.model_dump(exclude=not_cached) == whole.usage.model_dump(exclude=not_cached)
    finish_reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in finish_reasons if reason is not None] == ["stop"]


def test_completion_and_stop_strings(client: openai.OpenAI) -> None:
    prompt = "Count: one, two, three, four, five,"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    stop = whole.choices[0].text[8:14]  # across token borders
    cut = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(stop)]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
def test_streamed_text_is_the_whole_text_byte_for_byte(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": MANY_SCRIPTS * 4, "max_tokens": 96, **sampling}
    whole = client.completions.create(**options).choices[0].text
    chunks = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
    assert "".join(chunks).encode() == whole.encode()
    assert len([chunk for chunk in chunks if chunk]) > 5, "it came in pieces"
    if sampling["temperature"] == 0:
        assert any(ord(character) > 0x2E80 for character in whole), "the answer goes on in the prompt's scripts"
    # a piece that ended inside a character could only have been written with replacement characters
    assert whole.count("\ufffd") == "".join(chunks).count("\ufffd")


def test_a_seed_repeats_an_answer_and_another_does_not(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt="Once", max_tokens=24, temperature=1, seed=seed).choices[0].text

    assert answer(1) == answer(1) != answer(2)

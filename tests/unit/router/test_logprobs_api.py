"""Logprobs in both shapes, whole and streamed. What the workers report is played by the script: -0.5, -1.5, … for the tokens
themselves, and alternatives from id 100 on."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from router.answer import AnswerToken
from router.logprob_report import LogprobReport
from serving_core.token_event import TokenLogprobs
from tests.unit.router.default_model import default_tokenizer
from tests.unit.router.front import EOS, answering, chunks, ids_of, make_front
from tests.unit.router.scripted_generator import Script

assert openai.__version__


async def test_chat_logprobs_whole() -> None:
    front = make_front(answering("Hello there!"))
    response = await front.chat(logprobs=True, top_logprobs=3)
    assert front.generator.requests[0].sampling.num_logprobs == 3
    ChatCompletion.model_validate(response.json())
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " there", "!", "<|im_end|>"]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.5, -2.5, -3.5]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [alternative["logprob"] for alternative in entry["top_logprobs"]] == [-1.0, -2.0, -3.0]
        assert all(alternative.keys() == {"token", "logprob", "bytes"} for alternative in entry["top_logprobs"])


async def test_chat_logprobs_of_the_tokens_alone() -> None:
    with_logprobs: list[dict[str, Any]] = [{}, {"top_logprobs": 0}, {"top_logprobs": None}]
    for options in with_logprobs:
        response = await make_front(answering("Hello")).chat(logprobs=True, **options)
        assert [entry["top_logprobs"] for entry in response.json()["choices"][0]["logprobs"]["content"]] == [[], []]
    without: list[dict[str, Any]] = [{}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}]
    for options in without:
        front = make_front(answering("Hello"))
        assert (await front.chat(**options)).json()["choices"][0]["logprobs"] is None
        assert front.generator.requests[0].sampling.num_logprobs is None


@pytest.mark.parametrize("text", ["Hello there!", "다음 🙂🎉 done", "Hello stop here"])
async def test_streamed_logprobs_are_those_of_the_whole_answer(text: str) -> None:
    front = make_front(answering(text))
    options: dict[str, Any] = {"n": 2, "stop": ["stop"], "logprobs": True, "top_logprobs": 2}
    whole = (await front.chat(**options)).json()
    parsed = chunks(await front.chat(**options, stream=True))
    for index in (0, 1):
        streamed = []
        for choice in (chunk["choices"][0] for chunk in parsed):
            if choice["index"] == index and choice["logprobs"] is not None:
                streamed += choice["logprobs"]["content"]
        assert streamed == whole["choices"][index]["logprobs"]["content"]
    num_tokens = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
    assert num_tokens == whole["usage"]["completion_tokens"]


async def test_completion_logprobs() -> None:
    front = make_front(answering("日 blue"))
    body = (await front.complete(logprobs=2)).json()
    Completion.model_validate(body)
    logprobs = body["choices"][0]["logprobs"]
    token_ids = [*ids_of("日 blue"), EOS]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in logprobs.values()} == {len(token_ids)}
    assert logprobs["tokens"][-2:] == [" blue", "<|im_end|>"]
    assert logprobs["tokens"][0].startswith("bytes:\\x")
    assert logprobs["text_offset"][-2:] == [1, 6]
    assert logprobs["token_logprobs"][:2] == [-0.5, -1.5]
    assert all(len(alternatives) == 3 for alternatives in logprobs["top_logprobs"]), "two, and the token itself"
    body = (await front.complete(logprobs=0)).json()
    assert body["choices"][0]["logprobs"]["top_logprobs"][-2:] == [
        {" blue": body["choices"][0]["logprobs"]["token_logprobs"][-2]},
        {"<|im_end|>": body["choices"][0]["logprobs"]["token_logprobs"][-1]},
    ]


async def test_streamed_completion_logprobs() -> None:
    front = make_front(answering("日 blue"))
    whole = (await front.complete(logprobs=20)).json()["choices"][0]["logprobs"]
    parsed = chunks(await front.complete(logprobs=20, stream=True))
    for name, expected in whole.items():
        streamed: list[object] = []
        for choice in (chunk["choices"][0] for chunk in parsed):
            streamed += choice["logprobs"][name] if choice["logprobs"] else []
        assert streamed == expected


async def test_every_token_of_the_vocabulary_can_be_reported_and_none_is_lost() -> None:
    report = LogprobReport(default_tokenizer())
    top = tuple((token_id, -1.0) for token_id in range(default_tokenizer().vocab_size))
    token = AnswerToken(token_id=5, text_offset=0, logprobs=TokenLogprobs(logprob=-math.inf, top=top))
    entry: Any = report.of_text([token])
    assert len(entry["top_logprobs"][0]) == len(top)
    chat: Any = report.of_chat([token])
    for alternative, (token_id, _) in zip(chat["content"][0]["top_logprobs"], top, strict=True):
        assert bytes(alternative["bytes"]) == default_tokenizer().token_bytes(token_id)
    assert json.loads(json.dumps(entry, allow_nan=False))["token_logprobs"] == [-9999.0]
    json.dumps(chat, ensure_ascii=False, allow_nan=False).encode("utf-8")


async def test_a_script_of_nothing_but_half_characters() -> None:
    token_ids = ids_of("🙂")[:1]
    body = (await make_front(Script(token_ids=[*token_ids, EOS])).chat(logprobs=True)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert content[0]["bytes"] == list(default_tokenizer().token_bytes(token_ids[0]))
    assert body["choices"][0]["message"]["content"] == "\ufffd"

"""/generate, /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.router.default_model import default_tokenizer, text_of
from tests.unit.router.front import EOS, answering, frames, ids_of, make_front
from tests.unit.router.test_http_errors import error_of

MESSAGES = [{"role": "user", "content": "Say ok."}]


async def test_a_whole_answer() -> None:
    front = make_front(answering("Hello there!"))
    response = await front.post("/generate", {"prompt": "Hi", "max_tokens": 9, "temperature": 0, "repetition_penalty": 1.5})
    assert response.headers["x-twinpool-path"] == "pair"
    assert response.json() == {
        "text": "Hello there!",
        "token_ids": [*ids_of("Hello there!"), EOS],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 4,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "request_id": "gen-0002",
    }
    request = front.generator.requests[0]
    assert (request.key.request_id, request.sampling.repetition_penalty) == ("gen-0002", 1.5)
    front.generator.assert_no_leaks()


@pytest.mark.parametrize("text", ["Hello there!", "🙂🎉 日本語"])
async def test_a_stream_adds_up_to_the_whole_answer(text: str) -> None:
    front = make_front(answering(text))
    whole = (await front.post("/generate", {"prompt": ids_of("Hi"), "stop": "zz"})).json()
    *payloads, done = frames(await front.post("/generate", {"prompt": "Hi", "stop": "zz", "stream": True}))
    assert done == "[DONE]"
    parsed = [json.loads(payload) for payload in payloads]
    assert "".join(chunk["text"] for chunk in parsed) == whole["text"] == text
    assert [token_id for chunk in parsed for token_id in chunk["token_ids"]] == whole["token_ids"]
    assert [chunk["finish_reason"] for chunk in parsed] == [None] * (len(parsed) - 1) + ["stop"]
    assert [chunk["usage"] for chunk in parsed] == [None] * (len(parsed) - 1) + [whole["usage"]]
    assert {chunk["request_id"] for chunk in parsed} == {"gen-0004"}


async def test_generate_refuses_what_it_does_not_serve() -> None:
    front = make_front()
    for option in ({"n": 2}, {"logprobs": 5}, {"prompt": ["a", "b"]}, {"prompt": [49_152]}, {"max_tokens": 0}, {"min_p": 2}):
        error = error_of(await front.post("/generate", {"prompt": "Hi", **option}), 400)
        assert error["param"] in option
    assert error_of(await front.post("/generate", {"prompt": "Hi", "model": "gpt-5"}), 404)["param"] == "model"
    assert front.generator.requests == []


async def test_tokenize_and_detokenize_are_each_others_opposite() -> None:
    front = make_front()
    for text in ("", "Hello there!", "日本語 🙂 <|im_start|>user", "x " * 9000):
        reply = (await front.post("/tokenize", {"prompt": text})).json()
        assert reply == {"tokens": ids_of(text), "count": len(ids_of(text)), "max_model_len": 512}
        assert (await front.post("/detokenize", {"tokens": reply["tokens"]})).json() == {"prompt": text}


async def test_messages_are_tokenized_as_a_chat_would() -> None:
    front = make_front()
    await front.chat(messages=MESSAGES)
    reply = (await front.post("/tokenize", {"messages": MESSAGES})).json()
    assert tuple(reply["tokens"]) == front.generator.requests[0].prompt_token_ids
    shorter = (await front.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})).json()
    assert reply["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < reply["count"]


BAD_TOKENIZE: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": MESSAGES}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"messages": []}, "messages"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
]


@pytest.mark.parametrize(("body", "param"), BAD_TOKENIZE)
async def test_bad_bodies_of_tokenize(body: dict[str, Any], param: str) -> None:
    assert error_of(await make_front().post("/tokenize", body), 400)["param"] == param


@pytest.mark.parametrize("tokens", [None, "a", 5, ["a"], [1.5], [True], [-1], [49_152], [10**30]])
async def test_bad_bodies_of_detokenize(tokens: object) -> None:
    assert error_of(await make_front().post("/detokenize", {"tokens": tokens}), 400)["param"] == "tokens"


async def test_half_characters_are_replaced() -> None:
    response = await make_front().post("/detokenize", {"tokens": ids_of("🙂")[:1]})
    assert response.json() == {"prompt": "\ufffd"}
    assert default_tokenizer().token_bytes(ids_of("🙂")[0])


async def test_the_key_is_asked_for() -> None:
    front = make_front(api_key="K1")
    for path in ("/generate", "/tokenize", "/detokenize"):
        error_of(await front.post(path, {"prompt": "Hi", "tokens": [1]}), 401)


async def test_an_assistants_message_is_continued() -> None:
    front = make_front()
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital is"}]
    for options in ({}, {"add_generation_prompt": False}):
        await front.chat(messages=messages, continue_final_message=True, **options)
        prompt = text_of(front.generator.requests[-1].prompt_token_ids)
        assert prompt.endswith("assistant\nThe capital is")
    await front.chat(messages=messages)
    prompt = b"".join(map(default_tokenizer().token_bytes, front.generator.requests[-1].prompt_token_ids)).decode()
    assert prompt.endswith("The capital is<|im_end|>\n<|im_start|>assistant\n"), "a new turn by default"
    error_of(await front.chat(messages=MESSAGES, continue_final_message=True), 400)

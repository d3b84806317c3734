"""What a client gets for a good request, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from router.chat_template import ChatTemplate
from tests.unit.router.default_model import default_tokenizer
from tests.unit.router.front import CHAT, EOS, MODEL, answering, chunks, cut_after, frames, ids_of, make_front, streamed_text
from tests.unit.router.scripted_generator import Script

MULTILINGUAL = "다음 문장 日本語 🙂🎉👩‍👩‍👧🇫🇷 done."


async def test_a_whole_chat_answer() -> None:
    front = make_front(answering("Hello there!"))
    response = await front.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-twinpool-path"] == "pair"
    assert response.headers["x-twinpool-reason"] == "default"
    num_prompt_tokens = len(front.generator.requests[0].prompt_token_ids)
    assert response.json() == {
        "id": "chatcmpl-0002",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there!"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": num_prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert front.metrics.finished == [("stop", num_prompt_tokens, 4)]
    assert (len(front.metrics.first_tokens), len(front.metrics.inter_tokens)) == (1, 3)
    front.generator.assert_no_leaks()


@pytest.mark.parametrize(("text", "salt"), [("tenant-1", b"tenant-1"), ("\u00e9", b"\xc3\xa9"), (None, b"")])
async def test_a_cache_salt_goes_with_the_request(text: str | None, salt: bytes) -> None:
    front = make_front(answering("Hello"))
    for response in (await front.chat(cache_salt=text), await front.complete(cache_salt=text)):
        assert response.status_code == 200, response.text
    assert [request.cache_salt for request in front.generator.requests] == [salt, salt]


async def test_the_token_that_completes_a_stop_string_tells_what_was_cached() -> None:
    front = make_front(Script(token_ids=ids_of("Hello there!"), num_cached_tokens=2))
    response = await front.complete(prompt=[1, 2, 3], stop="Hello")
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_whole_completion() -> None:
    front = make_front(cut_after(" blue and wide", 2))
    response = await front.complete(max_tokens=2)
    assert response.json()["id"] == "cmpl-0002"
    assert response.json()["object"] == "text_completion"
    assert response.json()["choices"] == [{"index": 0, "text": " blue and", "logprobs": None, "finish_reason": "length"}]
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    front.generator.assert_no_leaks()


async def test_a_streamed_chat_answer() -> None:
    front = make_front(answering("Hello there!"))
    response = await front.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-twinpool-path"] == "pair"
    assert "content-encoding" not in response.headers
    parsed = chunks(response)
    assert [chunk["choices"][0]["delta"] for chunk in parsed] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {"content": "!"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed] == [None, None, None, None, "stop"]
    for chunk in parsed:
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}
        assert (chunk["id"], chunk["object"], chunk["created"]) == ("chatcmpl-0002", "chat.completion.chunk", 1_700_000_000)
        assert chunk["choices"][0].keys() == {"index", "delta", "logprobs", "finish_reason"}
    front.generator.assert_no_leaks()


async def test_a_streamed_completion() -> None:
    parsed = chunks(await make_front(answering(" blue.")).complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in parsed] == [" blue", ".", ""]
    assert {chunk["object"] for chunk in parsed} == {"text_completion"}


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": {}}, {"stream_options": None}, {"stream_options": {"include_usage": None}}]
)
async def test_usage_is_streamed_only_when_asked_for(options: dict[str, object]) -> None:
    front = make_front()
    assert all("usage" not in chunk for chunk in chunks(await front.chat(stream=True, **options)))
    *others, last = chunks(await front.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("num_tokens", range(1, 30))
async def test_streamed_equals_whole_wherever_the_answer_is_cut(num_tokens: int) -> None:
    front = make_front(cut_after(MULTILINGUAL, num_tokens))
    whole = (await front.complete()).json()
    response = await front.complete(stream=True, stream_options={"include_usage": True})
    parsed = chunks(response)
    assert streamed_text(parsed) == whole["choices"][0]["text"]
    assert parsed[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == min(num_tokens, len(ids_of(MULTILINGUAL)))
    assert whole["choices"][0]["text"].rstrip("\ufffd") in MULTILINGUAL


async def test_a_stop_string_across_tokens_ends_the_answer_and_the_generation() -> None:
    text = "one two three four five"
    front = make_front(answering(text))
    response = (await front.complete(stop=["wo thr"])).json()
    assert response["choices"][0]["text"] == "one t"
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == 3, "up to the token that completed it, ' three'"
    assert front.generator.generations[0].num_taken == 3
    assert front.metrics.finished[0][0] == "stop"
    front.generator.assert_no_leaks()


async def test_text_held_for_a_stop_string_is_flushed_at_the_end() -> None:
    for script in (answering("Say please"), cut_after("Say please", 2)):
        response = (await make_front(script).complete(stop="seZZZ")).json()
        assert response["choices"][0]["text"] == "Say please"


async def test_a_stop_string_completed_by_the_last_token_is_a_stop_not_a_length() -> None:
    response = (await make_front(cut_after("one two three", 2)).complete(stop=["two"])).json()
    assert response["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}


async def test_a_stop_string_that_never_comes_holds_nothing_back() -> None:
    stop = ["THIS_WILL_NEVER_APPEAR_0123456789"]
    with_stop = chunks(await make_front(answering(MULTILINGUAL)).chat(stream=True, stop=stop))
    without = chunks(await make_front(answering(MULTILINGUAL)).chat(stream=True))
    assert [chunk["choices"] for chunk in with_stop] == [chunk["choices"] for chunk in without]


async def test_the_first_token_is_the_end_token() -> None:
    front = make_front(Script(token_ids=[EOS]))
    response = (await front.chat(max_tokens=1)).json()
    assert response["choices"][0]["message"]["content"] == ""
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == 1
    assert streamed_text(chunks(await front.chat(max_tokens=1, stream=True))) == ""
    front.generator.assert_no_leaks()


async def test_content_parts_equal_the_string() -> None:
    front = make_front()
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "ok."}]
    await front.chat(messages=[{"role": "user", "content": "Say ok."}])
    await front.chat(messages=[{"role": "user", "content": parts}])
    first, second = front.generator.requests
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize("arguments", ["null", "", "not json", "[1]", None, '{"a": 1}', {"a": 1}])
async def test_a_replayed_tool_call_is_fine_whatever_its_arguments(arguments: object) -> None:
    call = {"id": "c4", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c4", "content": "12:00"},
    ]
    assert (await make_front().chat(messages=messages)).status_code == 200


async def test_a_template_sees_arguments_as_an_object() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}", origin="test")
    front = make_front(chat_template=template)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    await front.chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert front.generator.requests[0].prompt_token_ids == tuple(ids_of("Paris"))


async def test_roles_and_empty_texts() -> None:
    front = make_front()
    conversation = [("developer", "S"), ("user", "A"), ("assistant", ""), ("user", "B")]
    await front.chat(messages=[{"role": role, "content": content} for role, content in conversation])
    prompt = b"".join(default_tokenizer().token_bytes(token) for token in front.generator.requests[0].prompt_token_ids).decode()
    assert prompt.startswith("<|im_start|>system\nS<|im_end|>\n")
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nB" in prompt


async def test_every_optional_field_may_be_null_or_neutral() -> None:
    front = make_front()
    names = (
        "stop n logprobs top_logprobs seed user logit_bias stream stream_options tools tool_choice response_format max_tokens "
        "max_completion_tokens temperature top_p top_k min_tokens ignore_eos stop_token_ids presence_penalty frequency_penalty "
        "model best_of echo suffix metadata"
    )
    nulls = dict.fromkeys(names.split())
    neutral: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 5.0, "stop": None, "n": 1}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "stop_token_ids": []}
    neutral |= {"min_p": 0, "repetition_penalty": 1, "top_logprobs": 0, "continue_final_message": False, "echo": False}
    neutral |= {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": False}
    neutral |= {"user": "u-1", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low"}
    neutral |= {"prediction": None, "x_unknown": 1}
    for options in (nulls, neutral):
        assert (await front.chat(**options)).status_code == 200
        assert (await front.complete(**options)).status_code == 200


async def test_sampling_reaches_the_request() -> None:
    front = make_front()
    await front.chat(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, seed=-1, min_tokens=2, ignore_eos=True, stop_token_ids=[5, 49_151]
    )
    sampling = front.generator.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 40)
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (2**64 - 1, 2, True)
    assert sampling.stop_token_ids == (5, 49_151)
    await front.chat(top_p=0, top_k=10**30)
    defaults = front.generator.requests[1].sampling
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.seed) == (0.0, 1.0, 0, 1235)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_limit_the_answer(name: str) -> None:
    front = make_front()
    await front.chat(**{name: 5})
    await front.chat(**{"max_tokens": 100, name: 5})
    assert front.generator.requests[0].sampling.max_tokens == 5
    assert front.generator.requests[1].sampling.max_tokens == 5


async def test_without_a_limit_the_rest_of_the_window_is_used() -> None:
    front = make_front(max_model_len=10)
    await front.complete()
    await front.complete(max_tokens=7)
    assert [request.sampling.max_tokens for request in front.generator.requests] == [7, 7]


async def test_models() -> None:
    front = make_front()
    model = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "twinpool"}
    assert (await front.get("/v1/models")).json() == {"object": "list", "data": [model]}
    assert (await front.get(f"/v1/models/{MODEL}")).json() == model
    assert (await front.get("/v1/models/some%2Fother")).json()["error"]["code"] == "model_not_found"


async def test_a_model_name_with_a_slash() -> None:
    front = make_front(model_name="org/name-1")
    for path in ("org%2Fname-1", "org/name-1"):
        assert (await front.get(f"/v1/models/{path}")).json()["id"] == "org/name-1"
    assert (await front.chat(model="org/name-1")).json()["model"] == "org/name-1"


async def test_the_official_client() -> None:
    front = make_front(answering(MULTILINGUAL))
    transport = httpx.ASGITransport(app=front.app)
    http_client: Any = httpx.AsyncClient(transport=transport)  # the client's newer versions name another, equal class
    async with openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http_client, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
        chat = await client.chat.completions.create(model=MODEL, messages=messages)
        assert chat.choices[0].message.content == MULTILINGUAL
        assert chat.choices[0].message.tool_calls is None
        assert chat.usage is not None
        pieces: list[str] = []
        usages = []
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usages.append(chunk.usage)
        assert "".join(pieces) == MULTILINGUAL
        assert usages[-1] == chat.usage
        assert set(usages[:-1]) == {None}
        completion = await client.completions.create(model=MODEL, prompt="Hi")
        assert completion.choices[0].text == MULTILINGUAL
        with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
            await client.chat.completions.create(model="gpt-5", messages=messages)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=100_000)
        assert caught.value.code == "context_length_exceeded"


async def test_frames_hold_text_not_escapes() -> None:
    response = await make_front(answering("日本\n語")).chat(stream=True)
    assert "日" in response.text
    assert all(json.loads(frame) for frame in frames(response)[:-1])
    assert CHAT["model"] == MODEL

"""What a client gets for a bad request and for a failure on our side: always the same four keys."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from router.chat_template import ChatTemplate
from router.request_body import MAX_BODY_BYTES
from serving_core.errors import InvalidRequest, NoCapacity, RefusalCode, Refused, TwinpoolError, WorkerLost
from tests.unit.router.front import COMPLETION, chunks, ids_of, make_front
from tests.unit.router.scripted_generator import Script


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    return error


BAD_OPTIONS: list[tuple[str, object]] = [
    *(("max_tokens", value) for value in (0, -1, 5.5, "5", True, [5], 10**30, 1e300)),
    *(("max_completion_tokens", value) for value in (0, -1, "5", True)),
    *(("temperature", value) for value in (-0.1, 2.1, "1", True, 10**400)),
    *(("top_p", value) for value in (-0.1, 1.1, "1", False)),
    *(("top_k", value) for value in (-2, 1.5, "5", True)),
    *(("seed", value) for value in (2**64, -(2**63) - 1, 1.5, "7", True)),
    *(("min_tokens", value) for value in (-1, 10**6, True)),
    *(("ignore_eos", value) for value in (1, "true")),
    *(("stop", value) for value in ("", [""], ["a"] * 17, "a" * 1025, ["b", "a" * 1025], 5, [5], {"a": 1})),
    *(("stop_token_ids", value) for value in ([-1], [151_645], [49_152], ["a"], [True], 5, [10**30])),
    *(("stream", value) for value in (1, "true")),
    *(("stream_options", value) for value in ({"include_usage": True}, {}, 5)),
    ("model", 5),
    *(("cache_salt", value) for value in ("", "a" * 257, "\ud83d", 5, ["a"])),
    *(("n", value) for value in (0, -1, 129, "1", True)),
    ("best_of", 2),
    *(("presence_penalty", value) for value in (2.5, 50, "0", False)),
    ("frequency_penalty", -2.1),
    *(("repetition_penalty", value) for value in (0, -1, 1e9, "1", True)),
    *(("min_p", value) for value in (-0.1, 1.5, "0")),
    *(("logit_bias", value) for value in ({"191222": -100}, {"49152": 5}, {"-1": 1}, {"a": 1}, {"1": 101}, {"1": "5"}, [1])),
    ("logit_bias", {str(token_id): 1 for token_id in range(1025)}),
    *(("top_logprobs", value) for value in (1_000_000, -1, True, 20.5, "5")),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("suffix", "x"),
    ("continue_final_message", True),
    ("guided_regex", "a+"),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS)
async def test_a_bad_parameter_is_named_and_the_next_request_works(name: str, value: object) -> None:
    front = make_front()
    for response in (await front.chat(**{name: value}), await front.complete(**{name: value})):
        error = error_of(response, 400)
        assert error["param"] == name
        assert error["type"] == "invalid_request_error"
        assert name in error["message"]
    assert front.generator.requests == []
    assert (await front.complete()).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
async def test_bad_messages(messages: object, param: str) -> None:
    assert error_of(await make_front().chat(messages=messages), 400)["param"] == param


@pytest.mark.parametrize(
    ("content", "given"),
    [
        *((5, "is 5"), (True, "is true"), ({"text": "Hi"}, "is {'text': 'Hi'}"), (["Hi"], "has 'Hi' as part 0")),
        ([{"type": "text", "text": "Hi"}, {"type": "image_url"}], "has {'type': 'image_url'} as part 1"),
        ([{"type": "text", "text": 5}], "has {'text': 5, 'type': 'text'} as part 0"),
        ([{"text": "Hi"}], "has {'text': 'Hi'} as part 0"),
    ],
)
async def test_content_of_a_wrong_type_is_shown_beside_what_is_right(content: object, given: str) -> None:
    error = error_of(await make_front().chat(messages=[{"role": "user", "content": content}]), 400)
    right = 'a string or a list of text parts like {"type": "text", "text": "…"}'
    assert error["message"] == f"messages[0].content {given} but must be {right}."


@pytest.mark.parametrize(
    ("stop", "given"),
    [
        *((5, "is 5"), (True, "is true"), ({"a": 1}, "is {'a': 1}"), ("", "is ''"), ([""], "holds ''"), ([5], "holds 5")),
        *(("x" * 1025, "is a string of 1025 characters"), (["a", "x" * 1025], "holds a string of 1025 characters")),
        *((["a"] * 17, "is a list of 17 items"), (["a", None], "holds null"), ([["a"]], "holds ['a']")),
    ],
)
async def test_a_wrong_stop_is_shown_beside_what_is_right(stop: object, given: str) -> None:
    error = error_of(await make_front().complete(stop=stop), 400)
    right = "a string or a list of at most 16 strings, each of 1 to 1024 characters"
    assert (error["param"], error["message"]) == ("stop", f"stop {given} but must be {right}.")


async def test_a_wrong_bias_is_shown_with_its_token() -> None:
    error = error_of(await make_front().complete(logit_bias={"5": "x"}), 400)
    assert error["message"] == "logit_bias[\"5\"] is 'x' but must be a number."
    error = error_of(await make_front().complete(logit_bias={"5": 101}), 400)
    assert (error["param"], error["message"]) == (
        "logit_bias",
        'logit_bias["5"] is 101 but must be less than or equal to 100.',
    )


BAD_PROMPTS: list[object] = [
    *(None, 5, {}, "", [""], [], [[]], "\x06"),
    *(["ok", 5], ["ok", ""], [5, "ok"], [[1], []], [[1], "a"], [1.5], [True], [None]),
    *([999_999], [-5], [49_152], [4_294_967_296], [10**30], [[1, 2], [999_999]]),
    ["a"] * 129,
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
async def test_bad_prompts(prompt: object) -> None:
    front = make_front()
    assert error_of(await front.complete(prompt=prompt), 400)["param"] == "prompt"
    assert error_of(await front.post("/generate", {"prompt": prompt}), 400)["param"] == "prompt"
    assert front.generator.requests == [], "one bad prompt fails all of them before any is begun"


@pytest.mark.parametrize(("body", "param"), [({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs")])
async def test_limits_of_logprobs_are_told(body: dict[str, object], param: str) -> None:
    error = error_of(await make_front().complete(**body), 400)
    assert error["param"] == param
    assert "20" in error["message"]
    error = error_of(await make_front().chat(logprobs=True, top_logprobs=21), 400)
    assert error["param"] == "top_logprobs"
    assert "20" in error["message"]


async def test_options_that_need_or_exclude_each_other() -> None:
    front = make_front()
    assert error_of(await front.chat(top_logprobs=5, logprobs=False), 400)["param"] == "top_logprobs"
    assert error_of(await front.chat(logprobs=5), 400)["param"] == "logprobs"
    assert error_of(await front.complete(logprobs=True), 400)["param"] == "logprobs"
    assert error_of(await front.complete(echo=True, logprobs=1), 400)["param"] == "echo"
    assert error_of(await front.chat(echo=True), 400)["param"] == "echo"
    assert error_of(await front.complete(prompt=["a", "b"], n=65), 400)["param"] == "n"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(await front.chat(**both), 400)["param"] == "continue_final_message"
    assert front.generator.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": NaN}', b'{"a":' + b"[" * 100_000])
async def test_bodies_that_are_no_json_object(body: bytes) -> None:
    assert error_of(await make_front().post("/v1/completions", body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("max_tokens", number) for number in (10**4000, -(10**4000), 1e300)),
        *(
            (name, 10**4000)
            for name in ("max_completion_tokens", "seed", "min_tokens", "top_k", "n", "logprobs", "temperature")
        ),
        *((name, [10**4000]) for name in ("stop_token_ids", "prompt")),
        *(("logit_bias", bias) for bias in ({"1": 10**300}, {"1" * 4000: 1})),
    ],
)
async def test_a_message_does_not_repeat_all_digits_of_a_number(name: str, number: object) -> None:
    error = error_of(await make_front().complete(**{name: number}), 400)
    assert error["param"] == name
    assert len(error["message"]) < 200


async def test_a_number_that_is_too_long_to_be_read() -> None:
    error = error_of(await make_front().post("/v1/completions", b'{"seed": ' + b"9" * 5000 + b"}"), 400)
    assert error["message"] == "The request's body holds a whole number of more than 4300 digits."


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "is null but must be a string, a list of token ids, or a list of either that is not empty"),
        ([True], "is [true] but must hold only strings, only token ids, or only lists of token ids, none of them empty"),
    ],
)
async def test_a_wrong_prompt_is_shown_beside_what_is_right(prompt: object, message: str) -> None:
    assert error_of(await make_front().complete(prompt=prompt), 400)["message"] == f"prompt {message}."


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", rb'{"prompt": "A\ud83d"}', "prompt"),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "A\ud83d"}]}', "messages"),
        ("/tokenize", rb'{"prompt": "A\ud83d"}', "prompt"),
        ("/tokenize", rb'{"messages": [{"role": "user", "content": "A\ud83d"}]}', "messages"),
    ],
)
async def test_half_a_surrogate_pair_in_a_prompt_is_blamed_on_it(path: str, body: bytes, param: str) -> None:
    error = error_of(await make_front().post(path, body), 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")


async def test_half_a_surrogate_pair() -> None:
    front = make_front()
    for body in (
        rb'{"prompt": "A\ud83d"}',
        rb'{"prompt": "A", "model": "\ud83d"}',
        rb'{"prompt": "A", "max_tokens": "\ud83d"}',
    ):
        error_of(await front.post("/v1/completions", body), 404 if b"model" in body else 400)


async def test_missing_fields() -> None:
    front = make_front()
    assert error_of(await front.post("/v1/completions", {}), 400)["message"] == "prompt is missing."
    assert error_of(await front.post("/v1/chat/completions", {}), 400)["message"] == "messages is missing."


async def test_the_window_at_one_below_and_one_above() -> None:
    front = make_front(max_model_len=10)
    num_prompt_tokens = len(ids_of(str(COMPLETION["prompt"])))
    at_the_limit = 10 - num_prompt_tokens
    assert (await front.complete(max_tokens=at_the_limit)).status_code == 200
    assert (await front.complete(max_tokens=at_the_limit - 1)).status_code == 200
    error = error_of(await front.complete(max_completion_tokens=at_the_limit + 1), 400)
    assert error["param"] == "max_completion_tokens"
    assert error["code"] == "context_length_exceeded"
    for count in (10, num_prompt_tokens, at_the_limit + 1):
        assert str(count) in error["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_over_the_window(stream: bool) -> None:
    front = make_front(max_model_len=3)
    for options in ({}, {"max_tokens": 1}):
        error = error_of(await front.complete(stream=stream, **options), 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error_of(await front.chat(stream=stream), 400)["param"] == "messages"


async def test_a_hopeless_prompt_is_refused_without_tokenising() -> None:
    error = error_of(await make_front().chat(messages=[{"role": "user", "content": "lorem ipsum dolor " * 300_000}]), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


async def test_a_long_prompt_is_tokenised_in_a_thread() -> None:
    front = make_front(max_model_len=10_000)
    assert (await front.complete(prompt="word " * 5_000, max_tokens=1)).status_code == 200
    assert len(front.generator.requests[0].prompt_token_ids) >= 5_000


async def test_what_no_pool_can_hold_is_refused_in_the_clients_words() -> None:
    front = make_front(max_total_tokens=5)
    error = error_of(await front.complete(max_tokens=5), 400)
    assert (error["code"], error["param"]) == ("too_large", "max_tokens")
    error = error_of(await front.chat(max_completion_tokens=5), 400)
    assert (error["code"], error["param"]) == ("too_large", "max_completion_tokens")
    for param, name in (("prompt", "messages"), ("max_tokens", "max_completion_tokens")):
        failure = InvalidRequest("The prompt and max_tokens 5 do not fit.", param=param, code="exceeds_kv_cache")
        error = error_of(await make_front(Script(start_error=failure)).chat(max_completion_tokens=5), 400)
        assert (error["param"], error["message"]) == (name, "The prompt and max_completion_tokens 5 do not fit.")


async def test_a_wrong_model_is_not_found() -> None:
    front = make_front()
    for response in (await front.chat(model="gpt-5"), await front.complete(model="gpt-5"), await front.get("/v1/models/nope")):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_a_model_without_template_completes_but_does_not_chat(caplog: pytest.LogCaptureFixture) -> None:
    front = make_front(chat_template=ChatTemplate(None, origin="test"))
    assert "no chat template" in caplog.text, "known at start"
    assert "no chat template" in error_of(await front.chat(), 400)["message"]
    assert (await front.complete()).status_code == 200


async def test_an_oversized_body() -> None:
    response = await make_front().post("/v1/completions", b" " * (MAX_BODY_BYTES + 1))
    assert error_of(response, 413)["code"] == "request_too_large"


async def test_unknown_paths_and_methods() -> None:
    front = make_front()
    error_of(await front.get("/v1/nope"), 404)
    error_of(await front.get("/"), 404)
    response = await front.get("/v1/chat/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


async def test_errors_in_further_routes_have_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    routes = APIRouter()

    @routes.get("/admin/typed")
    async def typed(count: int) -> int:
        return count

    @routes.get("/admin/broken")
    async def broken() -> None:
        raise RuntimeError("secret detail")

    front = make_front(extra_routes=(routes,))
    assert (await front.get("/admin/typed?count=5")).json() == 5
    error = error_of(await front.get("/admin/typed?count=x"), 400)
    assert (error["param"], error["message"]) == ("count", "count is 'x' but must be a whole number.")
    with caplog.at_level(logging.ERROR):
        error = error_of(await front.get("/admin/broken"), 500)
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (NoCapacity("No worker had room.", retry_after_s=2.5), 503, "no_capacity"),
        (NoCapacity("The queue is full.", retry_after_s=2.5, is_queue_full=True), 429, "queue_full"),
        (InvalidRequest("It can never fit.", param="max_tokens", code="too_large"), 400, "too_large"),
        (WorkerLost("decode-0 died."), 502, "worker_lost"),
        (Refused(RefusalCode.DRAINING, "It drains."), 500, "internal_error"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
async def test_a_failure_before_the_first_token_is_an_error_response(
    stream: bool, failure: Exception, status: int, code: str
) -> None:
    for script in (Script(start_error=failure), Script(error=failure)):
        front = make_front(script)
        response = await front.chat(stream=stream)
        assert error_of(response, status)["code"] == code
        assert response.headers.get("retry-after") == ("3" if status in {429, 503} else None)
        assert "secret" not in response.text
        assert [reason for reason, _, _ in front.metrics.finished] == ["error"] * len(front.generator.generations)
        front.generator.assert_no_leaks()


@pytest.mark.parametrize("failure", [WorkerLost("decode-0 died."), RuntimeError("secret detail"), TwinpoolError("Odd.")])
async def test_a_failure_in_a_stream_is_one_event_and_the_end(failure: Exception) -> None:
    front = make_front(Script(token_ids=ids_of("one two three"), error=failure))
    response = await front.chat(stream=True)
    assert response.status_code == 200
    *events, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert last.startswith('data: {"error": {"message": ')
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert all('"finish_reason":null' in event for event in events)
    assert front.metrics.finished[0][0] == "error"
    front.generator.assert_no_leaks()


async def test_a_failure_in_a_whole_answer_is_an_error_response() -> None:
    front = make_front(Script(token_ids=ids_of("one two"), error=WorkerLost("decode-0 died.")))
    assert error_of(await front.chat(), 502)["message"] == "decode-0 died."
    front.generator.assert_no_leaks()


async def test_a_generation_that_just_stops_is_an_error() -> None:
    front = make_front(Script())
    assert error_of(await front.chat(), 502)["code"] == "worker_lost"
    front.generator.assert_no_leaks()


async def test_request_ids() -> None:
    front = make_front()
    assert (await front.get("/v1/models")).headers["x-request-id"] == "req-0001"
    echoed = await front.get("/v1/models", **{"x-request-id": "my id\t-7"})
    assert echoed.headers["x-request-id"] == "myid-7"
    long = await front.get("/v1/models", **{"x-request-id": "a" * 500})
    assert long.headers["x-request-id"] == "a" * 128
    assert (await front.get("/nope", **{"x-request-id": "mine"})).headers["x-request-id"] == "mine"
    response = await front.post("/v1/completions", COMPLETION, **{"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] != "mine"
    assert str(front.generator.requests[0].key) != "mine/0"


KEY = "clé-ü"


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer {KEY}", True),
        (f"Bearer  {KEY} ", True),
        (f"Basic {KEY}", False),
        (KEY, False),
        ("Bearer", False),
        ("Bearer cl\x00", False),
        ("Bearer clé-u", False),
        ("Bearer " + "x" * 10**6, False),
        (None, False),
    ],
)
async def test_the_key(value: str | None, passes: bool) -> None:
    front = make_front(api_key=KEY)
    async with front.client() as client:
        headers = [] if value is None else [(b"authorization", value.encode())]
        response = await client.get("/v1/models", headers=headers)
        if passes:
            assert response.status_code == 200
        else:
            assert error_of(response, 401)["type"] == "authentication_error"
            assert KEY not in response.text


async def test_the_key_is_asked_for_everywhere_but_on_the_public_paths() -> None:
    routes = APIRouter()

    def answer_nothing() -> None:
        return None

    for path in ("/health", "/ready", "/metrics", "/admin/workers"):
        routes.add_api_route(path, answer_nothing)
    front = make_front(extra_routes=(routes,), api_key="K1", admin_key="A1")
    for path in ("/health", "/ready", "/metrics"):
        assert (await front.get(path)).status_code == 200
    for path in ("/v1/models", "/docs", "/openapi.json", "/nope", "/admin/workers", "/health/"):
        assert (await front.get(path)).status_code == 401
    error_of(await front.post("/v1/completions", COMPLETION), 401)
    assert (await front.get("/admin/workers", authorization="Bearer K1")).status_code == 401
    assert (await front.get("/admin/workers", authorization="Bearer A1")).status_code == 200
    async with front.client() as client:
        two = [(b"authorization", b"Bearer K1"), (b"authorization", b"Bearer K1")]
        assert (await client.get("/v1/models", headers=two)).status_code == 401
        assert (await client.options("/v1/models")).status_code == 405
    assert front.generator.requests == []


async def test_a_stream_option_needs_a_stream() -> None:
    front = make_front()
    assert len(chunks(await front.chat(stream=True, stream_options={"include_usage": False}))) == 5

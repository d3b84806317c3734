"""Several answers to one request: n, lists of prompts, and what happens to all when one fails or the client leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from serving_core.errors import NoCapacity, WorkerLost
from serving_core.generate_request import GenerateRequest
from tests.unit.router.default_model import text_of
from tests.unit.router.front import CHAT, COMPLETION, EOS, RawClient, answering, chunks, ids_of, make_front
from tests.unit.router.scripted_generator import Script

WORDS = ["one", "two words", "three words here", "four words are here"]


def by_choice(request: GenerateRequest) -> Script:
    """Each choice answers with words of its own, and so with a number of tokens of its own."""
    return answering(WORDS[request.key.choice_index % len(WORDS)])


def by_prompt(request: GenerateRequest) -> Script:
    return answering("re: " + text_of(request.prompt_token_ids))


def texts_by_index(parsed: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in parsed for choice in chunk["choices"]):
        text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


async def test_n_choices_of_a_chat() -> None:
    front = make_front(script_of=by_choice)
    body = (await front.chat(n=4, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["message"]["content"] for choice in body["choices"]] == WORDS
    # 1. one prompt is counted once, every token of every choice counts
    assert body["usage"]["prompt_tokens"] == front.generator.requests[0].num_prompt_tokens
    assert body["usage"]["completion_tokens"] == sum(len(ids_of(words)) + 1 for words in WORDS)
    # 2. the choices are sequences of one request, with one seed
    assert [request.key.choice_index for request in front.generator.requests] == [0, 1, 2, 3]
    assert {(request.key.request_id, request.sampling.seed) for request in front.generator.requests} == {(body["id"], 7)}
    front.generator.assert_no_leaks()


async def test_streamed_choices_interleave_under_their_own_index() -> None:
    front = make_front(script_of=by_choice)
    parsed = chunks(await front.chat(n=4, stream=True, stream_options={"include_usage": True}))
    *parsed, last = parsed
    assert texts_by_index(parsed) == dict(enumerate(WORDS))
    indexes = [chunk["choices"][0]["index"] for chunk in parsed]
    assert indexes[:4] == [0, 1, 2, 3]
    assert indexes != sorted(indexes), "they come side by side"
    finished = [c["choices"][0]["index"] for c in parsed if c["choices"][0]["finish_reason"] is not None]
    assert sorted(finished) == [0, 1, 2, 3], "each ends once"
    assert last["usage"]["completion_tokens"] == sum(len(ids_of(words)) + 1 for words in WORDS)
    front.generator.assert_no_leaks()


@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_times_n(stream: bool) -> None:
    prompts = ["One plus one is", "The sky is", "Paris is in"]
    front = make_front(script_of=by_prompt)
    response = await front.complete(prompt=prompts, n=2, stream=stream)
    expected = {index: "re: " + prompts[index // 2] for index in range(6)}
    if stream:
        assert texts_by_index(chunks(response)) == expected
    else:
        body = response.json()
        assert {choice["index"]: choice["text"] for choice in body["choices"]} == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"]["prompt_tokens"] == sum(len(ids_of(prompt)) for prompt in prompts)
    keys = [request.key for request in front.generator.requests]
    assert len(set(keys)) == 6
    assert [key.choice_index for key in keys] == [0, 1] * 3, "a prompt is answered as if it had been sent alone"
    front.generator.assert_no_leaks()


@pytest.mark.parametrize("stream", [True, False])
async def test_cached_tokens_are_those_of_each_prompts_first_answer(stream: bool) -> None:
    def script_of(request: GenerateRequest) -> Script:
        num_cached_tokens = request.num_prompt_tokens - 1 if request.key.choice_index else len(request.prompt_token_ids) // 2
        return replace(answering("one two three"), num_cached_tokens=num_cached_tokens)

    front = make_front(script_of=script_of)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await front.complete(prompt=[[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]], n=3, **options)
    usage = (chunks(response)[-1] if stream else response.json())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 + 3}
    assert usage["prompt_tokens"] == 10


async def test_equal_prompts_get_answers_of_their_own() -> None:
    front = make_front()
    await front.complete(prompt=["Tell a joke"] * 2, n=2)
    first, same, second, _ = (request.sampling.seed for request in front.generator.requests)
    assert first == same, "choices of one prompt share its seed"
    assert first != second
    await front.complete(prompt=["Tell a joke"] * 2, seed=7)
    assert [request.sampling.seed for request in front.generator.requests[4:]] == [7, 7], "unless the client names one"


async def test_prompts_of_token_ids() -> None:
    front = make_front()
    assert len((await front.complete(prompt=[[504, 3575], [28, 29, 30]])).json()["choices"]) == 2
    assert [request.prompt_token_ids for request in front.generator.requests] == [(504, 3575), (28, 29, 30)]
    body = (await front.complete(prompt=[0, 49_151])).json()
    assert (len(body["choices"]), body["usage"]["prompt_tokens"]) == (1, 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_echo(stream: bool) -> None:
    text = "日本語のテキスト 한국어 𠜎𠜱"
    front = make_front(answering(" ok"))
    for prompt in ([text, "b"], [ids_of(text), ids_of("b")]):
        response = await front.complete(prompt=prompt, n=2, echo=True, stream=stream)
        texts = texts_by_index(chunks(response) if stream else [response.json()])
        assert texts == {0: text + " ok", 1: text + " ok", 2: "b ok", 3: "b ok"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_one_choice_that_cannot_start_fails_all(stream: bool, failing: int) -> None:
    def script_of(request: GenerateRequest) -> Script:
        if request.key.choice_index == failing:
            return Script(start_error=NoCapacity("Full.", retry_after_s=1, is_queue_full=True))
        return Script(token_ids=ids_of("one two"), hangs_after=0)

    front = make_front(script_of=script_of)
    response = await front.chat(n=3, stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    front.generator.assert_no_leaks()


async def test_a_choice_that_is_lost_ends_the_stream_of_all() -> None:
    def script_of(request: GenerateRequest) -> Script:
        if request.key.choice_index == 1:
            return Script(token_ids=ids_of("one"), error=WorkerLost("decode-0 died."))
        return Script(token_ids=ids_of("one two three"), hangs_after=2)

    front = make_front(script_of=script_of)
    response = await front.chat(n=3, stream=True)
    assert response.status_code == 200
    *_, last, rest = response.text.split("\n\n")
    assert (last.startswith('data: {"error"'), rest) == (True, "")
    assert '"finish_reason":"' not in response.text
    assert sorted(reason for reason, _, _ in front.metrics.finished) == ["abort", "abort", "error"]
    front.generator.assert_no_leaks()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_at_every_step_of_the_loop_releases_every_choice_once(stream: bool) -> None:
    num_steps = 0
    was_running = True
    while was_running:
        front = make_front(Script(token_ids=[*ids_of("one two three"), EOS], is_release_slow=True))
        client = RawClient(front.app, "/v1/completions", {**COMPLETION, "prompt": ["a", "b"], "n": 2, "stream": stream})
        for _ in range(num_steps):
            await asyncio.sleep(0)
        was_running = not client.task.done()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        front.generator.assert_no_leaks()
        num_steps += 1
    assert num_steps > 5


async def test_cancelling_releases_every_choice() -> None:
    front = make_front(Script(token_ids=ids_of("one two three"), hangs_after=2, is_release_slow=True))
    client = RawClient(front.app, "/v1/chat/completions", {**CHAT, "n": 3, "stream": True})
    await client.wait_for_messages(5)
    client.task.cancel()
    await asyncio.wait((client.task,), timeout=5)
    for _ in range(10):
        await asyncio.sleep(0)
    front.generator.assert_no_leaks()

"""The client leaves, or the server cancels, at every moment of a request: both workers are always released, once."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.router.front import CHAT, Front, RawClient, ids_of, make_front
from tests.unit.router.scripted_generator import Script

TOKENS = ids_of("one two three four")


async def settle(num_turns: int = 10) -> None:
    """Let the loop run, some turns: nothing in these tests waits for a real clock."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_release_slow", [True, False])
@pytest.mark.parametrize("num_tokens", range(len(TOKENS) + 1))
async def test_leaving_after_any_token(stream: bool, is_release_slow: bool, num_tokens: int) -> None:
    # 1. An answer stands still after some tokens.
    front = make_front(Script(token_ids=[*TOKENS, 17], hangs_after=num_tokens, is_release_slow=is_release_slow))
    client = RawClient(front.app, "/v1/chat/completions", {**CHAT, "stream": stream})
    await settle(100)
    assert front.generator.generations[0].num_taken == num_tokens
    # 2. The client leaves, and the request ends without waiting for the answer.
    client.leave()
    await asyncio.wait_for(client.task, 5)
    # 3. Nothing more was sent, and nothing is held.
    assert (client.sent == []) == (not stream or num_tokens == 0)
    assert all(b"[DONE]" not in message.get("body", b"") for message in client.sent)
    assert front.metrics.finished[0][0] == "abort"
    assert front.metrics.finished[0][2] == num_tokens
    front.generator.assert_no_leaks()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_waiting_for_a_place(stream: bool) -> None:
    front = make_front(Script(hangs_in_start=True))
    client = RawClient(front.app, "/v1/chat/completions", {**CHAT, "stream": stream})
    await settle(100)
    assert front.generator.num_starting == 1
    client.leave()
    await asyncio.wait_for(client.task, 5)
    assert client.sent == []
    assert front.metrics.finished == [], "it never started"
    front.generator.assert_no_leaks()


async def test_leaving_before_the_body_is_complete() -> None:
    front = make_front()
    client = RawClient(front.app, "/v1/chat/completions", CHAT)
    client._inbox.get_nowait()
    client.leave()
    await asyncio.wait_for(client.task, 5)
    assert client.sent == []
    assert front.generator.requests == []


async def cancelled_after(front: Front, num_steps: int, stream: bool) -> bool:
    """Cancel the request's task after some turns of the loop; says whether it was still running."""
    client = RawClient(front.app, "/v1/chat/completions", {**CHAT, "stream": stream})
    for _ in range(num_steps):
        await asyncio.sleep(0)
    was_running = client.task.cancel()
    await asyncio.wait((client.task,), timeout=5)
    assert client.task.done()
    await settle()
    return was_running


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_at_every_step_of_the_loop_releases_once(stream: bool) -> None:
    num_steps = 0
    was_running = True
    while was_running:
        front = make_front(Script(token_ids=[*TOKENS, 2], is_release_slow=True))
        was_running = await cancelled_after(front, num_steps, stream)
        front.generator.assert_no_leaks()
        num_steps += 1
    assert num_steps > len(TOKENS)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_at_every_step_of_the_loop_releases_once(stream: bool) -> None:
    num_steps = 0
    was_running = True
    while was_running:
        front = make_front(Script(token_ids=[*TOKENS, 2], is_release_slow=True))
        client = RawClient(front.app, "/v1/chat/completions", {**CHAT, "stream": stream})
        for _ in range(num_steps):
            await asyncio.sleep(0)
        was_running = not client.task.done()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        front.generator.assert_no_leaks()
        num_steps += 1
    assert num_steps > len(TOKENS)


async def test_a_neighbour_is_not_disturbed() -> None:
    front = make_front(Script(token_ids=[*TOKENS, 2]))
    leaving = RawClient(front.app, "/v1/chat/completions", {**CHAT, "stream": True})
    staying = RawClient(front.app, "/v1/chat/completions", {**CHAT, "stream": True})
    await leaving.wait_for_messages(2)
    leaving.leave()
    await asyncio.wait_for(leaving.task, 5)
    await asyncio.wait_for(staying.task, 5)
    assert staying.sent[-1]["body"] == b"data: [DONE]\n\n"
    front.generator.assert_no_leaks()

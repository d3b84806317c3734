"""Requests at and beyond the edges: the right answer, or a 400 that names the parameter, and the next request works."""

from __future__ import annotations

import json
import random
import socket
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from router.chat_template import ChatMessage, read_chat_template
from router.request_body import MAX_BODY_BYTES
from tests.e2e.conftest import WINDOW
from tests.e2e.server_process import MODEL, TOKEN, ServerProcess, read_pages
from tests.e2e.streams import completion_body
from twinpool.model_source import find_model

pytestmark = pytest.mark.e2e

PAGE = 16


def complete(server: ServerProcess, prompt: str, **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=completion_body(prompt, **options), timeout=120)


def prompt_of(server: ServerProcess, num_tokens: int) -> str:
    """A prompt of exactly ``num_tokens`` tokens."""
    prompt = "x" + " x" * (num_tokens - 1)
    answer = complete(server, prompt, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == num_tokens
    return prompt


def assert_still_works(server: ServerProcess) -> None:
    answer = complete(server, "Hello", max_tokens=4)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1


def assert_refused(answer: httpx.Response, param: str) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert "Traceback" not in error["message"]
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"seed": -(2**70)}, "seed"),
        ({"seed": "seven"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
    ],
)
def test_a_wrong_parameter_is_named(server: ServerProcess, options: dict[str, Any], param: str) -> None:
    options = {"max_tokens": 4} | options
    assert_refused(complete(server, options.pop("prompt", "Hello"), **options), param)
    assert_still_works(server)


@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"', b"\xff\xfe", b""])
def test_a_body_that_is_no_object_is_refused(server: ServerProcess, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert_still_works(server)


def send_raw(host: str | None, port: int | None, sent: bytes) -> bytes:
    """All that is answered until the connection ends, whichever way."""
    assert host is not None
    assert port is not None
    answer = bytearray()
    with socket.create_connection((host, port), timeout=10) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(65536):
                answer += received
        except ConnectionError:  # cut off while there was more to send
            pass
    return bytes(answer)


@pytest.mark.parametrize(
    "sent",
    [
        b"no request\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
def test_what_is_no_http_is_refused_like_everything_else(server: ServerProcess, sent: bytes) -> None:
    url = urlsplit(server.url)
    head, _, body = send_raw(url.hostname, url.port, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert (set(error), error["code"]) == ({"message", "type", "param", "code"}, "invalid_http")
    assert_still_works(server)


def test_a_body_beyond_the_bound_is_refused(server: ServerProcess) -> None:
    for content in (b" " * (MAX_BODY_BYTES + 1), (b" " * 2**20 for _ in range(9))):
        answer = httpx.post(f"{server.url}/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == f"The request's body is larger than {MAX_BODY_BYTES} bytes."
    assert_still_works(server)


def test_noise_at_the_ports_of_the_workers_leaves_no_traceback(server: ServerProcess) -> None:
    numbers, begins_at = random.Random(7), server.log.stat().st_size
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for worker in server.workers().values():
        host, _, port = worker["address"].rpartition(":")
        for prefix in (b"", preface, preface + b"\0\0\0\4\0\0\0\0\0"):
            for _ in range(5):
                send_raw(host, int(port), prefix + numbers.randbytes(numbers.randrange(1, 2000)))
        with grpc.insecure_channel(worker["address"]) as channel:
            for method in ("Worker/GetPages", f"{worker['role'].capitalize()}/Release"):
                call: Any = channel.unary_unary(f"/twinpool.v1.{method}")
                for metadata, code in ((TOKEN.metadata, "INVALID_ARGUMENT"), ((), "UNAUTHENTICATED")):
                    with pytest.raises(grpc.RpcError) as error:
                        call(b"\xff" * 16, timeout=10, metadata=metadata)
                    assert error.value.code().name == code
        assert read_pages(worker["address"]).is_sum_ok
    assert_still_works(server)
    with server.log.open("rb") as log:
        log.seek(begins_at)
        assert b"Traceback" not in log.read()


def test_chat_without_messages_is_refused(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "messages": []})
    assert_refused(answer, "messages")


def test_an_unknown_model_and_path(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "gpt-17", "prompt": "Hello"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
    answer = httpx.get(f"{server.url}/v2/nothing")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405


def test_one_token(server: ServerProcess) -> None:
    answer = complete(server, "Hello", max_tokens=1).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_first_token_ends_it(server: ServerProcess) -> None:
    # 1. an answer that the model ends by itself
    question = {"role": "user", "content": "What is the capital of France?"}
    chat = {"model": MODEL, "messages": [question], "temperature": 0, "max_tokens": 64}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    # 2. given that answer already, the first token is the end
    template = read_chat_template(find_model(MODEL).path)
    prompt = template.render([ChatMessage(role=question["role"], content=question["content"])])
    ended = complete(server, prompt + answer["choices"][0]["message"]["content"], max_tokens=64).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["text"] == ""
    assert ended["usage"]["completion_tokens"] == 1
    # 3. the next one is served as ever
    assert_still_works(server)


@pytest.mark.parametrize("num_tokens", [1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE])
def test_prompts_around_page_edges(server: ServerProcess, num_tokens: int) -> None:
    prompt = prompt_of(server, num_tokens)
    answer = complete(server, prompt, max_tokens=PAGE + 1, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == PAGE + 1


def test_around_the_context_limit(server: ServerProcess) -> None:
    num_prompt = WINDOW - PAGE
    prompt = prompt_of(server, num_prompt)
    for num_answer in (PAGE - 1, PAGE):
        answer = complete(server, prompt, max_tokens=num_answer, ignore_eos=True).json()
        assert answer["usage"]["completion_tokens"] == num_answer
        assert answer["choices"][0]["finish_reason"] == "length"
    # one beyond
    message = assert_refused(complete(server, prompt, max_tokens=PAGE + 1), "max_tokens")
    for number in (WINDOW, num_prompt, PAGE + 1):
        assert str(number) in message
    # without max_tokens: what is left
    answer = complete(server, prompt, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == PAGE
    # a prompt that leaves no room
    assert_refused(complete(server, "x" + " x" * (WINDOW - 1), max_tokens=1), "prompt")
    assert complete(server, "x" + " x" * (8 * WINDOW)).status_code == 400
    assert_still_works(server)


def test_headers_and_paths(server: ServerProcess) -> None:
    answer = complete(server, "Hello", max_tokens=2)
    assert answer.headers["x-twinpool-path"] == "pair"
    assert answer.headers["x-twinpool-reason"]
    assert answer.headers["x-request-id"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=completion_body("Hi", stream=True, max_tokens=2)) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_admin_shapes(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    workers = server.workers()
    assert {worker["role"] for worker in workers.values()} == {"prefill", "decode"}
    assert all(worker["state"] == "ready" for worker in workers.values())
    assert len({worker["incarnation"] for worker in workers.values()}) == 2
    for states in server.page_states().values():
        assert states is not None
        assert set(states) == {"free", "used", "cached", "reserved", "filling", "sending", "quarantined"}

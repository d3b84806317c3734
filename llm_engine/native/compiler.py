"""The machine's C++ compilers, and how the native kernels are compiled with one."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from pathlib import Path

from llm_engine.native.build_folder import BuildFolder

COMPILER_NAMES = ("c++", "g++", "clang++")
BUILD_KEY = "twinpool_build_key"
"""The symbol under which a library has the key it was built for, a string."""

_FOLDER = Path(__file__).parent
# The flags name all that the kernels use of the processor, so what is built runs, with the same bits, on all that have it.
# Products and sums are joined only where the source says so, which keeps results from depending on the compiler's mood.
_COMPILE_FLAGS = (
    *("-std=c++17", "-O3", "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    *("-ffp-contract=off", "-fPIC", "-fopenmp", "-w", "-c"),
)
_LINK_FLAGS = ("-shared", "-Wl,-z,defs")
_TIMEOUT_S = 60.0
"""Of one file: an idle core takes up to seven seconds."""


def compilers() -> list[list[str]]:
    """The commands to try, in order. Raises ValueError for a ``CXX`` that is no command."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return [chosen]
    return [[path] for name in COMPILER_NAMES if (path := shutil.which(name)) is not None]


def build_key(compiler: list[str], runtime: Path) -> str:
    """Changes with everything that the library's content depends on. A compiler is known by its file, so that one that hangs
    cannot stop a start that has no need of it."""
    digest = hashlib.sha256()
    for part in (str(runtime), *compiler, *_COMPILE_FLAGS, *_LINK_FLAGS):
        digest.update(f"{part}\0".encode(errors="surrogateescape"))
    for word in compiler:
        if (path := shutil.which(word)) is not None:
            file = os.stat(path)
            digest.update(f"{os.path.realpath(path)} {file.st_size} {file.st_mtime_ns}\0".encode(errors="surrogateescape"))
    for source in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def build(compiler: list[str], runtime: Path, folder: BuildFolder, name: str, key: str) -> Path:
    """Compile the kernels as ``name``, linked with the OpenMP ``runtime``. Raises BuildFailed and OSError."""
    sources = sorted(_FOLDER.glob("*.cpp"))
    for source in sources:
        folder.run([*compiler, *_COMPILE_FLAGS, f'-DTWINPOOL_BUILD_KEY="{key}"', str(source)], timeout_s=_TIMEOUT_S)
    objects = [source.with_suffix(".o").name for source in sources]
    folder.run([*compiler, *_LINK_FLAGS, "-o", name, *objects, str(runtime)], timeout_s=_TIMEOUT_S)
    return folder.path / name

"""The machine's C++ compiler, and what it made of the native kernels, kept for the next start."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent
# The flags name all that the kernels use of the processor, so what is built runs, with the same bits, on all that have it.
# Products and sums are joined only where the source says so, which keeps results from depending on the compiler's mood.
_COMPILE_FLAGS = (
    *("-std=c++17", "-O3", "-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    *("-ffp-contract=off", "-fPIC", "-fopenmp", "-w", "-c"),
)
_LINK_FLAGS = ("-shared", "-Wl,-z,defs")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 120


class CannotBuild(Exception):
    """The kernels cannot be compiled, linked or loaded; the text says why, in one line."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Kernels:
    """One shared library, loaded twice: its functions keep Python's global lock while they run, or release it."""

    holding: ctypes.PyDLL
    releasing: ctypes.CDLL

    @classmethod
    def load(cls, path: Path) -> Kernels:
        return cls(holding=ctypes.PyDLL(str(path)), releasing=ctypes.CDLL(str(path)))


def open_kernels() -> Kernels:
    """The kernels as an earlier process built them, or built now, in a few seconds.

    They are linked with the OpenMP runtime that this process has loaded already, so that ``torch.set_num_threads`` rules their
    threads, too. Any number of processes may build at once. Raises CannotBuild.
    """
    runtime = _openmp_runtime()
    reasons = []
    for compiler in _compilers():
        try:
            return _open(compiler, runtime)
        except (CannotBuild, OSError) as error:
            reasons.append(f"{shlex.join(compiler)}: {error}")
    raise CannotBuild("; ".join(reasons) or f"there is no C++ compiler ({', '.join(_COMPILERS)})")


def _open(compiler: list[str], runtime: Path) -> Kernels:
    cached = _cache_folder() / f"kernels-{_key(compiler, runtime)}.so"
    if cached.exists():
        with suppress(OSError):  # no library, whoever put it there: it is built again
            return Kernels.load(cached)
    with _build_folder() as folder:
        _build(compiler, runtime, folder, cached.name)
        kernels = Kernels.load(Path(folder, cached.name))
        # Only what loads is kept. It is moved whole, and written out before: no process ever finds half a library, which
        # might load and then crash.
        with suppress(OSError), open(Path(folder, cached.name), "rb") as built:
            os.fsync(built.fileno())
            os.replace(built.name, cached)
        return kernels


def _build_folder() -> tempfile.TemporaryDirectory[str]:
    """Beside the place where the library is kept, if that can be written."""
    try:
        _cache_folder().mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=_cache_folder(), prefix="build-")
    except OSError:
        return tempfile.TemporaryDirectory()


def _compilers() -> list[list[str]]:
    """The commands to try, in order."""
    chosen = os.environ.get("CXX")
    if chosen:
        return [shlex.split(chosen)]
    return [[path] for name in _COMPILERS if (path := shutil.which(name)) is not None]


def _openmp_runtime() -> Path:
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if re.match(r"lib(gomp|iomp5|omp)\b.*\.so", path.rpartition("/")[2]):
                return Path("/", path)
    raise CannotBuild("torch has loaded no OpenMP runtime")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinpool"


def _key(compiler: list[str], runtime: Path) -> str:
    """Changes with everything that the library's content depends on."""
    digest = hashlib.sha256()
    for part in (_run([*compiler, "--version"]), str(runtime), *compiler, *_COMPILE_FLAGS, *_LINK_FLAGS):
        digest.update(f"{part}\0".encode())
    for source in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(compiler: list[str], runtime: Path, folder: str, name: str) -> None:
    sources = sorted(_FOLDER.glob("*.cpp"))
    _run([*compiler, *_COMPILE_FLAGS, *map(str, sources)], folder)
    objects = [source.with_suffix(".o").name for source in sources]
    _run([*compiler, *_LINK_FLAGS, "-o", name, *objects, str(runtime)], folder)


def _run(command: list[str], folder: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, check=False, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"it took longer than {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CannotBuild(f"status {done.returncode}{''.join(f', {line.strip()}' for line in lines[:1])}")
    return done.stdout

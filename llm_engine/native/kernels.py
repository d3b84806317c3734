"""The native kernels as a shared library: compiled on the machine that runs them, kept for the next start, and checked."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llm_engine.native.build_folder import BuildFailed, BuildFolder
from llm_engine.native.compiler import BUILD_KEY, COMPILER_NAMES, build, build_key, compilers
from serving_core.cache_folder import cache_folder
from serving_core.cpu_features import has_avx512_bfloat16

_log = logging.getLogger(__name__)
_OPENMP_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")
_DIGEST_BYTES = hashlib.sha256().digest_size


class NoKernels(Exception):
    """They do not run here. The text says why, in one line: what one says of them, like "cannot be built (…)"."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Kernels:
    """One shared library, loaded twice: its functions keep Python's global lock while they run, or release it."""

    holding: ctypes.PyDLL
    releasing: ctypes.CDLL

    @classmethod
    def load(cls, path: Path, key: str) -> Kernels:
        """Raises BuildFailed for a file that is not the library of this key, and OSError for one that is none."""
        kernels = cls(holding=ctypes.PyDLL(str(path)), releasing=ctypes.CDLL(str(path)))
        try:
            found = (ctypes.c_char * (len(key) + 1)).in_dll(kernels.holding, BUILD_KEY).value
        except ValueError:
            found = b""
        if found != key.encode():
            raise BuildFailed("it made a library without the kernels")
        return kernels


def why_no_kernels() -> str | None:
    """What ``open_kernels`` fails with on this machine, or None. It needs no torch in this process."""
    try:
        open_kernels()
    except NoKernels as error:
        return str(error)
    return None


def open_kernels() -> Kernels:
    """The kernels as an earlier process built them, or built now, in about ten seconds.

    They are linked with the OpenMP runtime of torch, so that ``torch.set_num_threads`` rules their threads, too. Any number of
    processes may build at once. Raises NoKernels.
    """
    if not has_avx512_bfloat16():
        raise NoKernels("need a processor with AVX-512 BF16")
    runtime = _openmp_runtime()
    try:
        commands = compilers()
    except ValueError as error:
        raise NoKernels(f"cannot be built (CXX is {os.environ['CXX']!r}: {error})") from None
    reasons: list[str] = []
    for command in commands:
        try:
            return _open(command, runtime)
        except (BuildFailed, OSError) as error:
            reasons.append(f"{shlex.join(command)}: {error}")
    if not commands:
        reasons.append(f"there is no C++ compiler, {' or '.join(COMPILER_NAMES)}")
    raise NoKernels(f"cannot be built ({'; '.join(reasons)})")


def _open(compiler: list[str], runtime: Path) -> Kernels:
    key = build_key(compiler, runtime)
    cached = _cache_root() / f"kernels-{key}.so"
    if _is_whole(cached):
        with suppress(BuildFailed, OSError):  # no library, whoever put it there: it is built again
            return Kernels.load(cached, key)
    with _build_folder() as folder:
        _log.info("Compiling the native kernels with %s, once: it takes about ten seconds.", shlex.join(compiler))
        built = build(compiler, runtime, folder, cached.name, key)
        _seal(built)
        kernels = Kernels.load(built, key)
        with suppress(OSError):  # only what loads is kept; moved as a whole, so that no process finds half of it
            os.replace(built, cached)
        return kernels


def _seal(library: Path) -> None:
    """Put its digest behind it, where no loader looks, and write it to disk. Half a library would crash whoever loads it."""
    with library.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _build_folder() -> BuildFolder:
    """Beside the place where the library is kept, if there is room."""
    try:
        return BuildFolder(_cache_root())
    except OSError:
        return BuildFolder(Path(tempfile.gettempdir()))


def _cache_root() -> Path:
    try:
        return cache_folder()
    except RuntimeError as error:
        raise BuildFailed(f"there is no place to keep them: {error}") from None


def _openmp_runtime() -> Path:
    """The one that this process has loaded. Where torch is yet to come, its own is loaded here."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if _OPENMP_RUNTIME.match(path.rpartition("/")[2]):
                return Path("/", path)
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        for own in sorted(Path(torch.origin).parent.resolve().glob("lib/lib*omp*.so*")):
            if _OPENMP_RUNTIME.match(own.name):
                with suppress(OSError):
                    ctypes.CDLL(str(own))
                    return own
    raise NoKernels("find no OpenMP runtime, which torch should have")

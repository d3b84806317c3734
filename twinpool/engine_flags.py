"""The flags that shape one worker's engine. Each exists three times: for both phases, for prefill alone, for decode alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving_core.cpu_features import has_bfloat16
from serving_core.engine_config import (
    DEFAULT_QUANTIZATIONS,
    MAX_KV_CACHE_BYTES,
    MAX_MODEL_LEN,
    MIN_MODEL_LEN,
    Quantization,
)
from serving_core.errors import ConfigError
from serving_core.kv_page_layout import WEIGHT_DTYPES, KVDType
from serving_core.worker_status import PhaseName
from twinpool.byte_size import format_byte_size, parse_byte_size

MAX_BLOCK_SIZE = 256
MAX_THREADS = 1024
MAX_STEP_TOKENS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """One phase's engine as asked for. None: to be derived, from the model (``max_model_len``), the cores (``threads``) or
    what attends on the worker's device (``block_size``). ``quantization_flag`` is the flag that asked for it."""

    dtype: KVDType
    quantization: Quantization
    quantization_flag: str
    enforce_eager: bool
    enable_prefix_caching: bool
    async_scheduling: bool
    kv_cache_dtype: KVDType
    block_size: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    threads: int | None


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    parse: Callable[[str], Any]
    default: Any
    smallest: int
    largest: int
    text: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class _Switch:
    """On unless ``--no-NAME`` is given."""

    name: str
    text: str
    text_off: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


_FLAGS = (
    _Flag("block-size", int, None, 1, MAX_BLOCK_SIZE, "tokens in one KV page (default: 16; on CUDA what its attention reads)"),
    _Flag(
        "max-model-len",
        int,
        None,
        MIN_MODEL_LEN,
        MAX_MODEL_LEN,
        "longest prompt and answer together (default: the model's window)",
    ),
    _Flag("max-num-seqs", int, 64, 1, 4096, "sequences in one step"),
    _Flag("max-num-batched-tokens", int, 512, 1, MAX_STEP_TOKENS, "prompt tokens in one prefill step"),
    _Flag("kv-cache-memory-bytes", parse_byte_size, 2**30, 1, MAX_KV_CACHE_BYTES, "KV cache size, like 512MiB or 1G"),
    _Flag("threads", int, None, 1, MAX_THREADS, "threads of the engine's kernels (default: from the number of cores)"),
)
_SWITCHES = (
    _Switch(
        "enable-prefix-caching",
        "keep pages of prompts and answers for prompts that begin alike (default)",
        "keep none",
    ),
    _Switch(
        "async-scheduling",
        "on GPUs, begin a decode step before the host knows the tokens of the one before (default)",
        "wait for them first",
    ),
)
_DTYPES = ("auto", *(dtype.value for dtype in WEIGHT_DTYPES))
_KV_CACHE_DTYPES = ("auto", *(dtype.value for dtype in (KVDType.FLOAT16, KVDType.BFLOAT16, KVDType.INT8, KVDType.FP8)))


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every engine flag with its two overrides."""
    group = parser.add_argument_group("engine", "each also as --prefill-… and --decode-…, for one phase alone")
    for prefix in ("", "prefill-", "decode-"):
        is_listed = not prefix
        dtype_help = "auto: bfloat16 on GPUs and on processors that have it, else float32"
        group.add_argument(f"--{prefix}dtype", choices=_DTYPES, help=dtype_help if is_listed else argparse.SUPPRESS)
        form_help = "form of the weights; auto: as they are stored (default: none for prefill, auto for decode)"
        group.add_argument(
            f"--{prefix}quantization",
            choices=[quantization.value for quantization in Quantization],
            help=form_help if is_listed else argparse.SUPPRESS,
        )
        group.add_argument(
            f"--{prefix}kv-cache-dtype",
            choices=_KV_CACHE_DTYPES,
            help="type of keys and values in the KV cache; auto: --dtype; fp8 on GPUs alone"
            if is_listed
            else argparse.SUPPRESS,
        )
        eager_help = "compute with torch's own operators, one by one: no native kernels, no CUDA graphs"
        group.add_argument(f"--{prefix}enforce-eager", action="store_true", help=eager_help if is_listed else argparse.SUPPRESS)
        for switch in _SWITCHES:
            _add_switch(group, prefix, switch)
        for flag in _FLAGS:
            text = _help_of(flag) if is_listed else argparse.SUPPRESS
            group.add_argument(f"--{prefix}{flag.name}", type=_parser_of(flag), metavar="N", help=text)


def _add_switch(group: argparse._ArgumentGroup, prefix: str, switch: _Switch) -> None:
    for no, text in (("", switch.text), ("no-", switch.text_off)):
        group.add_argument(
            f"--{prefix}{no}{switch.name}",
            dest=f"{prefix.replace('-', '_')}{switch.field}",
            action="store_false" if no else "store_true",
            default=None,
            help=argparse.SUPPRESS if prefix else text,
        )


def engine_flags_of(flags: argparse.Namespace, phase: PhaseName, *, has_gpu: bool) -> EngineFlags:
    """What was asked for ``phase``: its own flag, else the common one, else the default. ``has_gpu``: workers compute on GPUs.

    Raises ``ConfigError`` for a value outside what can work.
    """
    values = {flag.field: _value_of(flags, phase, flag) for flag in _FLAGS}
    dtype = getattr(flags, f"{phase.value}_dtype") or flags.dtype or "auto"
    if dtype == "auto":
        dtype = KVDType.BFLOAT16.value if has_gpu or has_bfloat16() else KVDType.FLOAT32.value
    own_quantization = getattr(flags, f"{phase.value}_quantization")
    quantization = own_quantization or flags.quantization or DEFAULT_QUANTIZATIONS[phase]
    return EngineFlags(
        dtype=KVDType(dtype),
        quantization=Quantization(quantization),
        quantization_flag=f"--{phase.value}-quantization" if own_quantization else "--quantization",
        enforce_eager=getattr(flags, f"{phase.value}_enforce_eager") or flags.enforce_eager,
        **{switch.field: _is_on(flags, phase, switch) for switch in _SWITCHES},
        kv_cache_dtype=_kv_cache_dtype(flags, phase, KVDType(dtype), has_gpu=has_gpu),
        **values,
    )


def _is_on(flags: argparse.Namespace, phase: PhaseName, switch: _Switch) -> bool:
    own: bool | None = getattr(flags, f"{phase.value}_{switch.field}")
    common: bool | None = getattr(flags, switch.field)
    return next((wish for wish in (own, common) if wish is not None), True)


def _kv_cache_dtype(flags: argparse.Namespace, phase: PhaseName, dtype: KVDType, *, has_gpu: bool) -> KVDType:
    asked = getattr(flags, f"{phase.value}_kv_cache_dtype") or flags.kv_cache_dtype or "auto"
    if asked == KVDType.FP8.value and not has_gpu:
        raise ConfigError("--kv-cache-dtype is fp8, which is for GPUs, and workers compute on CPUs: give int8")
    return dtype if asked == "auto" else KVDType(asked)


def _value_of(flags: argparse.Namespace, phase: PhaseName, flag: _Flag) -> Any:
    name, value = f"--{phase.value}-{flag.name}", getattr(flags, f"{phase.value}_{flag.field}")
    if value is None:
        name, value = f"--{flag.name}", getattr(flags, flag.field)
    if value is None:
        return flag.default
    if not flag.smallest <= value <= flag.largest:
        raise ConfigError(f"{name} is {value}, but must be between {flag.smallest} and {flag.largest}")
    return value


def _parser_of(flag: _Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return flag.parse(text)
        except ValueError as error:
            reason = str(error) if flag.parse is parse_byte_size else f"{text!r} is no whole number"
            raise argparse.ArgumentTypeError(reason) from error

    return parse


def _help_of(flag: _Flag) -> str:
    if flag.default is None:
        return flag.text
    default = format_byte_size(flag.default) if flag.parse is parse_byte_size else flag.default
    return f"{flag.text} (default: {default})"

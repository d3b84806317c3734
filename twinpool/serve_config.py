"""What ``twinpool serve`` was asked to do, checked as far as possible without reading the model."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from serving_core.errors import ConfigError
from serving_core.kv_page_layout import KVDType, as_word
from serving_core.transfer_ticket import MAX_LEASE_S
from serving_core.worker_status import PhaseName
from twinpool.cluster import AUTO, LOCAL
from twinpool.engine_flags import EngineFlags, engine_flags_of
from twinpool.local_gpus import num_local_gpus
from twinpool.model_source import ModelSource, find_model
from twinpool.transfer_way import TransferWay

MAX_WORKERS = 64
MIN_LEASE_S = 1.0
MAX_WORKER_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """One server. With ``is_colocated`` there is one worker with both phases and both worker counts are 0. ``address`` is the
    Ray cluster's: ``local``, ``auto`` or HOST:PORT. ``num_gpus`` is of this machine, as torch can use them.
    ``trusts_fabric``: see ``fabric``. ``warm_prompts`` are files (see ``router.warm_prompts``)."""

    model: ModelSource
    served_model_name: str
    prefill: EngineFlags
    decode: EngineFlags
    is_colocated: bool
    num_prefill_workers: int
    num_decode_workers: int
    host: str
    port: int
    api_key: str | None
    admin_key: str | None
    lease_s: float
    worker_wait_s: float
    address: str
    num_gpus: int
    transfer: TransferWay = TransferWay.AUTO
    trusts_fabric: bool = False
    warm_prompts: tuple[Path, ...] = ()

    @property
    def is_on_gpus(self) -> bool:
        """Whether workers compute on this machine's GPUs. What nodes that others run have is not known."""
        return self.address == LOCAL and self.num_gpus > 0

    def flags_of(self, phase: PhaseName) -> EngineFlags:
        """The phase's own."""
        return self.prefill if phase is PhaseName.PREFILL else self.decode

    def max_model_len(self, model_window: int) -> int:
        """The smallest window of the workers."""
        return min(flags.max_model_len or model_window for flags in (self.prefill, self.decode))

    def without_kernels(self) -> ServeConfig:
        """The same for a machine where the native kernels do not run: no worker, however often it starts, looks for them."""
        prefill, decode = (dataclasses.replace(flags, enforce_eager=True) for flags in (self.prefill, self.decode))
        return dataclasses.replace(self, prefill=prefill, decode=decode)


def make_serve_config(flags: argparse.Namespace) -> ServeConfig:
    """Read the parsed flags. Raises ``ConfigError`` with the flag, its value and what would be right."""
    num_gpus = num_local_gpus()
    prefill, decode = (engine_flags_of(flags, phase, has_gpu=num_gpus > 0) for phase in (PhaseName.PREFILL, PhaseName.DECODE))
    num_prefill, num_decode = _worker_counts(flags)
    _check_phases_agree(prefill, decode, is_colocated=flags.colocated)
    transfer = _transfer(flags.transfer)
    _check_range("--port", flags.port, 0, 65535)
    _check_range("--lease-seconds", flags.lease_seconds, MIN_LEASE_S, MAX_LEASE_S)
    _check_range("--worker-wait", flags.worker_wait, 0, MAX_WORKER_WAIT_S)
    for name in ("served_model_name", "api_key", "admin_key", "host"):
        if getattr(flags, name) is not None and not getattr(flags, name).strip():
            raise ConfigError(f"--{name.replace('_', '-')} is empty: give it a value or leave it out")
    if flags.warm_prompt and not prefill.enable_prefix_caching:
        raise ConfigError("--warm-prompt needs the prefix cache of prefill: drop it, or what switches prefix caching off")
    model = find_model(flags.model)
    return ServeConfig(
        model=model,
        served_model_name=flags.served_model_name or model.name,
        prefill=prefill,
        decode=decode,
        is_colocated=flags.colocated,
        num_prefill_workers=num_prefill,
        num_decode_workers=num_decode,
        host=flags.host,
        port=flags.port,
        api_key=flags.api_key,
        admin_key=flags.admin_key,
        lease_s=flags.lease_seconds,
        worker_wait_s=flags.worker_wait,
        address=_address(flags.address),
        num_gpus=num_gpus,
        transfer=transfer,
        trusts_fabric=flags.trust_fabric,
        warm_prompts=tuple(map(Path, flags.warm_prompt)),
    )


def _worker_counts(flags: argparse.Namespace) -> tuple[int, int]:
    counts = {"--prefill-workers": flags.prefill_workers, "--decode-workers": flags.decode_workers}
    given = [name for name, count in counts.items() if count is not None]
    if flags.colocated:
        if given:
            raise ConfigError(
                f"--colocated means one worker with both phases, so {given[0]} cannot go with it: drop one of them"
            )
        return 0, 0
    for name in given:
        _check_range(name, counts[name], 1, MAX_WORKERS)
    return flags.prefill_workers or 1, flags.decode_workers or 1


def _check_phases_agree(prefill: EngineFlags, decode: EngineFlags, *, is_colocated: bool) -> None:
    """A transfer plan covers pages of another size, not of another type; one colocated worker has one engine for both."""
    fields: tuple[str, ...] = ("dtype", "kv_cache_dtype")
    if is_colocated:
        # one step budget, one form of the weights and its kernels belong to each phase, so these may differ even there
        per_phase = ("quantization", "quantization_flag", "enforce_eager", "max_num_seqs", "max_num_batched_tokens")
        fields = tuple(field.name for field in dataclasses.fields(EngineFlags) if field.name not in per_phase)
    for field in fields:
        if getattr(prefill, field) != getattr(decode, field):
            name = field.replace("_", "-")
            values = f"{_word(getattr(prefill, field))} and {_word(getattr(decode, field))}"
            why = (
                "with --colocated both phases share one engine"
                if is_colocated
                else "keys and values are handed over as they are"
            )
            raise ConfigError(f"--prefill-{name} and --decode-{name} differ, {values}, but {why}: give both the same value")


def _word(value: KVDType | int | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "the default" if value is None else as_word(value)


def _transfer(transfer: str) -> TransferWay:
    if transfer not in tuple(TransferWay):
        raise ConfigError(f"--transfer {transfer!r} is unknown: use {' or '.join(TransferWay)}")
    return TransferWay(transfer)


def _address(address: str) -> str:
    if address in (LOCAL, AUTO):
        return address
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isdecimal() and 0 < int(port) <= 65535):
        raise ConfigError(f"--address is {address!r}, but must be {LOCAL}, {AUTO} or HOST:PORT of a Ray cluster")
    return address


def _check_range(name: str, value: float, smallest: float, largest: float) -> None:
    if not (smallest <= value <= largest and math.isfinite(value)):
        raise ConfigError(f"{name} is {value}, but must be between {smallest:g} and {largest:g}")

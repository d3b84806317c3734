"""A slow link on one machine: the loopback of a network namespace of our own, on which what goes to one TCP port is held to a
rate by the kernel's token bucket. Everything else there stays as fast as it is. Linux only, and for root.

Whatever is started after ``enter`` is in the namespace too. The kernel removes it with the last process in it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

_CLONE_NEWNET = 0x40000000  # from <linux/sched.h>
_BURST_BYTES = 128 << 10
"""Above the longest packet on loopback, 64 KiB, and short beside the segments of a hand-off."""
_QUEUE_BYTES = 64 << 20
"""Above all that a sender may have under way, so that nothing is dropped."""


def enter() -> None:
    """Move this thread, and with it what it starts from now on, into a namespace with nothing but loopback. Raises
    ``SystemExit`` with the reason where that cannot be had."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"a link of a chosen speed takes {' and '.join(missing)}, from the package iproute2")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise SystemExit(f"a link of a chosen speed takes a network namespace, and root for it: {reason}")
    _run("ip link set lo up")


def limit(port: int, bytes_per_s: float | None) -> None:
    """Hold what goes to ``port`` over IPv4 to this rate, headers included; to none without one. In place of any earlier
    limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)  # fails where there is none
    if bytes_per_s is None:
        return
    _run("tc qdisc add dev lo root handle 1: htb default 1 r2q 10000")
    for number in (1, 2):  # everything, and the slow port
        _run(f"tc class add dev lo parent 1: classid 1:{number} htb rate 100gbit quantum 100000")
    _run(f"tc filter add dev lo parent 1: protocol ip prio 1 u32 match ip dport {port} 0xffff flowid 1:2")
    bucket = f"rate {round(8 * bytes_per_s)}bit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
    _run(f"tc qdisc add dev lo parent 1:2 handle 2: tbf {bucket}")


def _run(command: str) -> None:
    answer = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if answer.returncode != 0:
        raise SystemExit(f"{command}: {answer.stderr.strip()}")

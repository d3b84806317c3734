"""Nodes in network namespaces of their own, with a link between each two that can be cut, stalled and slowed.

Needs Linux, root, iproute2 and util-linux. A namespace lives as long as the process that keeps it, which ends with the test's,
even when that is killed: nothing has to be removed afterwards.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from types import TracebackType

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_PROBE = "ip link add probe0 type veth peer name probe1 && tc qdisc add dev probe0 root tbf rate 1mbit burst 16kb latency 100ms"
_CLONE_NEWNET = 0x40000000  # from <linux/sched.h>


@cache
def why_no_network() -> str:
    """Why there can be none on this machine; empty when there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"links with faults need {' and '.join(missing)}: install iproute2 and util-linux"
    if os.geteuid() != 0:
        return "links with faults need network namespaces, which are root's: run as root"
    probe = subprocess.run(["unshare", "--net", "sh", "-c", _PROBE], capture_output=True, text=True, check=False)
    return f"links with faults cannot be made here: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """``address`` is its own in every link. Picklable, so that a process can ``enter`` it."""

    name: str
    address: str
    keeper_pid: int

    def enter(self) -> None:
        """Move this thread, and those that it starts from now on, to the node. Sockets that are open stay where they are."""
        file = os.open(f"/proc/{self.keeper_pid}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of {self.name}")
        finally:
            os.close(file)

    def run(self, command: str, *, may_fail: bool = False) -> None:
        """A command of iproute2, by words."""
        words = ["nsenter", f"--net=/proc/{self.keeper_pid}/ns/net", *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert may_fail or done.returncode == 0, f"{command}: {done.stderr}"


class Network:
    """The nodes ``names``; ``with`` makes and ends it. A fault concerns the link of two nodes, both ways, until ``heal``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._keepers: list[subprocess.Popen[str]] = []
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Network:
        for number, name in enumerate(self._names, start=1):
            # it ends when its input does, and so with us
            keeper = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo entered; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._keepers.append(keeper)
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "entered\n"
            node = Node(name=name, address=f"10.77.0.{number}", keeper_pid=keeper.pid)
            node.run("ip link set lo up")
            node.run(f"ip address add {node.address}/32 dev lo")
            self.nodes[name] = node
        for one, other in combinations(self.nodes.values(), 2):
            one.run(f"ip link add {_device(other)} type veth peer name {_device(one)} netns {other.keeper_pid}")
            for node, peer in ((one, other), (other, one)):
                _set_up(node, peer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for keeper in self._keepers:
            keeper.communicate("")

    def cut(self, one: str, other: str) -> None:
        """Take the link down: the interface of ``one`` is off, and that of ``other`` has no carrier."""
        self.nodes[one].run(f"ip link set {_device(self.nodes[other])} down")

    def stall(self, one: str, other: str) -> None:
        """Lose every packet without a word."""
        for node, peer in self._ends(one, other):
            node.run(f"tc qdisc replace dev {_device(peer)} root pfifo limit 0")

    def slow(self, one: str, other: str, rate: str) -> None:
        """Let through ``rate``, in tc's words, such as 1mbit."""
        for node, peer in self._ends(one, other):
            node.run(f"tc qdisc replace dev {_device(peer)} root tbf rate {rate} burst 16kb latency 400ms")

    def heal(self, one: str, other: str) -> None:
        """As it was in the beginning. Idempotent."""
        for node, peer in self._ends(one, other):
            node.run(f"tc qdisc delete dev {_device(peer)} root", may_fail=True)  # there may be none
            _set_up(node, peer)

    def _ends(self, one: str, other: str) -> tuple[tuple[Node, Node], tuple[Node, Node]]:
        a, b = self.nodes[one], self.nodes[other]
        return (a, b), (b, a)


def _set_up(node: Node, peer: Node) -> None:
    node.run(f"ip link set {_device(peer)} up")
    node.run(f"ip route replace {peer.address}/32 dev {_device(peer)} src {node.address}")


def _device(peer: Node) -> str:
    return f"to-{peer.name}"

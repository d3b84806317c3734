"""Containers that run this checkout with this interpreter and environment, mounted read-only at their own paths."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

CHECKOUT = Path(__file__).parents[2]
IMAGE_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 45


class NoContainers(Exception):
    """Containers cannot be run here; the text says why."""


def base_image() -> str:
    """The name of the image to run in, built when it is missing. Raises ``NoContainers``."""
    try:
        made = subprocess.run(
            [CHECKOUT / "scripts/make_test_image"], capture_output=True, text=True, timeout=IMAGE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NoContainers(f"the test image was not built within {IMAGE_TIMEOUT_S:g} s") from error
    if made.returncode != 0:
        raise NoContainers(made.stderr.strip())
    return made.stdout.strip()


@contextmanager
def private_network() -> Iterator[Network]:
    # its container would have to come from a registry; what is started here is removed here
    testcontainers_config.ryuk_disabled = True
    with Network() as network:
        yield network


class Machine:
    """One container, running ``command`` of the checkout."""

    def __init__(self, image: str, network: Network, name: str, command: Sequence[str], **environment: str) -> None:
        self._container = (
            DockerContainer(image)
            .with_command(list(command))
            .with_envs(PYTHONPATH=str(CHECKOUT), PYTHONDONTWRITEBYTECODE="1", **environment)
            .with_network(network)
            .with_network_aliases(name)
            .with_kwargs(init=True, shm_size="256m", working_dir=str(CHECKOUT))
        )
        environment_dir, interpreter_dir = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
        for folder in {CHECKOUT, environment_dir, interpreter_dir}:
            self._container.with_volume_mapping(str(folder), str(folder), "ro")

    def start(self) -> None:
        self._container.start()

    @property
    def address(self) -> str:
        """Its address on the private network, which this machine is part of too."""
        container = self._container.get_wrapped_container()
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()
        address: str = network["IPAddress"]
        return address

    @property
    def is_running(self) -> bool:
        container = self._container.get_wrapped_container()
        container.reload()
        return bool(container.status == "running")

    def processes(self) -> list[str]:
        """The command lines of what runs in it."""
        rows = self._container.get_wrapped_container().top(ps_args="-eo pid,args")["Processes"]
        return [row[-1] for row in rows]

    def kill_process(self, pid: int) -> None:
        """``kill -9`` by the process's id in the container."""
        result = self._container.exec(["sh", "-c", f"kill -9 {pid}"])
        assert result.exit_code == 0, result.output

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        container = self._container.get_wrapped_container()
        container.stop(timeout=STOP_TIMEOUT_S)
        status: int = container.wait(timeout=STOP_TIMEOUT_S)["StatusCode"]
        return status

    def remove(self) -> None:
        """Whatever its state. Idempotent."""
        self._container.stop()

    def log(self) -> str:
        return b"".join(self._container.get_logs()).decode(errors="replace")


@contextmanager
def running(*machines: Machine) -> Iterator[None]:
    """Start the machines in order; all of them are gone afterwards, and what they wrote is part of a failure's report."""
    try:
        for machine in machines:
            machine.start()
        yield
    except BaseException:
        for machine in machines:
            print(machine.log())
        raise
    finally:
        for machine in reversed(machines):
            machine.remove()

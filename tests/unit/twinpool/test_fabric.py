"""When torch.distributed may carry pages."""

from __future__ import annotations

import pytest

from serving_core.errors import ConfigError
from tests.unit.twinpool.test_cli import config_of
from twinpool.cluster import WorkerPlaces
from twinpool.fabric import is_fabric_trusted

OPEN, PROTECTED = (WorkerPlaces(host="10.0.0.1", is_protected=is_protected) for is_protected in (False, True))


@pytest.mark.parametrize("way", ["auto", "grpc", "shared_memory", "torch_distributed"])
def test_an_open_cluster_and_a_trusted_one_may(way: str) -> None:
    assert is_fabric_trusted(config_of("--transfer", way), OPEN)
    assert is_fabric_trusted(config_of("--transfer", way, "--trust-fabric"), PROTECTED)


@pytest.mark.parametrize("way", ["auto", "grpc", "shared_memory"])
def test_on_a_protected_one_it_is_left_out(way: str) -> None:
    assert not is_fabric_trusted(config_of("--transfer", way), PROTECTED)


def test_there_asking_for_it_is_refused_in_one_sentence() -> None:
    config = config_of("--transfer", "torch_distributed", "--address", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="add --trust-fabric if nobody else can reach its nodes") as error:
        is_fabric_trusted(config, PROTECTED)
    assert "--address 10.0.0.1:6379" in str(error.value)
    assert "\n" not in str(error.value)

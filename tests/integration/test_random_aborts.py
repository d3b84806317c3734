"""Thousands of aborts at random moments: the storms of tests.abort_storm, one after another, over each transport.

``TWINPOOL_SEED`` names the first storm's seed, the next one has the next number; a failed storm says its own. Ten thousand:
``.venv/bin/python -m pytest -m slow -s tests/integration/test_random_aborts.py``
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from tests.abort_storm import Abort, Storm
from tests.contract.page_path import assert_no_leaks
from twinpool.transfer_way import TransferWay

WAYS = (None, TransferWay.GRPC, TransferWay.SHARED_MEMORY, TransferWay.TORCH_DISTRIBUTED)
MANY = {
    None: 8500,
    TransferWay.GRPC: 600,
    TransferWay.SHARED_MEMORY: 600,
    TransferWay.TORCH_DISTRIBUTED: 300,
}
"""Ten thousand in all."""
FEW = {None: 250, TransferWay.GRPC: 60, TransferWay.SHARED_MEMORY: 60, TransferWay.TORCH_DISTRIBUTED: 30}


def name_of(way: TransferWay | None) -> str:
    return way.value if way is not None else "loopback"


async def survive(first_seed: int, way: TransferWay | None, num_aborts: int) -> None:
    """Storm after storm, until there were ``num_aborts``."""
    began_at = time.monotonic()
    aborts: Counter[Abort] = Counter()
    others: Counter[str] = Counter()
    num_finished = num_storms = 0
    while aborts.total() < num_aborts:
        seed = first_seed + num_storms
        storm = Storm(seed, way)
        try:
            await storm.run()
        except BaseException as error:
            error.add_note(f"In the storm of TWINPOOL_SEED={seed} over {name_of(way)}.")
            raise
        num_storms += 1
        num_finished += storm.num_finished
        aborts += storm.aborts
        others += storm.others
    await assert_no_leaks()
    took_s = time.monotonic() - began_at
    print(f"seed {first_seed}, {name_of(way)}: {aborts.total()} aborts in {num_storms} storms, {took_s:.0f} s")
    print(f"  {num_finished} texts finished; { ({abort.name: number for abort, number in aborts.items()}) }; {dict(others)}")
    assert num_finished > num_storms
    assert num_aborts < 100 or aborts.keys() == set(Abort)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
async def test_nothing_is_wrong_or_left_after_aborts(way: TransferWay | None) -> None:
    await survive(int(os.environ.get("TWINPOOL_SEED", "1")), way, FEW[way])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS, ids=name_of)
async def test_nothing_is_wrong_or_left_after_ten_thousand_aborts(way: TransferWay | None) -> None:
    await survive(int(os.environ.get("TWINPOOL_SEED") or random.randrange(2**32)), way, MANY[way])


async def test_a_seed_makes_the_same_storm_again() -> None:
    storms = [Storm(7, None) for _ in range(2)]
    for storm in storms:
        await storm.run()
    assert storms[0].fingerprint == storms[1].fingerprint
    assert storms[0].aborts == storms[1].aborts

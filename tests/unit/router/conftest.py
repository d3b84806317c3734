"""A router's pair side, and workers that join it, for the tests that need no other settings than the usual ones."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.router.pair import Pair, Pools, open_pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with open_pair() as pair:
        yield pair


@pytest.fixture
async def pools(pair: Pair) -> AsyncIterator[Pools]:
    pools = Pools(pair)
    yield pools
    await pair.generator.close()
    await pools.close()

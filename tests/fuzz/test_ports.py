"""Everything at every port of router and workers, all at once, while texts are told: nothing breaks, grows, or is written that
may not be, and what is told is right.

``TWINPOOL_SEED`` sets the seed, ``TWINPOOL_FUZZ_MINUTES`` the time of the long run (10 by default):
``.venv/bin/python -m pytest -m slow -s tests/fuzz``
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from llm_engine.load_model import LoadedModel, load_model
from serving_core.kv_page_layout import KVDType
from tests.fuzz.page_attacks import bad_announcements, bad_frames, bad_pair, bad_ring, replayed_frames
from tests.fuzz.service_attacks import bad_call, bad_commit, bad_link
from tests.fuzz.socket_attacks import bad_bytes, bad_http, bad_method
from tests.fuzz.target import Interrupted, Target, attacked_server, resident_bytes
from tests.tiny_model import write_tiny_gguf

MINUTES = float(os.environ.get("TWINPOOL_FUZZ_MINUTES", "10"))
SHORT_S = 10.0
WARM_UP_SHARE = 0.3
"""Of the time: it fills caches and arenas."""
NUM_AT_ONCE = 4
ATTACK_TIMEOUT_S = 60.0
MAX_GROWTH_BYTES = 48 << 20

Attack = Callable[[Target, random.Random], Awaitable[None]]
ATTACKS: dict[Attack, int] = {
    bad_frames: 20,
    replayed_frames: 5,
    bad_ring: 20,
    bad_pair: 6,
    bad_announcements: 2,
    bad_call: 30,
    bad_commit: 5,
    bad_link: 10,
    bad_bytes: 20,
    bad_method: 1,
    bad_http: 30,
}
"""How often each is chosen."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, dtype=KVDType.FLOAT32)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Each refused stranger is one, and pytest would keep them all."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Salvos:
    """Attack after attack, drawn from one seed by its number."""

    def __init__(self, target: Target, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._target = target
        self._seed = seed
        self._numbers = itertools.count()

    async def fire_for(self, seconds: float) -> None:
        """Several at once. Raises the first failure, with its number, or that of the texts meanwhile."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._target.ask_on())
            firing = [tasks.create_task(self._fire_until(end)) for _ in range(NUM_AT_ONCE)]
            await asyncio.wait(firing)
            telling.cancel()

    async def _fire_until(self, end: float) -> None:
        while time.monotonic() < end:
            number = next(self._numbers)
            chance = random.Random(f"{self._seed}/{number}")
            (attack,) = chance.choices(list(ATTACKS), list(ATTACKS.values()))
            name = getattr(attack, "__name__", str(attack))
            try:
                async with asyncio.timeout(ATTACK_TIMEOUT_S):
                    await attack(self._target, chance)
            except Interrupted:
                name = "interrupted"
            except Exception as error:
                error.add_note(f"In {name}, number {number} of TWINPOOL_SEED={self._seed}.")
                raise
            self.counts[name] += 1


async def bear(path: Path, loaded: LoadedModel, seed: int, seconds: float) -> None:
    """The whole time, and right to the end."""
    async with attacked_server(path, loaded) as target:
        salvos = Salvos(target, seed)
        await salvos.fire_for(WARM_UP_SHARE * seconds)
        before = resident_bytes()
        await salvos.fire_for((1 - WARM_UP_SHARE) * seconds)
        growth = resident_bytes() - before
        num_texts = target.num_answers.total()
    print(f"seed {seed}, {seconds:.0f} s: {dict(salvos.counts)}, {num_texts} texts, growth {growth / 2**20:.1f} MiB")
    assert salvos.counts.keys() - {"interrupted"} == {getattr(attack, "__name__", "") for attack in ATTACKS}
    assert growth <= MAX_GROWTH_BYTES


async def test_noise_at_every_port(path: Path, loaded: LoadedModel) -> None:
    await bear(path, loaded, int(os.environ.get("TWINPOOL_SEED", "1")), SHORT_S)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
async def test_ten_minutes_of_noise_at_every_port(path: Path, loaded: LoadedModel) -> None:
    await bear(path, loaded, int(os.environ.get("TWINPOOL_SEED") or random.randrange(2**32)), 60 * MINUTES)

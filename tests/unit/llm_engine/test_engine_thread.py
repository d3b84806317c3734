from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from llm_engine.engine_thread import configure_engine_thread
from serving_core.errors import ConfigError


def in_new_thread(fn: Callable[[], None]) -> None:
    """Affinity and niceness stay with the thread, so nothing is left behind for other tests."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_settings_bind_the_calling_thread_only() -> None:
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def check() -> None:
        configure_engine_thread(1, (core,), 3)
        assert torch.get_num_threads() == 1
        assert os.sched_getaffinity(0) == {core}
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == min(19, before[1] + 3)

    in_new_thread(check)
    assert (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == before


def test_no_cores_means_no_pinning() -> None:
    def check() -> None:
        before = os.sched_getaffinity(0)
        configure_engine_thread(1, (), 0)
        assert os.sched_getaffinity(0) == before

    in_new_thread(check)


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="4000"):
        in_new_thread(lambda: configure_engine_thread(1, (4000,), 0))

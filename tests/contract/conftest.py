"""The page paths of the contract suite: one suite, every transport. A path that left a task behind fails its test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract.page_path import (
    PATIENCE_S,
    STALL_TIMEOUT_S,
    TRANSPORTS,
    GrpcPath,
    PagePath,
    assert_no_leaks,
    open_path,
)


@pytest_asyncio.fixture(params=TRANSPORTS)
async def path(request: pytest.FixtureRequest) -> AsyncIterator[PagePath]:
    opened = await open_path(request.param, PATIENCE_S)
    yield opened
    await opened.close()
    await assert_no_leaks()


@pytest_asyncio.fixture(params=TRANSPORTS)
async def impatient_path(request: pytest.FixtureRequest) -> AsyncIterator[PagePath]:
    opened = await open_path(request.param, STALL_TIMEOUT_S)
    yield opened
    await opened.close()
    await assert_no_leaks()


@pytest_asyncio.fixture
async def grpc_path() -> AsyncIterator[GrpcPath]:
    opened = GrpcPath(PATIENCE_S)
    await opened.mend_way()
    yield opened
    await opened.close()
    await assert_no_leaks()

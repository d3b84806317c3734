"""What an answer that is none means for the next attempt."""

from __future__ import annotations

import pytest

from router.setback import Setback, SetbackKind, is_about_worker
from serving_core.errors import RefusalCode, Refused, WorkerLost

TURNED_AWAY = {RefusalCode.RESOURCE_EXHAUSTED, RefusalCode.DRAINING}


@pytest.mark.parametrize("code", list(RefusalCode))
def test_refusals(code: RefusalCode) -> None:
    refused = Refused(code, "No.")
    kind = SetbackKind.FAILURE
    if code in TURNED_AWAY:
        kind = SetbackKind.TURNED_AWAY
    elif code is RefusalCode.TOO_LARGE:
        kind = SetbackKind.TOO_LARGE
    assert Setback.of(refused) == Setback(kind=kind, message="No")
    assert is_about_worker(refused) == (code in TURNED_AWAY)


def test_no_answer() -> None:
    lost = WorkerLost("decode-0 did not answer")
    assert Setback.of(lost) == Setback(kind=SetbackKind.FAILURE, message="decode-0 did not answer")
    assert is_about_worker(lost)

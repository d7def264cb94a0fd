"""The grace period of an open ledger's writer: it starts again for each new absence."""

import asyncio
from collections.abc import Collection

from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_recovery.checks.checker import OpenTail
from bindery_recovery.repair.graces import Graces
from simulated import simulate

LEDGER = LedgerId(7)
A, B, C, D = (BookieId(name) for name in "abcd")


def tail(*ensemble: BookieId) -> OpenTail:
    return OpenTail(segment_first=EntryId(0), ensemble=ensemble, lost={}, leaving={})


def test_each_absence_has_its_own_grace_period() -> None:
    async def scenario() -> None:
        graces = Graces(30.0)

        def left(*ensemble: BookieId, missing: Collection[BookieId], marked_ms: int = 1) -> float:
            return graces.left_s(LEDGER, tail(*ensemble), missing=missing, marked_ms=marked_ms)

        assert left(A, B, C, missing=[A]) == 30
        await asyncio.sleep(20)
        assert left(A, B, C, missing=[A]) == 10
        assert left(A, B, C, missing=[A, B]) == 10, "the absence of A continues"
        await asyncio.sleep(10)
        assert left(A, B, C, missing=[B]) == 0
        assert left(A, B, C, missing=[C]) == 30, "the absence of C is a new one"
        await asyncio.sleep(3600)
        assert left(A, B, C, missing=[C], marked_ms=2) == 30, "another worker saw the end of the previous absence"
        await asyncio.sleep(20)
        assert left(A, B, D, missing=[A], marked_ms=2) == 30, "the writer has replaced a bookie"
        await asyncio.sleep(20)
        graces.forget(LEDGER)
        assert left(A, B, D, missing=[A], marked_ms=2) == 30

    simulate(scenario())

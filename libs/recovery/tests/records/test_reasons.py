"""The recorded reason of a mark: one that requires all entries to be read is never replaced by a weaker one."""

from itertools import product

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.recovery.recovery_records import Reason
from bindery_metadata.stores.store import Op
from bindery_recovery.checks.bookie_audit import LedgerMarker
from bindery_recovery.records.reasons import CHECKED_ALL, stronger
from healing_world import World, clock_ms, payloads, world


@pytest.mark.parametrize(("standing", "new"), list(product(Reason, Reason)))
def test_the_stronger_reason_is_kept_and_the_first_of_equal_ones(standing: Reason, new: Reason) -> None:
    found = stronger(standing, new)
    assert found in (standing, new)
    assert (found in CHECKED_ALL) == (standing in CHECKED_ALL or new in CHECKED_ALL)
    if (standing in CHECKED_ALL) == (new in CHECKED_ALL):
        assert found is standing


class _Always:
    """A leadership that never ends."""

    def __init__(self, here: World) -> None:
        self._here = here

    async def multi(self, ops: list[Op]) -> list[object]:
        return await self._here.store.multi(ops)  # type: ignore[return-value]


@pytest.mark.parametrize("only_new", [True, False])
@pytest.mark.parametrize("turned", [False, True], ids=["lost-first", "missing-first"])
async def test_a_hole_found_in_a_ledger_that_is_marked_for_a_lost_bookie_is_filled(
    only_new: bool, turned: bool
) -> None:
    """The bookie is back, and has its first and last entries: only reading all entries detects the missing ones."""
    async with world() as here:
        writer = await here.write(30)
        holder = writer.metadata.last_segment.ensemble[1]
        here.ledgers.find(writer.ledger_id).copies.lose(holder, 15)
        marker = LedgerMarker(here.marks, here.records, leadership=_Always(here), clock_ms=clock_ms)  # type: ignore[arg-type]
        reasons = [Reason.BOOKIE_LOST, Reason.ENTRY_MISSING]
        for reason in reversed(reasons) if turned else reasons:
            await marker.mark(
                writer.ledger_id, [BookieId(holder)], reason, missing_entries=1, missing_bytes=10, only_new=only_new
            )
        record = await here.records.get(writer.ledger_id)
        assert record is not None
        assert record.reason is Reason.ENTRY_MISSING
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == [(writer.ledger_id, holder, 1)]
        await here.assert_whole(writer.ledger_id, payloads(30))

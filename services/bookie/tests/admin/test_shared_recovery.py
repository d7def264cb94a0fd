"""BookKeeper's autorecovery paths on a bookie's admin port. The auditor's tests cover their details."""

import random
from typing import Any

import pytest
from bindery_bookie.admin.shared_recovery import SharedRecovery
from bindery_core.errors import MetadataUnavailable
from bindery_core.ids import LedgerId
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

LAYOUT = LedgersLayout()


def shared(metadata: MemoryStore | None) -> SharedRecovery:
    async def no_ledgers() -> Any:
        raise AssertionError("not asked for")

    return SharedRecovery(
        lambda: metadata, LAYOUT, by="bookie-0", ledgers=no_ledgers, randomness=random.Random(1), clock_ms=lambda: 77
    )


async def test_recovery_is_disabled_and_marks_are_listed_through_a_bookie(make_admin) -> None:
    metadata = MemoryTree().connect()
    await initialize_cluster(metadata, LAYOUT, randomness=random.Random(2))
    recovery = shared(metadata)
    made = make_admin(recovery=recovery.get)
    assert (await made.http.get("/api/v1/autorecovery/status")).json() == {"enabled": True}
    assert (await made.http.put("/api/v1/autorecovery/status?enabled=false")).json() == {"enabled": False}
    admin = await recovery.get()
    pause = await admin.pause_state()
    assert pause is not None
    assert (pause.by, pause.at_ms) == ("bookie-0", 77)
    await admin.marks.mark(LedgerId(5), ("bookie-9",))
    assert (await made.http.get("/api/v1/autorecovery/list_under_replicated_ledger")).json() == [5]
    assert await recovery.get() is admin
    await recovery.close()


async def test_without_a_metadata_store_the_error_has_the_cause() -> None:
    with pytest.raises(MetadataUnavailable, match="no connection"):
        await shared(None).get()

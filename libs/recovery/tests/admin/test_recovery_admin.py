"""Operations of an operator: pause and resume, with their reason and their history."""

import random

import pytest
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import Pause
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.recovery_admin import RecoveryAdmin
from bindery_recovery.draining.drain import Ledgers


async def no_ledgers() -> Ledgers:
    raise AssertionError("pause and resume need no ledger client")


async def admin_of(tree: MemoryTree) -> RecoveryAdmin:
    layout = LedgersLayout()
    store = tree.connect()
    await store.create(layout.root)
    admin = RecoveryAdmin(
        store, layout, by="anna", ledgers=no_ledgers, randomness=random.Random(1), clock_ms=lambda: 1000
    )
    await admin.marks.prepare()
    return admin


@pytest.mark.parametrize(("reason", "text"), [("moving racks", ": moving racks"), ("", "")])
async def test_each_pause_and_resume_is_recorded_once(reason: str, text: str) -> None:
    admin = await admin_of(MemoryTree())
    assert await admin.pause(reason) == Pause("anna", reason, 1000)
    assert await admin.pause_state() == Pause("anna", reason, 1000)
    assert (await admin.pause("another reason")).reason == "another reason"
    assert await admin.pause_state() == Pause("anna", "another reason", 1000)
    assert await admin.resume()
    assert not await admin.resume()
    assert await admin.pause_state() is None
    assert await admin.records.pause_info() is None
    events = [(event.kind, event.text, event.fields) for event in await admin.records.history()]
    assert events == [
        ("resumed", "recovery was resumed by anna", {"by": "anna"}),
        ("paused", f"recovery was paused by anna{text}", {"by": "anna"}),
    ]

"""Operations of an operator: pauses with their reason and history, views of ledgers and bookies, replaced bookies."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import pytest
from bindery_core.errors import BookieUnavailable, Corrupt, NoSuchLedger, TooManyRequests
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.recovery_records import Pause, RecoveryRecord, WorkerReport
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.recovery_admin import REPLACING_MAX, BookieStatus, NoAuditorYet, RecoveryAdmin
from bindery_recovery.draining.drain import CannotRecover, Ledgers
from scripted import ledger
from simulated import simulate

LAYOUT = LedgersLayout()
B1, B2, B3 = BookieId("b1"), BookieId("b2"), BookieId("b3")


async def no_ledgers() -> Ledgers:
    raise AssertionError("pause and resume need no ledger client")


async def admin_of(tree: MemoryTree) -> RecoveryAdmin:
    store = tree.connect()
    await store.create(LAYOUT.root)
    admin = RecoveryAdmin(
        store, LAYOUT, by="anna", ledgers=no_ledgers, randomness=random.Random(1), clock_ms=lambda: 1000
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


async def test_a_pause_by_another_tool_has_no_reason() -> None:
    admin = await admin_of(MemoryTree())
    await admin.marks.disable()
    assert await admin.pause_state() == Pause("", "", 0)


async def test_an_audit_is_requested_by_writing_the_same_delay_again() -> None:
    admin = await admin_of(MemoryTree())
    with pytest.raises(NoAuditorYet):
        await admin.trigger_audit()
    await admin.marks.set_lost_bookie_delay_s(0)
    before = (await admin.store.get(LAYOUT.lost_bookie_delay)).stat.version
    await admin.trigger_audit()
    assert await admin.marks.lost_bookie_delay_s() == 0
    assert (await admin.store.get(LAYOUT.lost_bookie_delay)).stat.version == before + 1


# --- views ------------------------------------------------------------------------------------------------------------


async def test_marked_ledgers_are_listed_from_an_id_on_with_record_and_worker() -> None:
    admin = await admin_of(MemoryTree())
    for number in range(1, 6):
        await admin.marks.mark(LedgerId(number))
    await admin.records.put(RecoveryRecord(LedgerId(2), attempts=3))
    assert await admin.marks.lock(LedgerId(3)) is not None

    async def listed(**which: int) -> list[int]:
        return [found.mark.ledger_id for found in await admin.marked(**which)]

    assert await listed(limit=9) == [1, 2, 3, 4, 5]
    assert await listed(limit=2) == [1, 2]
    assert await listed(limit=2, first=2) == [2, 3]
    assert await listed(limit=9, first=6) == []
    second, third = await admin.marked(limit=2, first=2)
    assert second.record is not None
    assert (second.record.attempts, second.worker) == (3, None)
    assert (third.record, third.worker) == (None, "anna")


async def test_bookies_are_listed_with_registration_cookie_and_the_intent_that_applies() -> None:
    tree = MemoryTree()
    store = tree.connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(2))
    admin = RecoveryAdmin(
        store, LAYOUT, by="anna", ledgers=no_ledgers, randomness=random.Random(1), clock_ms=lambda: 1000
    )
    assert await admin.bookies() == []
    await store.create(LAYOUT.bookie(B3, read_only=False))
    await store.create(LAYOUT.bookie(B2, read_only=True))
    await CookieStore(store, LAYOUT).write(B2, b"cookie", version=None)
    await admin.memberships.set(B1, Intent.REMOVED)
    await admin.memberships.set(B2, Intent.MAINTENANCE, until_ms=1000)  # ends now
    await CookieStore(store, LAYOUT).write(BookieId("b0"), b"cookie", version=None)

    def shown(status: BookieStatus) -> tuple[str, str, bool, str]:
        return status.bookie_id, status.registration, status.has_cookie, status.intent

    found = await admin.bookies()
    assert [shown(one) for one in found] == [
        ("b0", "absent", True, "active"),
        ("b1", "absent", False, "removed"),
        ("b2", "read_only", True, "active"),
        ("b3", "writable", False, "active"),
    ]
    assert found[2].membership.intent is Intent.MAINTENANCE, "as stored"


class SomeLedgers:
    """Ledgers and registered bookies; an error in place of metadata is raised."""

    def __init__(self) -> None:
        self.all: dict[int, LedgerMetadata | Exception] = {}
        self.bookies: dict[BookieId, bool] = {B2: True, B3: False}
        self.is_down = False

    async def list_ledgers(self) -> AsyncIterator[LedgerId]:
        for ledger_id in sorted(self.all):
            yield LedgerId(ledger_id)

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        found = self.all.get(ledger_id, NoSuchLedger("no such ledger", ledger_id=ledger_id))
        if isinstance(found, Exception):
            raise found
        return found

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        if self.is_down:
            raise BookieUnavailable("down", bookie_id="b2")
        return self.bookies


async def admin_with(ledgers: SomeLedgers) -> RecoveryAdmin:
    async def connected() -> Ledgers:
        return ledgers

    store = MemoryTree().connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(2))
    admin = RecoveryAdmin(
        store, LAYOUT, by="anna", ledgers=connected, randomness=random.Random(1), clock_ms=lambda: 1000
    )
    await admin.marks.prepare()
    return admin


async def test_the_facts_about_a_ledger_are_those_stored_for_it() -> None:
    ledgers = SomeLedgers()
    admin = await admin_with(ledgers)
    ledgers.all[7] = ledger(("b1", "b2"))
    bare = await admin.known(LedgerId(7))
    assert (bare.mark, bare.record, bare.locked_by, bare.verified, bare.closing) == (None, None, None, None, None)
    assert (bare.metadata, bare.metadata_error) == (ledgers.all[7], "")
    assert (bare.workers, bare.auditor, bare.is_enabled, bare.pause) == ([], None, True, None)

    verified = Verified(LedgerId(7), "full", 5, "run", 1)
    await VerifiedRecords(admin.store).put_all([verified])
    await ClosingRecords(admin.store).add(LedgerId(7), ClosingCause.RECOVERED)
    await CookieStore(admin.store, LAYOUT).write(B1, b"cookie", version=None)
    await admin.memberships.set(B1, Intent.REMOVED)
    for number in (6, 7, 8):
        await admin.marks.mark(LedgerId(number), ("b1",))
        await admin.records.put(RecoveryRecord(LedgerId(number), attempts=number))
    assert await admin.marks.lock(LedgerId(7)) is not None
    await admin.records.report(WorkerReport("w0", 900))
    await admin.pause("racks")
    found = await admin.known(LedgerId(7))
    assert found.ledger_id == 7
    assert found.mark is not None
    assert (found.mark.ledger_id, found.mark.replicas) == (7, ("b1",))
    assert found.record is not None
    assert (found.record.attempts, found.locked_by, found.verified) == (7, "anna", verified)
    assert found.closing is not None
    assert found.closing.ledger_id == 7
    assert [report.name for report in found.workers] == ["w0"]
    assert (found.is_enabled, found.pause) == (False, Pause("anna", "racks", 1000))
    assert (found.view.bookies, found.view.known, found.now_ms) == (ledgers.bookies, {B1}, 1000)
    assert found.view.intent(B1) is Intent.REMOVED


async def test_a_ledger_without_metadata_is_known_only_while_it_is_marked() -> None:
    ledgers = SomeLedgers()
    admin = await admin_with(ledgers)
    with pytest.raises(NoSuchLedger):
        await admin.known(LedgerId(7))
    await admin.marks.mark(LedgerId(7))
    found = await admin.known(LedgerId(7))
    assert (found.metadata, found.metadata_error) == (None, "")
    ledgers.all[8] = Corrupt("bad bytes")
    assert "bad bytes" in (await admin.known(LedgerId(8))).metadata_error


# --- replacing a lost bookie ------------------------------------------------------------------------------------------


def with_a_lost_bookie(
    scenario: Callable[[RecoveryAdmin, SomeLedgers], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Turn a scenario into a test, on simulated time, in which b1 is absent and ledger 7 names it."""

    def test() -> None:
        async def run() -> None:
            ledgers = SomeLedgers()
            ledgers.all[7] = ledger(("b1", "b2"))
            admin = await admin_with(ledgers)
            await CookieStore(admin.store, LAYOUT).write(B1, b"cookie", version=None)
            await scenario(admin, ledgers)
            await admin.close()

        simulate(run())

    test.__name__ = scenario.__name__
    return test


async def has_cookie(admin: RecoveryAdmin) -> bool:
    return await CookieStore(admin.store, LAYOUT).read(B1) is not None


@with_a_lost_bookie
async def test_a_replaced_bookie_loses_its_cookie_when_no_ledger_names_it(
    admin: RecoveryAdmin, ledgers: SomeLedgers
) -> None:
    started = await admin.replace(B1, delete_cookie=True)
    assert (started.marked, started.goes_on) == (1, False)
    membership = await admin.memberships.get(B1)
    assert (membership.intent, membership.by, membership.reason) == (Intent.REMOVED, "anna", "requested over HTTP")
    await asyncio.sleep(60)
    assert await has_cookie(admin)
    ledgers.all[7] = ledger(("b3", "b2"))
    ledgers.is_down = True
    await asyncio.sleep(60)
    assert await has_cookie(admin), "a failed poll is repeated, it neither ends nor completes the replacement"
    ledgers.is_down = False
    await asyncio.sleep(60)
    assert not await has_cookie(admin)


@with_a_lost_bookie
async def test_the_cookie_is_kept_unless_its_deletion_was_requested(admin: RecoveryAdmin, ledgers: SomeLedgers) -> None:
    await admin.replace(B1, delete_cookie=True)
    again = await admin.replace(B1, delete_cookie=False)
    assert (again.goes_on, again.marked) == (True, 0)
    ledgers.all[7] = ledger(("b3", "b2"))
    await asyncio.sleep(60)
    assert await has_cookie(admin), "the second request replaced the first"


@with_a_lost_bookie
async def test_a_closed_admin_no_longer_follows_replacements(admin: RecoveryAdmin, ledgers: SomeLedgers) -> None:
    await admin.replace(B1, delete_cookie=True)
    await admin.close()
    ledgers.all[7] = ledger(("b3", "b2"))
    await asyncio.sleep(60)
    assert await has_cookie(admin)
    assert await admin.marks.get(LedgerId(7)) is not None


@with_a_lost_bookie
async def test_a_registered_bookie_is_not_replaced(admin: RecoveryAdmin, ledgers: SomeLedgers) -> None:
    with pytest.raises(CannotRecover):
        await admin.replace(B2, delete_cookie=True)
    assert (await admin.memberships.get(B2)).intent is Intent.ACTIVE


@with_a_lost_bookie
async def test_the_number_of_replacements_at_a_time_is_limited(admin: RecoveryAdmin, ledgers: SomeLedgers) -> None:
    gone = [BookieId(f"gone-{number}") for number in range(REPLACING_MAX + 1)]
    for number, bookie_id in enumerate(gone, 10):
        ledgers.all[number] = ledger((bookie_id, "b2"))
    for bookie_id in gone[:-1]:
        await admin.replace(bookie_id, delete_cookie=False)
    with pytest.raises(TooManyRequests):
        await admin.replace(gone[-1], delete_cookie=False)
    assert (await admin.memberships.get(gone[-1])).intent is Intent.ACTIVE
    assert (await admin.replace(gone[0], delete_cookie=False)).goes_on, "a known one may be requested again"
    ledgers.all[10] = ledger(("b3", "b2"))
    await asyncio.sleep(60)
    await admin.replace(gone[-1], delete_cookie=False)

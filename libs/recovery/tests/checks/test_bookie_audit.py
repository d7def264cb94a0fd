"""Which ledgers an audit marks, and when it stops or is postponed."""

import asyncio
from dataclasses import asdict

import pytest
from auditor_world import LAYOUT, LEDGERS, OF_B1, World, clock_ms, with_auditor
from bindery_core.errors import MetadataUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryState
from bindery_recovery.checks.bookie_audit import AuditState, LedgerMarker
from bindery_recovery.cluster import bookie_watch
from scripted import ledger
from simulated import simulate

B1 = BookieId("b1")


def test_before_the_first_audit_all_figures_are_zero() -> None:
    assert not any(asdict(AuditState()).values())


@with_auditor()
async def test_the_ledgers_of_a_lost_bookie_are_marked_after_the_delay_with_reason_and_size(world: World) -> None:
    await world.stop_bookie("b1")
    await asyncio.sleep(118)
    assert await world.marked() == {}
    await asyncio.sleep(6)
    assert await world.marked() == OF_B1
    record = await world.records.get(LedgerId(1))
    assert record is not None
    assert (record.state, record.reason, record.bookies) == (RecoveryState.WAITING, Reason.BOOKIE_LOST, ("b1",))
    assert (record.missing_entries, record.missing_bytes) == (10, 1000)
    assert abs(record.first_marked_ms - clock_ms()) < 10_000
    open_record = await world.records.get(LedgerId(3))
    assert open_record is not None
    assert open_record.missing_bytes is None
    assert await world.kinds() == ["leader", "bookie_absent", "bookie_lost"]
    lost = (await world.records.history(1))[0]
    assert lost.text == "b1 is lost: 3 of the 3 ledgers that name it were marked now"
    await asyncio.sleep(3600)
    assert [mark.version for mark in await world.mark_list()] == [0, 0, 0], "each ledger is marked once"
    assert world.auditor.auditor.state.audit.marked_total == {Reason.BOOKIE_LOST: 3}


@with_auditor()
async def test_a_bookie_that_returns_while_the_ledgers_are_read_is_not_marked(world: World) -> None:
    """The bookie returns between the end of its delay and its first mark."""
    await world.stop_bookie("b1")
    state = world.auditor.auditor.state.audit
    while not state.is_running:
        await asyncio.sleep(0.001)
    await world.start_bookie("b1")
    await asyncio.sleep(60)
    assert state.audits == 2
    assert await world.marked() == {}


@with_auditor(bookie_check_interval_s=600)
async def test_the_regular_check_finds_ledgers_that_name_a_lost_bookie_only_later(world: World) -> None:
    await world.stop_bookie("b1")
    await world.wait_for_marks(3, timeout_s=130)
    await world.add_ledger(7, ledger(("b1", "b2", "b3")))
    await asyncio.sleep(300)
    assert 7 not in await world.marked()
    await asyncio.sleep(400)
    assert (await world.marked())[7] == ("b1",)


@with_auditor(bookie_check_interval_s=600)
async def test_the_delay_applies_to_a_bookie_without_a_cookie_that_ledgers_name(world: World) -> None:
    await world.add_ledger(7, ledger(("ghost", "b2", "b3")))
    await asyncio.sleep(600)
    waited_s = await world.wait_for_marks(1, timeout_s=300)
    assert 30 < waited_s < 125
    assert await world.marked() == {7: ("ghost",)}


@with_auditor()
async def test_writing_the_same_delay_again_requests_an_audit_now(world: World) -> None:
    await world.stop_bookie("b1")
    await world.add_ledger(7, ledger(("ghost", "b2", "b3")))
    await asyncio.sleep(20)
    await world.marks.set_lost_bookie_delay_s(120)
    await world.wait_for_marks(4, timeout_s=5)
    assert await world.marked() == {**OF_B1, 7: ("ghost",)}


@with_auditor()
async def test_a_removed_bookie_that_is_not_registered_needs_no_delay(world: World) -> None:
    await world.stop_bookie("b1")
    await world.memberships.set(B1, Intent.REMOVED)
    await world.wait_for_marks(3, timeout_s=5)
    assert await world.marked() == OF_B1


@with_auditor()
async def test_nothing_is_marked_while_recovery_is_disabled_and_enabling_it_starts_an_audit(world: World) -> None:
    await world.marks.disable()
    await world.stop_bookie("b1")
    await world.stop_bookie("b2")
    await asyncio.sleep(2000)
    assert await world.marked() == {}
    state = world.auditor.auditor.state.audit
    assert (state.audits, state.postponed) == (1, 0), "only the audit at the start has run"
    await world.start_bookie("b2")
    await world.marks.enable()
    await world.wait_for_marks(3, timeout_s=10)
    assert await world.marked() == OF_B1


def test_disabling_recovery_stops_an_audit_that_is_marking() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={n: ledger(("b1", "b2", "b3")) for n in range(300)})
        await world.start_auditor(delay_s=10, limits={"marks_in_flight": 2})
        await asyncio.sleep(60)
        await world.stop_bookie("b1")
        await world.wait_for_marks(20, timeout_s=30)
        await world.marks.disable()
        await asyncio.sleep(0.1)
        stopped = len(await world.marked())
        assert stopped < 150
        await asyncio.sleep(300)
        assert len(await world.marked()) == stopped
        await world.marks.enable()
        await world.wait_for_marks(300, timeout_s=30)

    simulate(scenario())


def test_a_bookie_that_returns_while_its_ledgers_are_marked_stops_the_marking() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={n: ledger(("b1", "b2", "b3")) for n in range(600)})
        await world.start_auditor(delay_s=10, limits={"marks_in_flight": 1, "debounce_s": 0.1})
        await asyncio.sleep(60)
        await world.stop_bookie("b1")
        await world.wait_for_marks(20, timeout_s=30)
        await world.start_bookie("b1")
        await asyncio.sleep(60)
        assert len(await world.marked()) < 200

    simulate(scenario())


@pytest.mark.parametrize("operation", ["get", "children"])
def test_nothing_is_marked_if_some_metadata_cannot_be_read(operation: str) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        auditor = await world.start_auditor(delay_s=10, limits={"retry_s": 20})
        await asyncio.sleep(60)
        store = auditor.store
        path = LAYOUT.ledger(LedgerId(5_000_000_000))

        def is_meant(name: str, asked: str) -> bool:
            return name == operation and path.startswith(asked) and len(asked) > len("/ledgers/000")

        store.fail_next(MetadataUnavailable("away"), matching=is_meant)
        await world.stop_bookie("b1")
        await asyncio.sleep(25)
        assert await world.marked() == {}
        assert auditor.auditor.state.audit.postponed == 1
        assert auditor.auditor.state.audit.last_error == "away"
        await world.wait_for_marks(3, timeout_s=20)
        assert auditor.auditor.state.audit.last_error == ""

    simulate(scenario())


@with_auditor()
async def test_a_ledger_with_unparsable_metadata_does_not_stop_the_marking_of_others(world: World) -> None:
    await world.store.set(LAYOUT.ledger(LedgerId(2)), b"garbage", version=None)
    await world.stop_bookie("b1")
    await world.wait_for_marks(3, timeout_s=130)
    assert world.auditor.auditor.state.audit.unreadable == 1


@pytest.mark.parametrize("change", ["deleted", "moved"])
def test_a_ledger_that_changes_after_it_was_read_is_judged_by_its_new_metadata(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        auditor = await world.start_auditor(delay_s=10)
        await asyncio.sleep(60)
        look = bookie_watch.BookieWatch.poll
        looks_in_audit = 0

        async def change_at_the_second_look(watch):  # type: ignore[no-untyped-def]
            nonlocal looks_in_audit
            looks_in_audit += auditor.auditor.state.audit.is_running
            if looks_in_audit == 2:
                if change == "deleted":
                    await world.manager.delete(LedgerId(1))
                else:
                    await world.manager.update(LedgerId(1), lambda _: ledger(("b4", "b2", "b3")))
            return await look(watch)

        monkeypatch.setattr(bookie_watch.BookieWatch, "poll", change_at_the_second_look)
        await world.stop_bookie("b1")
        await asyncio.sleep(30)
        assert looks_in_audit >= 2
        assert set(await world.marked()) == {3, 5_000_000_000}

    simulate(scenario())


@pytest.mark.parametrize(
    ("recorded", "is_raised"), [(None, True), (Reason.BOOKIE_LOST, True), (Reason.ENTRY_MISSING, False)]
)
def test_a_mark_is_renewed_only_for_a_reason_that_requires_a_deeper_check(
    recorded: Reason | None, is_raised: bool
) -> None:
    """`only_new` leaves a mark for the same bookie alone, unless its recorded reason requires too few entries to be
    read."""

    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        await world.marks.mark(LedgerId(1), ["b1"])
        if recorded is not None:
            await world.records.put(RecoveryRecord(LedgerId(1), reason=recorded, bookies=("b1",)))
        before = await world.records.get(LedgerId(1))
        marker = LedgerMarker(world.marks, world.records, leadership=None, clock_ms=clock_ms)

        async def mark(reason: Reason) -> bool:
            return await marker.mark(LedgerId(1), [B1], reason, missing_entries=2, missing_bytes=20, only_new=True)

        assert await mark(Reason.BOOKIE_LOST) is False
        assert await world.records.get(LedgerId(1)) == before
        await mark(Reason.ENTRY_MISSING)
        record = await world.records.get(LedgerId(1))
        assert record is not None
        assert record.reason is Reason.ENTRY_MISSING
        assert (record != before) is is_raised

    simulate(scenario())

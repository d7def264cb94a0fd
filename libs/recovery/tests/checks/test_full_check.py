"""The check of all ledgers: the marks, the rate, the cursor, and faults that do not stop the check."""

import asyncio

import pytest
from auditor_world import EPOCH_MS, LAYOUT, World, clock_ms
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import BinderyError, MetadataUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.layout.layout import CheckKind
from bindery_metadata.recovery.recovery_records import Reason
from bindery_recovery.checks.full_check import CURSOR, FullCheckResult, is_unfinished
from scripted import ledger
from simulated import simulate

CHECK = {"ledger_check_interval_s": 7 * 86_400, "ledger_check_rate": 10.0}


def many(count: int) -> dict[int, object]:
    return {n: ledger(("b1", "b2", "b3")) for n in range(count)}


async def last_result(world: World) -> dict[str, int]:
    cursor = await world.records.get_cursor(CURSOR)
    assert cursor is not None
    return {name: value for name, value in cursor["last_result"].items() if value}


async def finished(world: World, *, timeout_s: float = 600) -> dict[str, int]:
    for _ in range(int(timeout_s)):
        cursor = await world.records.get_cursor(CURSOR)
        if cursor and not is_unfinished(cursor):
            return await last_result(world)
        await asyncio.sleep(1)
    raise AssertionError("the check does not end")


def test_ledgers_that_lack_entries_are_marked_and_others_are_not() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(8))  # type: ignore[arg-type]
        world.replicas = {
            (1, "b2"): Verdict.ABSENT,
            (2, "b1"): Verdict.CORRUPT,
            (2, "b3"): Verdict.ABSENT,
            (3, "b1"): Verdict.ERROR,
            (4, "b1"): "limbo",
            (5, "b1"): BinderyError("a fault of ours"),
            (6, "b1"): ValueError("another"),
        }
        await world.start_auditor(**CHECK)  # type: ignore[arg-type]
        result = await finished(world)
        assert await world.marked() == {1: ("b2",), 2: ("b1", "b3")}
        assert result == {
            "ledgers": 8,
            "whole": 2,
            "marked": 2,
            "unsure": 1,
            "refilling": 1,
            "failed": 2,
            "missing_entries": 2 * 3,
            "entries_read": 6 * 6,
            "bytes_read": 6 * 600,
        }
        record = await world.records.get(LedgerId(2))
        assert record is not None
        assert (record.reason, record.missing_entries, record.missing_bytes) == (Reason.ENTRY_MISSING, 4, 400)
        event = (await world.records.history(1))[0]
        assert event.kind == "check_finished"
        cursor = await world.records.get_cursor(CURSOR)
        assert cursor is not None
        took_s = (cursor["last_finished_ms"] - cursor["last_started_ms"]) / 1000
        assert event.fields["took_s"] == round(took_s, 1) > 0
        assert f"8 ledgers were checked in {took_s:.0f} s" in event.text
        assert "not decided: 1 refilling, 1 unsure, 2 failed" in event.text
        at_ms = await world.marks.check_time_ms(CheckKind.LEDGERS)
        assert at_ms is not None
        assert EPOCH_MS < at_ms <= clock_ms()

    simulate(scenario())


def test_bookies_that_may_return_are_left_to_the_audit() -> None:
    """b1 is absent within its delay and b4 is in maintenance. b5 is lost, and ledgers 3 and 4 named it only later."""

    async def scenario() -> None:
        world = await World.make(6, ledgers={1: ledger(("b1", "b2", "b3")), 2: ledger(("b4", "b2", "b3"))})
        await world.start_auditor(delay_s=100, **CHECK)  # type: ignore[arg-type]
        await finished(world)
        await world.stop_bookie("b5")
        await asyncio.sleep(110)
        await world.memberships.set(BookieId("b4"), Intent.MAINTENANCE, until_ms=clock_ms() + 10_000_000)
        await world.stop_bookie("b4")
        await world.stop_bookie("b1")
        await world.add_ledger(3, ledger(("b5", "b2", "b3")))
        await world.add_ledger(4, ledger(("b5", "b2", "b3"), last=None))
        await asyncio.sleep(10)
        await world.marks.set_check_time_ms(CheckKind.LEDGERS, 0)
        await asyncio.sleep(70)
        assert await last_result(world) == {
            "ledgers": 4,
            "waiting": 2,
            "marked": 2,
            "missing_entries": 10,
            "entries_read": 12,
            "bytes_read": 1200,
        }
        assert await world.marked() == {3: ("b5",), 4: ("b5",)}
        record = await world.records.get(LedgerId(3))
        assert record is not None
        assert record.reason is Reason.BOOKIE_LOST

    simulate(scenario())


def test_hung_and_unreadable_ledgers_do_not_stop_the_check() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(60))  # type: ignore[arg-type]
        for ledger_id in range(10, 30):
            world.replicas[ledger_id, "b2"] = "hangs"
        await world.store.set(LAYOUT.ledger(LedgerId(40)), b"garbage", version=None)
        await world.start_auditor(limits={"ledger_timeout_s": 60, "checks_in_flight": 4}, **CHECK)  # type: ignore[arg-type]
        result = await finished(world)
        assert (result["ledgers"], result["hung"], result["unreadable"], result["whole"]) == (60, 20, 1, 39)
        assert await world.marked() == {}

    simulate(scenario())


def test_the_check_keeps_to_its_rate() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(300))  # type: ignore[arg-type]
        await world.start_auditor(**CHECK)  # type: ignore[arg-type]
        await finished(world)
        starts = sorted(dict(reversed(world.checked)).values())
        assert len(starts) == 300
        for first in range(200):
            assert starts[first + 100] - starts[first] >= 9.5, "10 ledgers per second"
        assert starts[-1] - starts[0] <= 33

    simulate(scenario())


def test_the_next_leader_continues_at_the_cursor() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(1000))  # type: ignore[arg-type]
        world.replicas = {(100, "b1"): Verdict.ABSENT, (900, "b1"): Verdict.ABSENT}
        first = await world.start_auditor("first", **CHECK)  # type: ignore[arg-type]
        await asyncio.sleep(70)
        cursor = await world.records.get_cursor(CURSOR)
        assert cursor is not None
        assert 300 < cursor["next_ledger"] < 700
        await first.kill()
        world.checked.clear()
        await world.start_auditor("second", **CHECK)  # type: ignore[arg-type]
        result = await finished(world)
        seen = {ledger_id for ledger_id, _ in world.checked}
        assert min(seen) == cursor["next_ledger"]
        assert max(seen) == 999
        assert (result["ledgers"], result["whole"], result["marked"]) == (1000, 998, 2)
        cursor = await world.records.get_cursor(CURSOR)
        assert cursor is not None
        assert cursor["last_started_ms"] < clock_ms() - 100_000, "the first leader started the check"

    simulate(scenario())


def test_an_outage_pauses_the_check_and_each_ledger_is_counted_once() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(600))  # type: ignore[arg-type]
        running = await world.start_auditor(**CHECK)  # type: ignore[arg-type]
        await asyncio.sleep(40)
        world.tree.suspend(running.store)
        await asyncio.sleep(45)
        world.tree.resume(running.store)
        await asyncio.sleep(5)
        running.store.fail_next(MetadataUnavailable("away"), matching=lambda name, _: name == "children")
        result = await finished(world)
        assert (result["ledgers"], result["whole"]) == (600, 600)
        assert {ledger_id for ledger_id, _ in world.checked} == set(range(600))
        assert running.auditor.state.checks[CheckKind.LEDGERS].last_error == ""

    simulate(scenario())


def test_the_check_pauses_while_recovery_is_disabled() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(600))  # type: ignore[arg-type]
        await world.start_auditor(**CHECK)  # type: ignore[arg-type]
        await asyncio.sleep(40)
        await world.marks.disable()
        await asyncio.sleep(2)
        count = len(world.checked)
        assert 0 < count < 600 * 3
        await asyncio.sleep(500)
        assert len(world.checked) == count
        await world.marks.enable()
        assert (await finished(world))["ledgers"] == 600

    simulate(scenario())


def test_the_check_runs_again_after_its_interval_and_not_before() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(3))  # type: ignore[arg-type]
        await world.start_auditor(ledger_check_interval_s=8000)
        await finished(world)
        begun = len(world.checked)
        await asyncio.sleep(7900)
        assert len(world.checked) == begun
        await asyncio.sleep(200)
        assert len(world.checked) == 2 * begun

    simulate(scenario())


def test_a_check_time_in_the_far_future_is_ignored() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(3))  # type: ignore[arg-type]
        await world.marks.set_check_time_ms(CheckKind.LEDGERS, clock_ms() + 365 * 86_400_000)
        await world.start_auditor(ledger_check_interval_s=86_400)
        await finished(world, timeout_s=100)
        at_ms = await world.marks.check_time_ms(CheckKind.LEDGERS)
        assert at_ms is not None
        assert at_ms <= clock_ms()

    simulate(scenario())


def test_a_ledger_repaired_during_its_check_is_not_marked() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=many(3))  # type: ignore[arg-type]
        world.replicas = {(1, "b1"): Verdict.ABSENT}
        running = await world.start_auditor(**CHECK)  # type: ignore[arg-type]
        read = running.auditor._client.read_replicas  # type: ignore[attr-defined]

        async def heal(ledger_id, metadata, bookie_id, entry_ids, take):  # type: ignore[no-untyped-def]
            answers = await read(ledger_id, metadata, bookie_id, entry_ids, take)
            if (ledger_id, bookie_id) == (1, "b1"):
                await world.manager.update(LedgerId(1), lambda _: ledger(("b4", "b2", "b3")))
            return answers

        running.auditor._client.read_replicas = heal  # type: ignore[method-assign]
        assert (await finished(world))["whole"] == 3
        assert await world.marked() == {}

    simulate(scenario())


@pytest.mark.parametrize("kept", [{}, {"started_ms": 1}, {"next_ledger": "5", "started_ms": 1}, {"started_ms": None}])
def test_an_invalid_cursor_does_not_count_as_an_unfinished_check(kept: dict[str, object]) -> None:
    assert not is_unfinished(kept)


def test_unknown_and_invalid_counters_of_a_cursor_are_ignored() -> None:
    assert FullCheckResult.of({"ledgers": 5, "whole": "x", "colour": 7}) == FullCheckResult(ledgers=5)

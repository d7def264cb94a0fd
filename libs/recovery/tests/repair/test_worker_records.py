"""What a worker records about a ledger: its history, its counters, the record of a failed attempt, and its report."""

import asyncio
from typing import Any

import pytest
from bindery_core.errors import MetadataUnavailable
from bindery_core.ids import LedgerId
from bindery_metadata.recovery.recovery_records import (
    NOT_STORED,
    HistoryEvent,
    Obstacle,
    Reason,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
)
from bindery_recovery.repair.worker import WorkerStats
from healing_world import START_MS, World, clock_ms, play


async def events(here: World, kind: str) -> list[HistoryEvent]:
    return [event for event in await here.records.history() if event.kind == kind]


# --- a repaired ledger ------------------------------------------------------------------------------------------------


def test_a_repair_is_counted_and_recorded_in_the_history() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(20, size=100)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer("w-1").start()
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(1)
        stats = healer.worker.stats
        assert (stats.ledgers_healed, stats.ledgers_without_need, stats.ledgers_deleted) == (1, 0, 0)
        assert (stats.entries_copied, stats.attempts_failed, stats.locks_lost, stats.ledgers_fenced) == (20, 0, 0, 0)
        assert stats.bytes_copied == 20 * 136
        assert (healer.worker.parked, list(healer.worker.current)) == (0, [])
        (event,) = await events(here, "healed")
        assert event.text == f"ledger {writer.ledger_id} is whole again: 20 copies, 2.7 KiB"
        assert START_MS <= event.at_ms <= clock_ms()
        assert event.fields["seconds"] < 1
        assert {name: value for name, value in event.fields.items() if name != "seconds"} == {
            "ledger_id": writer.ledger_id,
            "entries": 20,
            "bytes": 2720,
            "worker": "w-1",
            "reason": "bookie_lost",
        }

    play(scene)


def test_the_history_shows_a_repair_although_the_store_failed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    append, remove = RecoveryRecords.append_history, RecoveryRecords.remove
    failures = {"append": 3, "response": 2, "remove": 1}

    def fail(what: str) -> None:
        if failures[what]:
            failures[what] -= 1
            raise MetadataUnavailable("no connection")

    async def append_later(self: RecoveryRecords, event: HistoryEvent, **options: Any) -> bool:
        fail("append")
        await append(self, event, **options)
        if failures["response"]:
            failures["response"] -= 1
            return (
                False  # it was appended, but the response is lost, and so is the answer to the question whether it was
            )
        return True

    async def remove_later(self: RecoveryRecords, ledger_id: LedgerId, **options: Any) -> None:
        fail("remove")
        await remove(self, ledger_id, **options)

    monkeypatch.setattr(RecoveryRecords, "append_history", append_later)
    monkeypatch.setattr(RecoveryRecords, "remove", remove_later)

    async def scene(here: World) -> None:
        writer = await here.write(5)
        await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(20)
        assert set(failures.values()) == {0}
        (event,) = await events(here, "healed")
        assert event.fields["ledger_id"] == writer.ledger_id
        assert event.at_ms < clock_ms() - 15_000, "the time of the repair"
        assert await here.records.get(writer.ledger_id) is None
        assert healer.worker.parked == 0

    play(scene)


def test_a_ledger_that_lacks_nothing_is_whole_without_a_copy() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5)
        await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(1)
        assert (healer.worker.stats.ledgers_healed, healer.worker.stats.ledgers_without_need) == (1, 1)
        (event,) = await events(here, "healed")
        assert event.text == f"ledger {writer.ledger_id} is whole: nothing had to be copied"

    play(scene)


def test_the_mark_of_a_deleted_ledger_is_removed() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5)
        await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        await here.client.delete(writer.ledger_id)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(1)
        assert (healer.worker.stats.ledgers_healed, healer.worker.stats.ledgers_deleted) == (1, 1)
        (event,) = await events(here, "healed")
        assert event.text == f"ledger {writer.ledger_id} was deleted"

    play(scene)


# --- a ledger that cannot be repaired ---------------------------------------------------------------------------------


def test_a_failed_attempt_is_recorded_with_its_obstacle_and_the_time_of_the_next() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5, size=100)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.state, record.obstacle, record.attempts) == (RecoveryState.BLOCKED, Obstacle.NO_SPARE, 1)
        assert (record.worker, record.last_error) == ("", record.detail)
        assert record.detail.startswith(f"no bookie can replace {lost}: ")
        assert (record.missing_entries, record.missing_bytes) == (5, 500)
        assert record.next_retry_ms is not None
        assert 3_000 < record.next_retry_ms - clock_ms() < 8_000, "about five seconds after the first attempt"
        assert (healer.worker.stats.attempts_failed, healer.worker.parked) == (1, 1)
        again = await here.until_record(writer.ledger_id, lambda r: r.attempts == 2)
        assert again.next_retry_ms is not None
        assert 6_000 < again.next_retry_ms - clock_ms() < 15_000, "the delay doubles"
        assert await events(here, "healed") == []

    play(scene, bookies=3)


def test_a_parked_ledger_is_tried_at_once_on_request() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (gone,) = writer.metadata.last_segment.ensemble
        here.lose(gone)
        await here.add_cookies(*here.ledgers.bookies)
        await here.mark(writer.ledger_id, gone)
        healer = here.healer("w-1").start()
        record = await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert (record.attempts, record.next_retry_ms, record.obstacle) == (1, None, Obstacle.NO_COPY_LEFT)
        await asyncio.sleep(100)
        assert (healer.worker.parked, healer.worker.stats.attempts_failed) == (1, 1)
        healer.worker.retry_now()
        await here.until_record(writer.ledger_id, lambda r: r.attempts == 2, 5)
        (event,) = await events(here, "unrecoverable")
        assert event.text.startswith(f"ledger {writer.ledger_id} cannot be healed: ")
        assert event.fields == {"ledger_id": writer.ledger_id, "worker": "w-1"}

    play(scene)


@pytest.mark.parametrize(("bookies", "reason"), [(("gone:1",), Reason.BOOKIE_LOST), ((), Reason.PLACEMENT)])
def test_a_mark_without_a_record_gets_one(bookies: tuple[str, ...], reason: Reason) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5)
        here.lose(writer.metadata.last_segment.ensemble[0])
        await asyncio.sleep(10)
        await here.marks.mark(writer.ledger_id, bookies)
        mark = await here.marks.get(writer.ledger_id)
        assert mark is not None
        here.healer().start()
        record = await here.until_tried(writer.ledger_id)
        assert (record.reason, record.bookies) == (reason, bookies)
        assert record.first_marked_ms == (mark.ctime_ms or record.first_marked_ms)

    play(scene, bookies=3)


def test_a_defect_during_one_repair_does_not_stop_the_others() -> None:
    async def scene(here: World) -> None:
        broken, other = await here.write(5), await here.write(5)
        for writer in (broken, other):
            await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        healer = here.healer()
        metadata = healer.client.metadata

        async def failing(ledger_id: LedgerId) -> Any:
            if ledger_id == broken.ledger_id:
                raise ValueError("a defect")
            return await metadata(ledger_id)

        healer.client.metadata = failing  # type: ignore[method-assign]
        healer.start()
        await here.until_healed(other.ledger_id)
        await asyncio.sleep(100)
        assert healer.task is not None
        assert not healer.task.done()
        assert await here.is_marked(broken.ledger_id)
        assert healer.worker.parked == 1
        healer.client.metadata = metadata  # type: ignore[method-assign]
        await here.until_healed(broken.ledger_id, limit_s=400)

    play(scene)


# --- changes of a record during an attempt ----------------------------------------------------------------------------


def put_over(found: RecoveryRecord | None, written: RecoveryRecord, known: tuple[str, ...]) -> RecoveryRecord:
    """Return the record after a worker writes `written` while `found` is stored."""
    results: list[RecoveryRecord] = []

    async def scene(here: World) -> None:
        if found is not None:
            await here.records.put(found)
        results.append(await here.healer().worker.put(written, known=known))
        stored = await here.records.get(LedgerId(7))
        assert stored == results[0]

    play(scene)
    return results[0]


WRITTEN = RecoveryRecord(
    LedgerId(7),
    RecoveryState.BACKING_OFF,
    reason=Reason.BOOKIE_LOST,
    next_retry_ms=9,
    first_marked_ms=5,
    bookies=("b1",),
)


def test_a_record_that_does_not_exist_is_created() -> None:
    found = put_over(None, WRITTEN, ("b1",))
    assert found.with_changes(version=NOT_STORED) == WRITTEN


def test_the_first_mark_and_the_bookies_of_the_stored_record_are_kept() -> None:
    stored = RecoveryRecord(LedgerId(7), reason=Reason.BOOKIE_LOST, first_marked_ms=3, bookies=("b1",))
    found = put_over(stored, WRITTEN.with_changes(bookies=()), ("b1", "b2"))
    assert (found.first_marked_ms, found.bookies) == (3, ("b1",))
    assert (found.state, found.next_retry_ms) == (RecoveryState.BACKING_OFF, 9)
    unknown = put_over(stored.with_changes(first_marked_ms=0), WRITTEN, ("b1",))
    assert unknown.first_marked_ms == 5


def test_the_result_of_an_attempt_does_not_apply_to_bookies_that_were_marked_since() -> None:
    stored = RecoveryRecord(LedgerId(7), reason=Reason.BOOKIE_LOST, bookies=("b1", "b2"))
    found = put_over(stored, WRITTEN, ("b1",))
    assert (found.state, found.next_retry_ms, found.bookies) == (RecoveryState.WAITING, None, ("b1", "b2"))
    copying = put_over(stored, WRITTEN.with_changes(state=RecoveryState.COPYING), ("b1",))
    assert copying.state is RecoveryState.COPYING


# --- the report -------------------------------------------------------------------------------------------------------


def test_an_idle_worker_reports_its_state() -> None:
    async def scene(here: World) -> None:
        worker = here.healer("w-1").start().worker
        await asyncio.sleep(20)
        report = worker.report()
        assert (report.name, report.state, report.ledger_id, report.at_ms) == ("w-1", "idle", None, clock_ms())
        assert (report.bytes_done_total, report.entries_done_total, report.bytes_per_s) == (0, 0, 0.0)
        assert (report.foreground_p99_ms, report.budget_bytes_per_s) == (None, 16 * 2**20)
        await here.marks.disable()
        await asyncio.sleep(20)
        assert worker.report().state == "paused"
        (stored,) = await here.records.reports()
        assert (stored.name, stored.state) == ("w-1", "paused")
        assert clock_ms() - stored.at_ms <= 12_000, "it is written again although it has not changed"

    play(scene)


def test_a_process_without_workers_repairs_nothing() -> None:
    async def scene(here: World) -> None:
        healer = here.healer(workers=0).start()
        assert healer.task is not None
        await asyncio.wait([healer.task], timeout=10)
        assert healer.task.done()
        assert await here.records.reports() == []
        assert healer.worker.stats == WorkerStats()

    play(scene)


def test_several_workers_of_a_process_repair_a_ledger_once() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(5)
        await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        healer = here.healer(workers=3).start()
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(60)
        assert healer.worker.stats.ledgers_healed == 1

    play(scene)

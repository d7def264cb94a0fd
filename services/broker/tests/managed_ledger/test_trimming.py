"""Ledgers that are not needed are removed from metadata, then deleted, also if the first attempt fails."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.read_handles import ReadHandles
from bindery_broker.managed_ledger.retention import RetentionRule
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.trimming import Trimmer
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import BinderyError, MetadataUnavailable, TopicFenced, TryAgain
from bindery_core.ids import LedgerId
from bindery_pulsar.message_id import Position

CLOSED_MS = 1_000_000


class FixedCursors:
    """Cursors at fixed positions."""

    def __init__(self, *positions: Position) -> None:
        self.trim_lock = asyncio.Lock()
        self.positions: list[Position] | None = list(positions)
        self.damaged: dict[str, BinderyError] = {}
        self.error: BinderyError | None = None
        self.trimmed_to: list[Position] = []

    @property
    def cursors(self) -> dict[str, Position]:
        return self.known_positions() or {}

    async def positions_for_trimming(self) -> dict[str, Position] | None:
        assert self.trim_lock.locked()
        if self.error is not None:
            raise self.error
        return self.known_positions()

    def known_positions(self) -> dict[str, Position] | None:
        return None if self.positions is None else {f"s{i}": one for i, one in enumerate(self.positions)}

    def before_trim(self, first: Position) -> None:
        assert self.trim_lock.locked()
        self.trimmed_to.append(first)


class Trimming:
    """A topic with the ledgers 0 to 3 of one entry each, all acknowledged, and its trimmer."""

    def __init__(self, ledgers: MemoryLedgers, **settings: Any) -> None:
        self.ledgers = ledgers
        self.listed = LedgerList([LedgerRecord(ledger_id=i, entries=1, closed_ms=CLOSED_MS) for i in range(4)])
        self.cursors = FixedCursors(Position(3, 0))
        self.lock = asyncio.Lock()
        self.written: list[list[int]] = []
        self.fenced: list[BinderyError] = []
        self.write_error: BinderyError | None = None
        self.end: BinderyError | None = None
        self.now_ms = CLOSED_MS
        self.rule: RetentionRule | None = None
        client = self.client = MemoryLedgerClient(ledgers)
        self.handles = ReadHandles(client, count_max=4, timeout_s=2)
        cursors: Any = self.cursors
        self.trimmer = Trimmer(
            topic="t",
            ledgers=self.listed,
            ledgers_lock=self.lock,
            cursors=cursors,
            client=client,
            handles=self.handles,
            settings=ManagedLedgerSettings(**{"operation_timeout_s": 2, **settings}),
            clock=lambda: self.now_ms,
            retention=lambda: self.rule,
            write_ledgers=self._write,
            is_ledger_open=lambda: True,
            check_open=self._check_open,
            on_fenced=self.fenced.append,
        )

    def _check_open(self) -> None:
        assert self.cursors.trim_lock.locked()
        if self.end is not None:
            raise self.end

    async def _write(self, records: Sequence[LedgerRecord]) -> None:
        assert self.lock.locked()
        if self.write_error is not None:
            raise self.write_error
        self.written.append([record.ledger_id for record in records])
        assert len(self.ledgers.ledgers) == 4, "a ledger was deleted before metadata ceased to name it"

    @property
    def listed_ids(self) -> list[int]:
        return [record.ledger_id for record in self.listed]

    @property
    def existing_ids(self) -> list[int]:
        return list(self.ledgers.ledgers)


async def trimming(ledgers: MemoryLedgers, **settings: Any) -> Trimming:
    topic = Trimming(ledgers, **settings)
    for _ in range(4):
        await topic.client.create()
    return topic


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_unneeded_ledgers_are_removed_from_the_list_and_deleted(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.cursors.positions = [Position(3, 0), Position(1, 0)]
    assert await topic.trimmer.trim() == 2
    assert topic.written == [[2, 3]]
    assert topic.listed_ids == topic.existing_ids == [2, 3]
    assert topic.trimmer.deletable == []


async def test_nothing_is_written_if_every_ledger_is_needed(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.cursors.positions = [Position(0, -1)]
    assert await topic.trimmer.trim() == 0
    assert (topic.written, topic.existing_ids) == ([], [0, 1, 2, 3])


async def test_nothing_is_trimmed_while_a_position_is_unknown(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.cursors.positions = None
    topic.trimmer.deletable = [0]
    assert await topic.trimmer.trim() == 0
    assert (topic.written, topic.existing_ids, topic.trimmer.deletable) == ([], [0, 1, 2, 3], [0])


@pytest.mark.parametrize(("after_s", "count"), [(9.999, 0), (10, 3)])
async def test_acknowledged_ledgers_are_kept_for_their_retention_time(
    ledgers: MemoryLedgers, after_s: float, count: int
) -> None:
    topic = await trimming(ledgers, retention_acked_s=10, retention_unsubscribed_s=20)
    topic.now_ms += round(1000 * after_s)
    assert await topic.trimmer.trim() == count


@pytest.mark.parametrize(("after_s", "count"), [(19.999, 0), (20, 3)])
async def test_ledgers_of_a_topic_without_subscriptions_have_another_retention_time(
    ledgers: MemoryLedgers, after_s: float, count: int
) -> None:
    topic = await trimming(ledgers, retention_acked_s=10, retention_unsubscribed_s=20)
    topic.cursors.positions = []
    topic.now_ms += round(1000 * after_s)
    assert await topic.trimmer.trim() == count


async def test_a_policy_replaces_both_settings(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers, retention_acked_s=10, retention_unsubscribed_s=20)
    topic.rule = RetentionRule(5, None)
    topic.now_ms += 4_999
    assert [one.code for one in topic.trimmer.explain()] == ["retention"] * 3 + ["open"]
    assert await topic.trimmer.trim() == 0
    topic.cursors.positions = []
    topic.now_ms += 1
    assert [one.code for one in topic.trimmer.explain()] == ["deletable"] * 3 + ["open"]
    assert await topic.trimmer.trim() == 3


async def test_ledgers_are_not_explained_by_a_position_that_is_unknown(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.cursors.positions = None
    topic.cursors.damaged = {"broken": TryAgain("made up")}
    verdict = topic.trimmer.explain()[0]
    assert (verdict.code, verdict.subscription) == ("unsettled", "broken")
    assert verdict.detail == "the position of subscription broken is unknown"


async def test_a_closed_topic_is_not_trimmed(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.end = TryAgain("closed")
    with pytest.raises(TryAgain, match="closed"):
        await topic.trimmer.trim()
    assert (topic.written, topic.listed_ids) == ([], [0, 1, 2, 3])


async def test_a_list_that_cannot_be_written_is_unchanged(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.write_error = MetadataUnavailable("made up")
    with pytest.raises(MetadataUnavailable):
        await topic.trimmer.trim()
    assert (topic.listed_ids, topic.existing_ids, topic.fenced) == ([0, 1, 2, 3], [0, 1, 2, 3], [])
    topic.write_error = None
    assert await topic.trimmer.trim() == 3


async def test_a_lost_topic_is_reported_and_deletes_nothing(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.write_error = TopicFenced("made up")
    with pytest.raises(TopicFenced):
        await topic.trimmer.trim()
    assert topic.fenced == [topic.write_error]
    assert (topic.existing_ids, topic.trimmer.deletable) == ([0, 1, 2, 3], [])


async def test_a_ledger_that_cannot_be_deleted_is_deleted_by_a_later_call(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    ledgers.fail_next("delete", MetadataUnavailable("made up"))
    assert await topic.trimmer.trim() == 3
    assert (topic.existing_ids, topic.trimmer.deletable) == ([0, 3], [0])
    assert await topic.trimmer.trim() == 0
    assert (topic.existing_ids, topic.trimmer.deletable) == ([3], [])


async def test_a_ledger_is_not_readable_any_more_once_it_is_deleted(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    released: list[int] = []

    class Handle:
        ledger_id = LedgerId(0)

        async def release(self) -> None:
            released.append(self.ledger_id)

    await topic.handles.put(Handle())  # type: ignore[arg-type]
    assert await topic.trimmer.delete_ledger(0) is True
    assert (released, topic.existing_ids) == ([0], [1, 2, 3])


async def test_a_deletion_without_an_answer_counts_as_failed(
    ledgers: MemoryLedgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await trimming(ledgers)

    async def silent(ledger_id: LedgerId) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(topic.client, "delete", silent)
    began = asyncio.get_running_loop().time()
    assert await topic.trimmer.delete_ledger(0) is False
    assert asyncio.get_running_loop().time() == began + 2


# --- in the background


async def test_nothing_is_trimmed_in_the_background_before_the_start(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.trimmer.trim_soon()
    await asyncio.sleep(0.1)
    assert topic.listed_ids == [0, 1, 2, 3]
    topic.trimmer.start()
    await until(lambda: topic.existing_ids == [3])


async def test_the_background_trims_again_after_an_error(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.write_error = MetadataUnavailable("made up")
    topic.trimmer.start()
    await asyncio.sleep(0.1)
    assert topic.listed_ids == [0, 1, 2, 3]
    topic.write_error = None
    topic.trimmer.trim_soon()
    await until(lambda: topic.existing_ids == [3])


async def test_one_background_task_runs_at_a_time(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    before = len(asyncio.all_tasks())
    async with topic.lock:
        topic.trimmer.start()
        topic.trimmer.trim_soon()
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) == before + 1
    await until(lambda: topic.existing_ids == [3])


async def test_a_stop_cancels_the_background_task_and_prevents_others(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    async with topic.lock:
        topic.trimmer.start()
        await asyncio.sleep(0.1)
        topic.trimmer.stop()
        await asyncio.sleep(0.1)
    topic.trimmer.trim_soon()
    await asyncio.sleep(0.1)
    assert (topic.listed_ids, topic.existing_ids) == ([0, 1, 2, 3], [0, 1, 2, 3])
    topic.trimmer.stop()


# --- when the topic closes


async def test_remaining_ledgers_are_deleted_when_the_topic_closes(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.trimmer.deletable = [0, 2]
    await topic.trimmer.delete_remaining()
    assert (topic.existing_ids, topic.trimmer.deletable) == ([1, 3], [])


async def test_the_deletion_at_the_close_ends_at_the_first_error(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.trimmer.deletable = [0, 1, 2]
    ledgers.fail_next("delete", MetadataUnavailable("made up"))
    await topic.trimmer.delete_remaining()
    assert (topic.existing_ids, topic.trimmer.deletable) == ([0, 1, 2, 3], [0, 1, 2])


async def test_the_close_does_not_wait_longer_than_the_time_limit_for_a_trim(ledgers: MemoryLedgers) -> None:
    topic = await trimming(ledgers)
    topic.trimmer.deletable = [0]
    began = asyncio.get_running_loop().time()
    async with topic.cursors.trim_lock:
        await topic.trimmer.delete_remaining()
    assert asyncio.get_running_loop().time() == began + 2
    assert topic.existing_ids == [0, 1, 2, 3]

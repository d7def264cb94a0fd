"""The switch to the next ledger: its steps, its retries, and the new ledgers of a switch that fails."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.ownership_proof import OwnershipCheck, OwnershipProof
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.writing.ledger_operations import LedgerOperations
from bindery_broker.managed_ledger.writing.switch import LedgerSwitch
from bindery_client.ledger.api import ReadHandle, WriteHandle
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import (
    AddTimeout,
    BinderyError,
    BookieUnavailable,
    LedgerClosed,
    LedgerFenced,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchLedger,
    NotEnoughBookies,
    TopicFenced,
)
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import LedgerId

NOW_MS = 1_700_000_000_000
CLOSED_BEFORE = LedgerRecord(ledger_id=-5, entries=3, size=30, closed_ms=1)
SETTINGS = ManagedLedgerSettings(retry_pause_s=1, retry_pause_s_max=4, operation_timeout_s=20)


async def owner() -> bool:
    return True


async def replaced() -> bool:
    return False


class RecordingSender:
    """Sends nothing. `steps` has the calls of the switch in order."""

    def __init__(self) -> None:
        self.handle: WriteHandle | None = None
        self.failure: BinderyError | None = None
        self.steps: list[Any] = []
        self.lost_when_drained = False
        self.fails_when_drained: BinderyError | None = None
        self.lost_after_pauses: int | None = None

    def fail(self, error: BinderyError) -> None:
        self.failure = error

    def pause(self) -> WriteHandle:
        self.steps.append("pause")
        assert self.handle is not None
        return self.handle

    async def drained(self) -> None:
        self.steps.append("drained")
        if self.lost_when_drained:
            raise TopicFenced("the topic was lost")
        self.failure = self.failure or self.fails_when_drained

    def settle(self, entries: int) -> None:
        self.steps.append(("settle", entries))

    def expire(self, error: BinderyError) -> None:
        self.steps.append(("expire", type(error), asyncio.get_running_loop().time()))
        if self.lost_after_pauses is not None:
            self.lost_after_pauses -= 1
            if self.lost_after_pauses < 0:
                raise TopicFenced("the topic was lost")

    @property
    def expired(self) -> list[tuple[type[BinderyError], float]]:
        """The error and the time of each retry."""
        return [(step[1], step[2]) for step in self.steps if step[0] == "expire"]


class Switching:
    """A topic whose current ledger 0 has two entries of 5 bytes, and a switch."""

    def __init__(self, ledgers: MemoryLedgers, *, check: OwnershipCheck | None = None) -> None:
        self.ledgers = ledgers
        self.client = MemoryLedgerClient(ledgers)
        self.sender = RecordingSender()
        self.listed = LedgerList([CLOSED_BEFORE, LedgerRecord(ledger_id=0)])
        self.recovered: list[ReadHandle] = []
        self.stored: list[list[LedgerRecord]] = []
        self.store_errors: list[BinderyError | None] = []
        """Errors of the next writes of the list of ledgers."""
        self.names_despite_error = True
        """Whether a failing write asks for the list, as the real one does unless it fails earlier."""
        self.switch = LedgerSwitch(
            "t",
            self.sender,
            LedgerOperations("t", self.client, SETTINGS, {}),
            ledgers=self.listed,
            settings=SETTINGS,
            clock=lambda: NOW_MS,
            ownership=OwnershipProof(check, timeout_s=20),
            store_ledgers=self._store,
            on_recovered=self._on_recovered,
        )

    async def begin(self, *payloads: bytes) -> "Switching":
        handle = await self.client.create()
        if payloads:
            await handle.add_many(payloads)
        self.listed.grow(entries=len(payloads), size=sum(map(len, payloads)))
        self.sender.handle = handle
        return self

    async def _store(self, records_of: Callable[[], Sequence[LedgerRecord]]) -> None:
        error = self.store_errors.pop(0) if self.store_errors else None
        if error is None or self.names_despite_error:
            records = list(records_of())
        if error is not None:
            raise error
        self.stored.append(records)
        self.listed.assign(records)

    async def _on_recovered(self, handle: ReadHandle) -> None:
        assert self.sender.steps[-1][0] != "settle", "entries are readable before they are confirmed"
        self.recovered.append(handle)

    def ids(self) -> list[int]:
        return list(self.ledgers.ledgers)


async def switching(ledgers: MemoryLedgers, *payloads: bytes, check: OwnershipCheck | None = None) -> Switching:
    return await Switching(ledgers, check=check).begin(*payloads)


async def ran(topic: Switching) -> tuple[LedgerRecord, WriteHandle]:
    result = await topic.switch.run()
    assert result is not None
    return result


# --- a full ledger


async def test_a_full_ledger_is_closed_and_the_next_one_is_named(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"abc", b"de")
    closed, successor = await ran(topic)
    assert closed == LedgerRecord(ledger_id=0, entries=2, size=5, closed_ms=NOW_MS)
    assert successor.ledger_id == 1
    assert topic.stored == [[CLOSED_BEFORE, closed, LedgerRecord(ledger_id=1)]]
    assert topic.sender.steps == ["pause", "drained"]
    assert topic.recovered == []
    assert ledgers.ledgers[LedgerId(0)].metadata.state is LedgerState.CLOSED
    assert await successor.add(b"next") == 0


async def test_an_empty_ledger_leaves_the_list(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers)
    closed, _ = await ran(topic)
    assert closed.entries == 0
    assert topic.stored == [[CLOSED_BEFORE, LedgerRecord(ledger_id=1)]]


async def test_a_roll_is_postponed_if_no_ledger_can_be_created(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    ledgers.fail_next("create", NotEnoughBookies("made up"))
    assert await topic.switch.run() is None
    assert topic.sender.steps == []
    assert (topic.stored, topic.ids()) == ([], [0])


async def test_a_ledger_that_fails_while_the_next_one_cannot_be_created_is_recovered(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    inner_create = topic.client.create

    async def create(**options: Any) -> Any:
        topic.sender.failure = topic.sender.failure or AddTimeout("made up")
        return await inner_create(**options)

    topic.client.create = create  # type: ignore[method-assign]
    ledgers.fail_next("create", NotEnoughBookies("made up"))
    closed, successor = await ran(topic)
    assert (closed.entries, successor.ledger_id) == (1, 1)
    assert topic.sender.steps == ["pause", "drained", ("settle", 1)]


async def test_a_ledger_that_cannot_be_closed_is_recovered_and_the_prepared_one_is_used(
    ledgers: MemoryLedgers,
) -> None:
    topic = await switching(ledgers, b"abc", b"de")
    ledgers.fail_next("close", BookieUnavailable("made up"))
    closed, successor = await ran(topic)
    assert closed == LedgerRecord(ledger_id=0, entries=2, size=5, closed_ms=NOW_MS)
    assert isinstance(topic.sender.failure, BookieUnavailable)
    assert topic.sender.steps == ["pause", "drained", ("settle", 2)]
    assert (successor.ledger_id, topic.ids()) == (1, [0, 1])


# --- a failed ledger


async def test_a_failed_ledger_is_abandoned_recovered_and_settled(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"abc", b"de")
    ledgers.ledgers[LedgerId(0)].store([b"in flight"])
    topic.sender.failure = AddTimeout("made up")
    closed, successor = await ran(topic)
    assert closed == LedgerRecord(ledger_id=0, entries=3, size=14, closed_ms=NOW_MS)
    assert topic.sender.steps == ["pause", "drained", ("settle", 3)]
    assert [handle.ledger_id for handle in topic.recovered] == [0]
    assert topic.stored == [[CLOSED_BEFORE, closed, LedgerRecord(ledger_id=1)]]
    assert (successor.ledger_id, topic.ids()) == (1, [0, 1])
    assert topic.sender.handle is not None
    with pytest.raises(LedgerClosed):  # not LedgerFenced: it was abandoned before the recovery
        await topic.sender.handle.add(b"late")


async def test_no_ledger_is_prepared_for_a_failed_one(ledgers: MemoryLedgers) -> None:
    """Its recovery may take long, and may end the topic."""
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    topic.sender.lost_when_drained = True
    with pytest.raises(TopicFenced):
        await topic.switch.run()
    assert topic.ids() == [0]


async def test_a_ledger_that_fails_while_adds_complete_is_recovered(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.fails_when_drained = AddTimeout("made up")
    closed, successor = await ran(topic)
    assert topic.sender.steps == ["pause", "drained", ("settle", 1)]
    assert (closed.entries, successor.ledger_id) == (1, 1)


async def test_a_recovery_is_repeated_with_growing_pauses(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    ledgers.fail_next("open", BookieUnavailable("made up"), count=5)
    began = asyncio.get_running_loop().time()
    await ran(topic)
    assert topic.sender.expired == [(BookieUnavailable, began + after) for after in (1, 3, 7, 11, 15)]
    assert topic.sender.steps[-1] == ("settle", 1)
    assert topic.switch.obstacle is None


async def test_the_obstacle_is_the_error_that_delays_the_switch(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    assert topic.switch.obstacle is None
    error = BookieUnavailable("made up")
    ledgers.fail_next("open", error)
    running = asyncio.ensure_future(topic.switch.run())
    await asyncio.sleep(0.5)
    assert topic.switch.obstacle is error
    await running
    assert topic.switch.obstacle is None


async def test_a_deleted_ledger_ends_the_switch(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    await topic.client.delete(LedgerId(0))
    with pytest.raises(NoSuchLedger):
        await topic.switch.run()
    assert topic.sender.expired == []
    assert topic.stored == []


async def test_the_switch_ends_when_the_topic_is_lost_during_a_retry(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    topic.sender.lost_after_pauses = 1
    ledgers.fail_next("open", BookieUnavailable("made up"), count=10)
    with pytest.raises(TopicFenced, match="the topic was lost"):
        await topic.switch.run()
    assert len(topic.sender.expired) == 2


# --- ownership


async def test_a_fenced_ledger_of_the_owner_is_recovered(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a", check=owner)
    topic.sender.failure = LedgerFenced("made up")
    closed, successor = await ran(topic)
    assert (closed.entries, successor.ledger_id) == (1, 1)
    assert topic.sender.steps == ["pause", "drained", ("settle", 1)]


@pytest.mark.parametrize("check", [None, replaced])
async def test_a_fenced_ledger_of_another_broker_is_left_alone(
    ledgers: MemoryLedgers, check: OwnershipCheck | None
) -> None:
    topic = await switching(ledgers, b"a", check=check)
    failure = topic.sender.failure = LedgerFenced("made up")
    with pytest.raises(TopicFenced, match="another broker has taken the topic over") as raised:
        await topic.switch.run()
    assert raised.value.__cause__ is failure
    assert raised.value.facts == {"topic": "t"}
    assert not ledgers.ledgers[LedgerId(0)].is_closed
    assert (topic.sender.steps, topic.ids()) == (["pause", "drained"], [0])


async def test_only_a_fenced_ledger_requires_the_proof_of_ownership(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a", check=replaced)
    topic.sender.failure = AddTimeout("made up")
    assert (await ran(topic))[0].entries == 1


async def test_the_owner_is_determined_again_with_growing_pauses(ledgers: MemoryLedgers) -> None:
    errors: list[BinderyError] = [MetadataUnavailable("made up")] * 4

    async def asked() -> bool:
        if errors:
            raise errors.pop()
        return True

    topic = await switching(ledgers, b"a", check=asked)
    topic.sender.failure = LedgerFenced("made up")
    began = asyncio.get_running_loop().time()
    await ran(topic)
    assert topic.sender.expired == [(MetadataUnavailable, began + after) for after in (1, 3, 7, 11)]


async def test_the_topic_is_lost_with_the_sixth_fenced_ledger_without_an_entry(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, check=owner)
    for _ in range(5):
        topic.sender.failure = LedgerFenced("made up")
        _, topic.sender.handle = await ran(topic)
    topic.sender.failure = LedgerFenced("made up")
    with pytest.raises(TopicFenced):
        await topic.switch.run()


async def test_a_stored_entry_ends_the_series_of_fenced_ledgers(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, check=owner)
    for _ in range(2):
        for _ in range(5):
            topic.sender.failure = LedgerFenced("made up")
            _, topic.sender.handle = await ran(topic)
        topic.switch.entry_stored()
    assert topic.listed.current.ledger_id == 10


# --- the list of ledgers


async def test_the_list_is_written_again_with_the_same_new_ledger(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.store_errors = [MetadataUnavailable("made up"), MetadataOutcomeUnknown("made up"), None]
    began = asyncio.get_running_loop().time()
    _, successor = await ran(topic)
    assert topic.sender.expired == [(MetadataUnavailable, began + 1), (MetadataOutcomeUnknown, began + 3)]
    assert [[record.ledger_id for record in records] for records in topic.stored] == [[-5, 0, 1]]
    assert (successor.ledger_id, topic.ids()) == (1, [0, 1])
    assert topic.switch.obstacle is None


async def test_a_ledger_is_created_when_bookies_are_back(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    ledgers.fail_next("create", NotEnoughBookies("made up"), count=2)
    began = asyncio.get_running_loop().time()
    _, successor = await ran(topic)
    assert topic.sender.expired == [(NotEnoughBookies, began + 1), (NotEnoughBookies, began + 3)]
    assert successor.ledger_id == 1


# --- new ledgers of a switch that failed


async def test_the_prepared_ledger_is_deleted_if_the_topic_is_lost_while_adds_complete(
    ledgers: MemoryLedgers,
) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.lost_when_drained = True
    with pytest.raises(TopicFenced):
        await topic.switch.run()
    assert topic.ids() == [0, 1]
    await topic.switch.discard_unused(delete=True)
    assert topic.ids() == [0]


async def test_unused_ledgers_are_only_abandoned_on_request(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.lost_when_drained = True
    with pytest.raises(TopicFenced):
        await topic.switch.run()
    await topic.switch.discard_unused(delete=False)
    assert topic.ids() == [0, 1]
    writer = ledgers.ledgers[LedgerId(1)].writer
    assert writer is not None
    with pytest.raises(LedgerClosed):
        await writer.add(b"late")
    await topic.switch.discard_unused(delete=True)  # each ledger is discarded once
    assert topic.ids() == [0, 1]


async def test_a_switch_that_is_cancelled_while_adds_complete_leaves_the_prepared_ledger_to_be_deleted(
    ledgers: MemoryLedgers,
) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.drained = asyncio.get_running_loop().create_future  # type: ignore[assignment]
    running = asyncio.ensure_future(topic.switch.run())
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await topic.switch.discard_unused(delete=True)
    assert topic.ids() == [0]


@pytest.mark.parametrize(
    ("error", "is_deleted"),
    [
        (MetadataUnavailable("made up"), True),  # certainly not written
        (MetadataOutcomeUnknown("made up"), False),
    ],
)
async def test_a_new_ledger_that_the_znode_may_name_is_never_deleted(
    ledgers: MemoryLedgers, error: BinderyError, is_deleted: bool
) -> None:
    topic = await switching(ledgers, b"a")
    topic.store_errors = [error]
    topic.sender.lost_after_pauses = 0
    with pytest.raises(TopicFenced, match="the topic was lost"):
        await topic.switch.run()
    await topic.switch.discard_unused(delete=True)
    assert topic.ids() == ([0] if is_deleted else [0, 1])


async def test_a_new_ledger_is_deleted_if_the_znode_belongs_to_another_broker(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.store_errors = [TopicFenced("made up")]
    with pytest.raises(TopicFenced, match="made up"):
        await topic.switch.run()
    assert topic.sender.expired == []
    await topic.switch.discard_unused(delete=True)
    assert topic.ids() == [0]


async def test_a_new_ledger_is_deleted_if_its_name_never_reached_the_write(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.names_despite_error = False
    topic.store_errors = [MetadataOutcomeUnknown("made up")]
    topic.sender.lost_after_pauses = 0
    with pytest.raises(TopicFenced, match="the topic was lost"):
        await topic.switch.run()
    await topic.switch.discard_unused(delete=True)
    assert topic.ids() == [0]


async def test_nothing_is_left_to_discard_if_no_ledger_was_created(ledgers: MemoryLedgers) -> None:
    topic = await switching(ledgers, b"a")
    topic.sender.failure = AddTimeout("made up")
    topic.sender.lost_after_pauses = 0
    ledgers.fail_next("create", NotEnoughBookies("made up"))
    with pytest.raises(TopicFenced):
        await topic.switch.run()
    await topic.switch.discard_unused(delete=True)
    assert topic.ids() == [0]

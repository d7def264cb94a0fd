"""Closing records: which ledgers are checked and when, what is marked, and when a record is removed."""

import asyncio
import itertools
import random
from typing import Any

import pytest
from auditor_world import LAYOUT, World, WorldClient
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import BookieUnavailable, Corrupt, MetadataUnavailable, NoSuchLedger
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.recovery.recovery_records import Reason
from bindery_recovery.checks.closing_check import CHECKS_PER_S, POLL_S, Finding
from bindery_recovery.checks.replica_check import Lack, find_lacks
from scripted import RANDOM_BOOKIES, ledger, random_ledger
from simulated import simulate

ON = ("b1", "b2", "b3")
SOON_S = 30.0
"""Seconds after the start of an auditor that cover its quiet time, its first audit and a check."""


async def noted(world: World, *ledger_ids: int) -> ClosingRecords:
    notes = ClosingRecords(world.store)
    for ledger_id in ledger_ids:
        await notes.add(LedgerId(ledger_id), ClosingCause.RECOVERED)
    return notes


async def make(count: int, bookies: int = 4) -> World:
    return await World.make(bookies, ledgers={n: ledger(ON) for n in range(count)})


def test_ledgers_with_missing_entries_are_marked_and_other_records_are_removed() -> None:
    async def scenario() -> None:
        world = await make(5)
        notes = await noted(world, 0, 1, 2, 3, 99)
        world.lacks(1, "b2", [(0, 4), (5, 5)])
        world.lacks(2, "b1", [(0, 9)])
        world.lacks(2, "b3", NoSuchLedger(ledger_id=2))
        world.lacks(4, "b1", [(0, 9)])  # it has no closing record
        running = await world.start_auditor()
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {1: ("b2",), 2: ("b1", "b3")}
        record = await world.records.get(LedgerId(2))
        assert record is not None
        assert (record.reason, record.missing_entries, record.missing_bytes) == (Reason.ENTRY_MISSING, 11, 1100)
        assert await notes.ledger_ids() == [1, 2], "a marked ledger has not been found whole yet"
        assert running.auditor.state.closings.pending == 2
        findings = running.auditor.state.closings.findings
        assert (findings["whole"], findings["deleted"]) == (2, 1), "ledgers 0 and 3; ledger 99"
        await heal(world, 1)
        await asyncio.sleep(10)
        assert await notes.ledger_ids() == [2]
        assert await world.marked() == {2: ("b1", "b3")}

    simulate(scenario())


async def heal(world: World, ledger_id: int) -> None:
    world.entries = {key: held for key, held in world.entries.items() if key[0] != ledger_id}
    world.replicas = {key: verdict for key, verdict in world.replicas.items() if key[0] != ledger_id}
    held = await world.marks.lock(LedgerId(ledger_id))
    assert held is not None
    assert await world.marks.mark_replicated(held)


def test_a_ledger_is_marked_again_if_its_mark_was_removed_but_entries_are_missing() -> None:
    """As if a worker had checked the ledger before it was closed."""

    async def scenario() -> None:
        world = await make(2)
        await noted(world, 1)
        world.lacks(1, "b2", [(0, 4)])
        await world.start_auditor()
        await asyncio.sleep(SOON_S)
        held = await world.marks.lock(LedgerId(1))
        assert held is not None
        assert await world.marks.mark_replicated(held)
        assert await world.marked() == {}
        await asyncio.sleep(10)
        assert await world.marked() == {1: ("b2",)}

    simulate(scenario())


def test_a_marked_ledger_is_not_checked_again_while_its_mark_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LedgerId] = []
    entries_on = WorldClient.entries_on

    async def counted(self: WorldClient, ledger_id: LedgerId, *arguments: Any, **options: Any) -> Any:
        asked.append(ledger_id)
        return await entries_on(self, ledger_id, *arguments, **options)

    monkeypatch.setattr(WorldClient, "entries_on", counted)

    async def scenario() -> None:
        world = await make(2)
        await noted(world, 1)
        world.lacks(1, "b2", [(0, 4)])
        running = await world.start_auditor()
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {1: ("b2",)}
        assert asked == [LedgerId(1)] * 3, "one request to each bookie"
        await asyncio.sleep(60)
        assert len(asked) == 3
        assert running.auditor.state.closings.findings["marked"] > 10, "only the mark is polled"

    simulate(scenario())


@pytest.mark.parametrize("silence", ["error", "limbo", "hangs", "disk"])
def test_an_uncertain_answer_keeps_the_record_and_makes_no_mark(silence: str) -> None:
    async def scenario() -> None:
        world = await World.make(4, ledgers={0: ledger(("b1", "b3", "b4")), 1: ledger(ON)})
        notes = await noted(world, 0, 1)
        if silence == "error":
            world.entries[1, "b2"] = BookieUnavailable("no answer")
        elif silence == "hangs":
            world.entries[1, "b2"] = None
        elif silence == "disk":  # it has the listed entries only in memory
            world.stalled = {"b2"}
        else:
            world.lacks(1, "b2", [(0, 4)])
            world.replicas[1, "b2"] = "limbo"
        await world.start_auditor()
        await asyncio.sleep(400)
        assert await world.marked() == {}
        assert await notes.ledger_ids() == [1]
        await world.marks.prepare()
        world.entries.clear()
        world.replicas.clear()
        world.stalled.clear()
        await asyncio.sleep(200)
        assert await notes.ledger_ids() == []

    simulate(scenario())


def test_the_pause_between_checks_of_a_ledger_doubles_up_to_its_maximum() -> None:
    async def scenario() -> None:
        world = await make(1)
        await noted(world, 0)
        world.entries[0, "b2"] = BookieUnavailable("no answer")
        running = await world.start_auditor()
        findings = running.auditor.state.closings.findings
        loop = asyncio.get_running_loop()
        times: list[float] = []
        while len(times) < 6:
            await asyncio.sleep(0.1)
            times += [loop.time()] * (findings.get(Finding.UNANSWERED, 0) - len(times))
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        for pause_s, expected_s in zip(pauses, (5, 10, 20, 30, 30), strict=True):
            assert expected_s - 0.2 <= pause_s <= expected_s + POLL_S + 0.5, pauses

    simulate(scenario())


def test_an_absent_bookie_is_waited_for_and_checked_at_once_when_it_returns() -> None:
    async def scenario() -> None:
        world = await make(3)
        notes = await noted(world, 0, 1, 2)
        world.lacks(1, "b2", [(0, 4)])
        world.lacks(2, "b1", [(0, 4)])
        await world.start_auditor(delay_s=10_000)
        await asyncio.sleep(2)
        await world.stop_bookie("b2")
        await asyncio.sleep(900)
        assert await world.marked() == {2: ("b1",)}, "entries missing on other bookies are marked at once"
        assert await notes.ledger_ids() == [0, 1, 2]
        await world.start_bookie("b2")
        await asyncio.sleep(10)
        assert await world.marked() == {1: ("b2",), 2: ("b1",)}
        assert await notes.ledger_ids() == [1, 2]

    simulate(scenario())


def test_a_bookie_that_does_not_answer_does_not_delay_checks_of_other_bookies() -> None:
    async def scenario() -> None:
        world = await World.make(4, ledgers={n: ledger(ON if n < 100 else ("b1", "b3", "b4")) for n in range(200)})
        notes = await noted(world, *range(200))
        world.stalled = {"b2"}
        world.lacks(99, "b1", [(0, 4)])
        await world.start_auditor()
        await asyncio.sleep(SOON_S + 20)
        assert await notes.ledger_ids() == list(range(100))
        assert await world.marked() == {99: ("b1",)}

    simulate(scenario())


def test_a_record_is_kept_until_its_ledger_is_closed() -> None:
    async def scenario() -> None:
        world = await make(0)
        await world.add_ledger(1, ledger(ON, last=None))
        notes = await noted(world, 1)
        world.lacks(1, "b2", [(0, 4)])
        running = await world.start_auditor()
        await asyncio.sleep(100)
        assert await world.marked() == {}
        assert await notes.ledger_ids() == [1]
        assert running.auditor.state.closings.pending == 1
        await world.manager.update(LedgerId(1), lambda _: ledger(ON))
        await asyncio.sleep(125)
        assert await world.marked() == {1: ("b2",)}

    simulate(scenario())


def test_while_recovery_is_disabled_no_record_is_processed() -> None:
    async def scenario() -> None:
        world = await make(2)
        notes = await noted(world, 0, 1)
        world.lacks(1, "b2", [(0, 4)])
        await world.marks.disable()
        await world.start_auditor()
        await asyncio.sleep(1000)
        assert await world.marked() == {}
        assert await notes.ledger_ids() == [0, 1]
        await world.marks.enable()
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {1: ("b2",)}
        assert await notes.ledger_ids() == [1]

    simulate(scenario())


def test_the_next_leader_continues_and_the_previous_one_writes_nothing() -> None:
    async def scenario() -> None:
        world = await make(2)
        notes = await noted(world, 0)
        world.entries[0, "b2"] = BookieUnavailable("no answer")
        first = await world.start_auditor("auditor-1")
        await asyncio.sleep(SOON_S)
        await first.kill()
        world.lacks(0, "b2", [(0, 4)])
        await world.start_auditor("auditor-2")
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {0: ("b2",)}
        assert await notes.ledger_ids() == [0]

    simulate(scenario())


def test_a_ledger_that_cannot_be_checked_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        world = await make(4)
        notes = await noted(world, 0, 1, 2, 3)
        await world.store.set(LAYOUT.ledger(LedgerId(0)), b"garbage", version=None)
        world.entries[1, "b1"] = ValueError("a fault of ours")
        world.entries[2, "b1"] = Corrupt("half a list")
        running = await world.start_auditor()
        running.store.fail_next(MetadataUnavailable("away"), matching=lambda _, path: "closings" in path)
        await asyncio.sleep(SOON_S)
        assert await notes.ledger_ids() == [0, 1, 2]
        assert await world.marked() == {}
        findings = running.auditor.state.closings.findings
        assert {"unreadable", "failed", "unanswered", "whole"} == findings.keys()

    simulate(scenario())


def test_many_records_are_processed_at_a_limited_rate() -> None:
    async def scenario() -> None:
        world = await make(1500)
        notes = await noted(world, *range(1500))
        await world.start_auditor()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(SOON_S / 2)
        began = loop.time()
        while await notes.ledger_ids():
            await asyncio.sleep(1)
        assert 1500 / CHECKS_PER_S - SOON_S / 2 < loop.time() - began < 3 * 1500 / CHECKS_PER_S
        assert await world.store.children("/bindery/recovery/closings") == []

    simulate(scenario())


@pytest.mark.parametrize("seed", range(200))
def test_lacks_found_by_ranges_equal_those_found_entry_by_entry(seed: int) -> None:
    rng = random.Random(seed)
    metadata = random_ledger(rng)
    chance = rng.choice((0.5, 0.9, 1.0))
    entries = {bookie_id: {e for e in range(60) if rng.random() < chance} for bookie_id in RANDOM_BOOKIES}
    missing: dict[BookieId, list[int]] = {}
    quorums = {"ensemble_size": metadata.ensemble_size, "write_quorum": metadata.write_quorum}
    for entry_id in range(metadata.last_entry_id + 1):
        ensemble = metadata.segment_of(entry_id).ensemble  # type: ignore[arg-type]
        for index in write_set(entry_id=entry_id, **quorums):
            if entry_id not in entries[ensemble[index]]:
                missing.setdefault(ensemble[index], []).append(entry_id)
    runs = {bookie_id: [(e, 1) for e in sorted(held)] for bookie_id, held in entries.items()}
    assert find_lacks(metadata, runs) == {b: Lack(len(ids), ids[0]) for b, ids in missing.items()}
    some = BookieId("b3")
    assert some not in find_lacks(metadata, {**runs, some: None})


def test_overlapping_ranges_neither_hide_a_gap_nor_create_one() -> None:
    metadata = ledger(("b1",), last=19, ack_quorum=1)
    b1 = BookieId("b1")
    assert find_lacks(metadata, {b1: [(0, 12), (3, 4), (10, 5)]}) == {b1: Lack(5, 15)}
    assert find_lacks(metadata, {b1: [(0, 12), (3, 4), (10, 15)]}) == {}
    assert find_lacks(metadata, {b1: []}) == {b1: Lack(20, 0)}
    assert find_lacks(ledger(("b1",), last=-1, ack_quorum=1), {b1: [(0, 1)]}) == {}


def test_a_replica_that_turns_out_to_exist_causes_no_mark() -> None:
    async def scenario() -> None:
        world = await make(1)
        notes = await noted(world, 0)
        world.entries[0, "b2"] = [(0, 4)]  # the other entries are stored, but not listed
        await world.start_auditor()
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {}
        assert await notes.ledger_ids() == [0]
        assert world.replicas.get((0, "b2"), Verdict.GOOD) is Verdict.GOOD

    simulate(scenario())

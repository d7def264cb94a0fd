"""Noted ledgers: what is looked at and when, what is marked, and when a note goes."""

import asyncio
import random

import pytest
from auditor_world import LAYOUT, World
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import BookieUnavailable, Corrupt, MetadataUnavailable, NoSuchLedger
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.recovery.recovery_records import Reason
from bindery_recovery.checks.closing_check import CHECKS_PER_S
from bindery_recovery.checks.replica_check import Lack, find_lacks
from scripted import LOT_BOOKIES, ledger, ledger_by_lot
from simulated import simulate

ON = ("b1", "b2", "b3")
SOON_S = 30.0
"""From the start of an auditor: its quiet time, its first audit, and a look."""


async def noted(world: World, *ledger_ids: int) -> ClosingRecords:
    notes = ClosingRecords(world.store)
    for ledger_id in ledger_ids:
        await notes.add(LedgerId(ledger_id), ClosingCause.RECOVERED)
    return notes


async def make(count: int, bookies: int = 4) -> World:
    return await World.make(bookies, ledgers={n: ledger(ON) for n in range(count)})


def test_what_lacks_is_marked_and_the_notes_of_whole_and_deleted_ledgers_go() -> None:
    async def scenario() -> None:
        world = await make(5)
        notes = await noted(world, 0, 1, 2, 3, 99)
        world.lacks(1, "b2", [(0, 4), (5, 5)])
        world.lacks(2, "b1", [(0, 9)])
        world.lacks(2, "b3", NoSuchLedger(ledger_id=2))
        world.lacks(4, "b1", [(0, 9)])  # nobody noted it
        running = await world.start_auditor()
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {1: ("b2",), 2: ("b1", "b3")}
        record = await world.records.get(LedgerId(2))
        assert record is not None
        assert (record.reason, record.missing_entries, record.missing_bytes) == (Reason.ENTRY_MISSING, 11, 1100)
        assert await notes.ledger_ids() == [1, 2], "a marked ledger is not seen to be whole yet"
        assert running.auditor.state.closings.pending == 2
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


def test_a_mark_that_went_while_something_still_lacks_comes_back() -> None:
    """As of a worker that had looked at the ledger before it was closed."""

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


@pytest.mark.parametrize("silence", ["error", "limbo", "hangs", "disk"])
def test_who_does_not_answer_for_certain_keeps_the_note_and_makes_no_mark(silence: str) -> None:
    async def scenario() -> None:
        world = await World.make(4, ledgers={0: ledger(("b1", "b3", "b4")), 1: ledger(ON)})
        notes = await noted(world, 0, 1)
        if silence == "error":
            world.entries[1, "b2"] = BookieUnavailable("no answer")
        elif silence == "hangs":
            world.entries[1, "b2"] = None
        elif silence == "disk":  # what it lists is in its memory alone
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


def test_a_bookie_that_is_away_is_waited_for_and_looked_at_once_it_is_back() -> None:
    async def scenario() -> None:
        world = await make(3)
        notes = await noted(world, 0, 1, 2)
        world.lacks(1, "b2", [(0, 4)])
        world.lacks(2, "b1", [(0, 4)])
        await world.start_auditor(delay_s=10_000)
        await asyncio.sleep(2)
        await world.stop_bookie("b2")
        await asyncio.sleep(900)
        assert await world.marked() == {2: ("b1",)}, "what the others lack is marked at once"
        assert await notes.ledger_ids() == [0, 1, 2]
        await world.start_bookie("b2")
        await asyncio.sleep(10)
        assert await world.marked() == {1: ("b2",), 2: ("b1",)}
        assert await notes.ledger_ids() == [1, 2]

    simulate(scenario())


def test_a_bookie_that_keeps_looks_waiting_in_vain_does_not_hold_up_those_at_others() -> None:
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


def test_a_note_waits_until_its_ledger_is_closed() -> None:
    async def scenario() -> None:
        world = await make(0)
        await world.add_ledger(1, ledger(ON, last=None))
        notes = await noted(world, 1)
        world.lacks(1, "b2", [(0, 4)])
        await world.start_auditor()
        await asyncio.sleep(100)
        assert await world.marked() == {}
        assert await notes.ledger_ids() == [1]
        await world.manager.update(LedgerId(1), lambda _: ledger(ON))
        await asyncio.sleep(125)
        assert await world.marked() == {1: ("b2",)}

    simulate(scenario())


def test_while_healing_is_off_notes_wait() -> None:
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


def test_the_next_leader_goes_on_and_the_former_one_writes_nothing() -> None:
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


def test_one_ledger_that_cannot_be_judged_keeps_no_other_from_it() -> None:
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


def test_a_flood_is_paced() -> None:
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
def test_lacks_by_runs_are_lacks_entry_by_entry(seed: int) -> None:
    rng = random.Random(seed)
    metadata = ledger_by_lot(rng)
    chance = rng.choice((0.5, 0.9, 1.0))
    entries = {bookie_id: {e for e in range(60) if rng.random() < chance} for bookie_id in LOT_BOOKIES}
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


def test_runs_that_overlap_hide_no_gap_and_make_none() -> None:
    metadata = ledger(("b1",), last=19, ack_quorum=1)
    b1 = BookieId("b1")
    assert find_lacks(metadata, {b1: [(0, 12), (3, 4), (10, 5)]}) == {b1: Lack(5, 15)}
    assert find_lacks(metadata, {b1: [(0, 12), (3, 4), (10, 15)]}) == {}
    assert find_lacks(metadata, {b1: []}) == {b1: Lack(20, 0)}
    assert find_lacks(ledger(("b1",), last=-1, ack_quorum=1), {b1: [(0, 1)]}) == {}


def test_a_verdict_that_the_copy_is_there_after_all_makes_no_mark() -> None:
    async def scenario() -> None:
        world = await make(1)
        notes = await noted(world, 0)
        world.entries[0, "b2"] = [(0, 4)]  # and came since
        await world.start_auditor()
        await asyncio.sleep(SOON_S)
        assert await world.marked() == {}
        assert await notes.ledger_ids() == [0]
        assert world.replicas.get((0, "b2"), Verdict.GOOD) is Verdict.GOOD

    simulate(scenario())

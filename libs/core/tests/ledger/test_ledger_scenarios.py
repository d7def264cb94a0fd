"""Races of the ledger protocol, each executed step by step in its critical order.

Random schedules, the mutants, and BookKeeper's known defects are in `bindery_simulation.protocol` and its tests.
"""

import pytest
from bindery_core.errors import AddTimeout, LedgerFenced
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId
from bindery_simulation.protocol.invariants import Violation
from bindery_simulation.protocol.mutants import MUTANTS
from bindery_simulation.protocol.scenarios import Stage


def stage_of(*, bookies: int = 3) -> Stage:
    return Stage(bookies=bookies, ensemble_size=3, write_quorum=3, ack_quorum=2)


def kill_writer(stage: Stage) -> None:
    """Crash the writer, and drop its messages in transit."""
    stage.writer.is_gone = True
    stage.world.in_flight.clear()


def test_two_recoveries_at_the_same_time_have_the_same_result() -> None:
    """The recoveries read different copies, and both write back. The first close is the result of both."""
    stage = stage_of()
    stage.add(b"a", b"b")
    stage.deliver("writer -> b0 add")
    kill_writer(stage)  # only b0 has the entries
    one, two = stage.recover("one"), stage.recover("two")
    stage.metadata("one")
    stage.metadata("two")
    # `one` gets responses of b1 and b2, which have no entries; `two` of b0 first
    stage.deliver("one -> b[12] read last")
    stage.deliver("-> one")
    stage.deliver("two -> b0 read last")
    stage.deliver("-> two")
    stage.rest()
    metadata = stage.world.ledger.metadata
    assert one.result == two.result == metadata
    assert metadata.state is LedgerState.CLOSED


@pytest.mark.parametrize("writer_first", [True, False])
def test_writer_close_and_recovery_race_through_metadata_alone(writer_first: bool) -> None:
    """Goal: the loser of the compare-and-set adopts or reports the result; no confirmed entry is lost."""
    stage = stage_of()
    stage.add(b"a", b"bb")
    stage.deliver("writer -> b[01] add")
    stage.deliver("-> writer stored")
    stage.drop("writer -> b2 add")
    assert stage.world.ledger.confirmed == 1
    recovery = stage.recover()
    stage.metadata("recovery")
    stage.writer.close()  # overwrites IN_RECOVERY, if it comes first
    if writer_first:
        stage.metadata("writer")
        assert stage.writer.is_sealed
        assert stage.world.ledger.metadata.state is LedgerState.CLOSED
    stage.rest()
    metadata = stage.world.ledger.metadata
    assert recovery.result == metadata
    assert stage.writer.is_sealed  # the values are the same, so even a late close succeeds
    assert (metadata.last_entry_id, metadata.length) == (1, 3)


def test_a_late_close_with_different_values_is_an_error() -> None:
    """Recovery kept an unconfirmed entry, so the writer's values differ from those of the ledger."""
    stage = stage_of()
    stage.add(b"kept by the recovery")
    stage.deliver("writer -> b0 add")
    kill_writer(stage)  # until it continues below
    stage.world.crash(BookieId("b2"))  # so that b0 responds
    recovery = stage.recover()
    stage.rest()
    assert recovery.result is not None
    assert recovery.result.last_entry_id == 0
    stage.writer.is_gone = False
    stage.world.now += 100
    stage.writer.tick()
    assert isinstance(stage.writer.failure, AddTimeout)
    stage.writer.close()
    stage.rest()
    assert isinstance(stage.writer.failure, LedgerFenced)


def test_an_ensemble_change_cannot_be_committed_once_recovery_has_begun() -> None:
    """The writer's compare-and-set finds IN_RECOVERY: it never confirms the entries that wait for the change."""
    stage = stage_of(bookies=4)
    stage.add(b"waits")
    stage.world.bookies[BookieId("b0")].is_up = False
    stage.writer.bookie_failed(BookieId("b0"))
    assert stage.deliver("writer -> metadata read") == 1  # the writer has read OPEN and is about to write
    recovery = stage.recover()
    stage.metadata("recovery")
    assert stage.world.ledger.metadata.state is LedgerState.IN_RECOVERY
    stage.deliver("writer -> b[12] add")
    stage.deliver("-> writer stored")  # two acks arrive, but the change is not committed
    assert stage.world.ledger.confirmed == -1
    stage.metadata("writer")
    assert isinstance(stage.writer.failure, LedgerFenced)
    stage.rest()
    assert recovery.result is not None
    assert recovery.result.last_entry_id == 0  # kept: two bookies have it
    assert stage.world.ledger.confirmed == -1


def test_recovery_does_not_count_a_crashed_bookie_as_a_denial() -> None:
    """Two bookies are down, and the third one cannot decide the entry alone: a later attempt must end the recovery."""
    stage = stage_of()
    stage.add(b"a")
    stage.deliver("writer -> b[12] add")
    stage.deliver("-> writer stored")
    assert stage.world.ledger.confirmed == 0
    kill_writer(stage)
    stage.world.crash(BookieId("b1"))
    stage.world.crash(BookieId("b2"))
    recovery = stage.recover()
    stage.rest()
    assert recovery.result is None
    assert recovery.failure is not None
    assert stage.world.ledger.metadata.state is LedgerState.IN_RECOVERY
    stage.world.restart(BookieId("b1"))
    again = stage.recover("again")
    stage.rest()
    assert again.result is not None
    assert again.result.last_entry_id == 0


def play_a_recovery_that_dies_after_replacing_bookies(stage: Stage) -> None:
    """One recovery replaces b1 and b2 in memory, writes entry 0 to b0 b3 b4 and entry 1 to b0, and crashes."""
    stage.add(b"zero", b"one")
    stage.deliver("writer -> b0 add")
    kill_writer(stage)
    first = stage.recover("first")
    stage.metadata("first")
    stage.deliver("first -> b. read last")
    stage.deliver("-> first")
    stage.deliver("first -> b. read 0")
    stage.deliver("b0 -> first found 0")
    for name in ("b1", "b2"):
        stage.drop(f"first -> {name} recovery add")
        first.bookie_failed(BookieId(name))
    for _ in range(2):
        stage.deliver("first -> first meta plan")
    stage.deliver("first -> b[034] recovery add 0")
    stage.deliver("-> first stored 0")
    stage.deliver("first -> b0 read 1")
    stage.deliver("b0 -> first found 1")
    assert stage.deliver("first -> b0 recovery add 1") == 1
    first.is_gone = True
    stage.world.in_flight.clear()
    for name in ("b2", "b3", "b4"):  # b3 and b4 are in no published ensemble
        stage.world.crash(BookieId(name))
    second = stage.recover("second")
    stage.rest()
    assert second.result is not None
    assert second.result.last_entry_id == 1


def test_a_failed_recovery_leaves_no_lac_that_depends_on_its_own_ensembles() -> None:
    """Entry 0 has its ack quorum only on unpublished bookies, so the next recovery must write it back again."""
    play_a_recovery_that_dies_after_replacing_bookies(stage_of(bookies=5))


def test_a_newer_lac_in_recovered_entries_leaves_an_entry_with_too_few_copies() -> None:
    """Goal: the scenario above detects the defect."""
    defect = MUTANTS["recovered entries carry a LAC that depends on unpublished ensembles"]
    with defect.applied(), pytest.raises(Violation, match=r"places entry 0 .closed over. where 1 of 2 copies are"):
        play_a_recovery_that_dies_after_replacing_bookies(stage_of(bookies=5))


def test_a_partial_change_of_unknown_outcome_is_adopted() -> None:
    """Two bookies fail, there is one spare, and the response to the compare-and-set is lost.

    The change was applied, so the writer must adopt it.

    Random schedules found this defect: the second attempt tried to replace the other bookie too and raised
    NotEnoughBookies. The writer then confirmed entries by acks of a bookie that was no longer in the metadata.
    """
    stage = stage_of(bookies=4)
    stage.add(b"x")
    stage.deliver("writer -> b2 add")
    stage.deliver("b2 -> writer stored")
    for name in ("b0", "b1"):
        stage.deliver(f"writer -> {name} add")
        stage.drop(f"{name} -> writer")
        stage.world.bookies[BookieId(name)].is_up = False
    stage.world.now += 11
    stage.writer.tick()  # both are late at once
    stage.deliver("writer -> metadata read")
    stage.lose_answer("writer -> metadata compare-and-set")
    stage.metadata("writer")
    assert "b3" in stage.world.ledger.metadata.last_segment.ensemble
    assert stage.writer.machine.metadata == stage.world.ledger.metadata
    stage.rest()
    assert stage.world.ledger.confirmed == 0
    stage.writer.close()
    stage.rest()
    assert stage.world.ledger.metadata.state is LedgerState.CLOSED

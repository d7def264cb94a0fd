"""Recovery of a ledger, action by action. Longer sequences: transcripts/recovery*.txt; races: test_ledger_scenarios."""

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.errors import BookieUnavailable, NotEnoughBookies, NotThere, TryAgain, Unauthorized
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import (
    BeginRecovery,
    ChangeEnsemble,
    CloseRecovered,
    Degraded,
    Fail,
    Recovered,
    RecoveryAction,
    SendAdds,
    SendReads,
)
from bindery_core.ledger.ledger_recovery import LedgerRecovery, RecoverySettings
from bindery_core.wire.messages import AddResponse, ReadResponse, Status

LEDGER_ID = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)
B0, B1, B2, B3 = (BookieId(f"b{i}") for i in range(4))
TWO = RecoverySettings(read_timeout_s=5.0, add_timeout_s=10.0, entries_in_flight_max=2)


def ledger(first: int = 0, *, write_quorum: int = 3) -> LedgerMetadata:
    """The last segment begins at `first`; an earlier one, if any, has another bookie."""
    segments = (Segment(EntryId(0), (B0, B1, B2)),)
    if first:
        segments = (Segment(EntryId(0), (B0, B1, B3)), Segment(EntryId(first), (B0, B1, B2)))
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=write_quorum,
        ack_quorum=2,
        segments=segments,
        state=LedgerState.IN_RECOVERY,
    )


def fencing(metadata: LedgerMetadata | None = None, settings: RecoverySettings = TWO) -> LedgerRecovery:
    """A recovery that has sent its fencing reads at time 0."""
    machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER, settings=settings)
    machine.start(now=0.0)
    machine.recovery_begun(metadata or ledger(), now=0.0)
    return machine


def reading(metadata: LedgerMetadata | None = None, settings: RecoverySettings = TWO) -> LedgerRecovery:
    """A recovery of a ledger without known entries that has sent its first reads at time 1."""
    machine = fencing(metadata, settings)
    give(machine, B0, last_none(), now=1.0)
    give(machine, B1, last_none(), now=1.0)
    assert machine.step == "read"
    return machine


def frame(entry_id: int, *, lac: int = -1, size: int = 10) -> bytes:
    """An entry of `size` bytes, as are all entries before it."""
    return pack(
        DIGESTER, ledger_id=LEDGER_ID, entry_id=entry_id, lac=lac, length=(entry_id + 1) * size, payload=bytes(size)
    )


def last(entry_id: int, *, lac: int) -> ReadResponse:
    return ReadResponse(0, Status.OK, LEDGER_ID, -1, frame(entry_id, lac=lac))


def last_none(status: Status = Status.NO_ENTRY) -> ReadResponse:
    return ReadResponse(0, status, LEDGER_ID, -1)


def found(entry_id: int, *, lac: int = -1, size: int = 10) -> ReadResponse:
    return ReadResponse(0, Status.OK, LEDGER_ID, entry_id, frame(entry_id, lac=lac, size=size))


def answer(entry_id: int, status: Status = Status.NO_ENTRY) -> ReadResponse:
    return ReadResponse(0, status, LEDGER_ID, entry_id)


def give(machine: LedgerRecovery, bookie_id: BookieId, *responses: ReadResponse, now: float = 1.0) -> list[object]:
    return list(machine.receive_reads(bookie_id, responses, now=now))


def stored(
    machine: LedgerRecovery, bookie_id: BookieId, *entry_ids: int, status: Status = Status.OK, now: float = 1.0
) -> list[object]:
    responses = [AddResponse(0, status, LEDGER_ID, entry_id) for entry_id in entry_ids]
    return list(machine.receive_adds(bookie_id, responses, now=now))


def reads(*entry_ids: int, fence: bool = True) -> list[SendReads]:
    return [SendReads(bookie_id, entry_ids, fence) for bookie_id in (B0, B1, B2)]


def adds(*frames: tuple[int, bytes]) -> list[SendAdds]:
    entry_ids = [entry_id for entry_id, _ in frames]
    return [SendAdds(bookie_id, entry_ids, [body for _, body in frames], True) for bookie_id in (B0, B1, B2)]


def plain(actions: list[object]) -> list[object]:
    """Actions without the difference between lists and tuples."""
    return [
        (a.bookie_id, list(a.entry_ids), list(a.frames), a.recovery) if isinstance(a, SendAdds)
        else (a.bookie_id, list(a.entry_ids), a.fence) if isinstance(a, SendReads)
        else a
        for a in actions
    ]  # fmt: skip


def failure(actions: list[RecoveryAction] | list[object]) -> Exception:
    """Return the error of the only action."""
    (action,) = actions
    assert isinstance(action, Fail)
    return action.error


# --- begin and fence --------------------------------------------------------------------------------------------------


def test_a_recovery_begins_with_the_metadata_and_fences_the_last_ensemble() -> None:
    machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER)
    assert (machine.ledger_id, machine.step, machine.is_finished) == (7, "new", False)
    assert machine.next_deadline() is None
    assert machine.start(now=0.0) == [BeginRecovery()]
    assert machine.step == "begin"
    assert machine.recovery_begun(ledger(5), now=2.0) == reads(-1)
    assert machine.step == "fence"
    assert machine.metadata == ledger(5)
    assert machine.next_deadline() == 7.0


def test_a_ledger_that_is_closed_already_is_recovered() -> None:
    closed = ledger().with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(3), length=4)
    machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER)
    machine.start(now=0.0)
    assert machine.recovery_begun(closed, now=0.0) == [Recovered(closed)]
    assert machine.is_finished
    assert machine.next_deadline() is None


def test_metadata_that_cannot_be_changed_ends_the_recovery_with_that_error() -> None:
    machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER)
    machine.start(now=0.0)
    error = NotThere("no such ledger")
    assert machine.metadata_failed(error, now=0.0) == [Fail(error)]
    assert machine.is_finished
    assert machine.metadata_failed(error, now=0.0) == []


def test_reading_begins_after_the_greatest_lac_of_the_responses() -> None:
    machine = fencing()
    assert give(machine, B0, last(4, lac=3)) == []
    assert plain(give(machine, B1, last(3, lac=2))) == [
        (B1, [4, 5], True),
        (B2, [4, 5], True),
        (B0, [4, 5], True),
    ]
    assert machine.next_deadline() == 6.0


def test_reading_begins_at_the_last_segment_if_no_bookie_has_a_later_lac() -> None:
    """The reads of entries before the segment would go to other bookies."""
    machine = fencing(ledger(6))
    give(machine, B0, last_none(Status.NO_LEDGER))
    assert give(machine, B2, last(3, lac=2)) == reads(6, 7)


@pytest.mark.parametrize("status", [Status.NO_ENTRY, Status.NO_LEDGER])
def test_a_denial_is_a_definite_response_to_the_fence(status: Status) -> None:
    machine = fencing()
    assert give(machine, B1, last_none(status)) == []
    assert give(machine, B2, last_none(status)) == reads(0, 1)


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE, Status.TOO_MANY_REQUESTS])
def test_an_error_is_no_response_to_the_fence(status: Status) -> None:
    machine = fencing()
    assert give(machine, B0, last_none()) == []
    assert give(machine, B1, last_none(status)) == []
    error = failure(give(machine, B2, last_none(status)))
    assert isinstance(error, TryAgain)
    assert error.facts == {
        "ledger_id": 7,
        "answered": "b0",
        "missing": f"b1: status {int(status)}; b2: status {int(status)}",
    }
    assert machine.is_finished


def test_a_damaged_last_entry_is_no_response_to_the_fence() -> None:
    machine = fencing()
    give(machine, B0, last_none())
    for body in (frame(3, lac=2)[:-1] + b"x", None):
        assert give(machine, B1, ReadResponse(0, Status.OK, LEDGER_ID, -1, body)) == []
    assert give(machine, B2, last(1, lac=0))[0] == SendReads(B1, (1, 2), True)


def test_a_response_after_an_error_of_the_same_bookie_counts() -> None:
    machine = fencing()
    assert machine.bookie_failed(B0, "reset", now=1.0) == []
    assert give(machine, B0, last_none()) == []
    assert machine.bookie_failed(B1, "reset", now=1.0) == []
    assert give(machine, B2, last_none()) == reads(0, 1)


def test_an_error_after_a_response_of_the_same_bookie_does_not_count() -> None:
    machine = fencing()
    give(machine, B0, last_none())
    assert machine.bookie_failed(B0, "reset", now=1.0) == []
    assert machine.bookie_failed(B1, "reset", now=1.0) == []
    assert give(machine, B2, last_none()) == reads(0, 1)


def test_other_bookies_and_other_entries_do_not_count_for_the_fence() -> None:
    machine = fencing()
    give(machine, B0, last_none())
    assert give(machine, B3, last_none()) == []
    assert give(machine, B1, answer(0)) == []
    assert machine.bookie_failed(B3, "reset", now=1.0) == []
    assert stored(machine, B1, 0) == []
    assert machine.step == "fence"


def test_too_many_lost_bookies_end_the_fencing() -> None:
    machine = fencing()
    assert machine.bookie_failed(B0, "refused", now=1.0) == []
    error = failure(machine.bookie_failed(B1, "reset", now=1.0))
    assert isinstance(error, TryAgain)
    assert error.facts == {"ledger_id": 7, "answered": "none", "missing": "b0: refused; b1: reset"}


def test_bookies_that_are_silent_until_the_deadline_end_the_fencing() -> None:
    machine = fencing()
    give(machine, B1, last_none())
    machine.bookie_failed(B2, "refused", now=1.0)
    assert machine.tick(now=4.9) == []
    error = failure(machine.tick(now=5.0))
    assert isinstance(error, TryAgain)
    assert error.facts == {
        "ledger_id": 7,
        "answered": "b1",
        "missing": "b0: no answer within 5.0 s; b2: refused",
    }


def test_silent_bookies_may_still_answer_while_others_can_complete_the_fencing() -> None:
    """With Qw = 2 of 3, each write set needs one response, so two silent bookies of one write set are too many."""
    machine = fencing(ledger(write_quorum=2))
    assert give(machine, B0, last_none()) == []
    assert plain(give(machine, B1, last_none())) == [(B0, [0], True), (B1, [0, 1], True), (B2, [1], True)]


@pytest.mark.parametrize("step", ["fence", "read"])
def test_a_client_that_a_bookie_refuses_cannot_recover(step: str) -> None:
    machine = fencing() if step == "fence" else reading()
    error = failure(give(machine, B2, answer(-1 if step == "fence" else 0, Status.UNAUTHORIZED)))
    assert isinstance(error, Unauthorized)
    assert error.facts == {"ledger_id": 7, "bookie_id": "b2"}
    assert give(machine, B2, answer(0, Status.UNAUTHORIZED)) == []


# --- read and write back ----------------------------------------------------------------------------------------------


def test_an_empty_ledger_is_closed_without_any_entry() -> None:
    machine = reading()
    assert give(machine, B0, answer(0)) == []
    assert give(machine, B2, answer(0, Status.NO_LEDGER)) == [
        CloseRecovered(ledger().segments, ledger().segments, -1, 0)
    ]
    assert machine.step == "close"
    assert machine.next_deadline() is None
    closed = ledger().with_changes(state=LedgerState.CLOSED)
    assert machine.recovery_closed(closed, now=1.0) == [Recovered(closed)]
    assert machine.is_finished


def test_an_entry_that_one_bookie_has_is_written_back_to_all() -> None:
    machine = reading()
    give(machine, B0, answer(0))
    sent = give(machine, B1, found(0))
    assert plain(sent) == plain([*adds((0, frame(0)))])
    assert stored(machine, B0, 0) == []
    assert plain(stored(machine, B1, 0)) == [(B2, [2], True), (B0, [2], True), (B1, [2], True)]
    assert give(machine, B0, answer(1)) == []
    assert give(machine, B1, answer(1)) == [CloseRecovered(ledger().segments, ledger().segments, 0, 10)]


def test_entries_written_back_carry_the_lac_with_which_recovery_began() -> None:
    machine = fencing()
    give(machine, B0, last(4, lac=3))
    give(machine, B1, last(4, lac=3))
    (first, *_) = give(machine, B0, found(4, lac=3), found(5, lac=4))
    assert isinstance(first, SendAdds)
    expected = [
        pack(DIGESTER, ledger_id=LEDGER_ID, entry_id=e, lac=3, length=(e + 1) * 10, payload=bytes(10)) for e in (4, 5)
    ]
    assert list(first.frames) == expected


def test_an_entry_waits_for_the_entries_before_it() -> None:
    machine = reading()
    assert give(machine, B0, found(1)) == []
    sent = give(machine, B0, found(0))
    assert [list(a.entry_ids) for a in sent if isinstance(a, SendAdds)] == [[0, 1]] * 3


def test_the_ledger_is_not_closed_before_its_entries_are_written_back() -> None:
    machine = reading()
    give(machine, B0, found(0))
    assert give(machine, B0, answer(1)) == []
    assert give(machine, B1, answer(1)) == []
    assert machine.step == "read"
    assert stored(machine, B0, 0) == []
    assert stored(machine, B2, 0) == [CloseRecovered(ledger().segments, ledger().segments, 0, 10)]


def test_entries_after_the_first_denied_one_are_dropped() -> None:
    machine = reading()
    give(machine, B0, found(1), answer(0))
    assert give(machine, B1, answer(0)) == [CloseRecovered(ledger().segments, ledger().segments, -1, 0)]
    assert give(machine, B2, found(0)) == []


def test_a_denial_and_an_error_of_one_bookie_count_as_its_denial() -> None:
    """A bookie that denies after an error counts; an error after a denial takes nothing back."""
    machine = reading()
    give(machine, B0, answer(0, Status.IO_ERROR))
    give(machine, B0, answer(0))
    assert machine.bookie_failed(B0, "reset", now=1.0) == []
    assert give(machine, B1, answer(0)) == [CloseRecovered(ledger().segments, ledger().segments, -1, 0)]


def test_the_same_denial_twice_counts_once() -> None:
    machine = reading()
    assert give(machine, B0, answer(0), answer(0)) == []
    assert give(machine, B3, answer(0)) == []
    assert machine.step == "read"


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE])
def test_an_entry_that_may_exist_ends_the_recovery(status: Status) -> None:
    machine = reading()
    give(machine, B2, answer(0))
    assert give(machine, B1, answer(0, status)) == []
    error = failure(give(machine, B0, answer(0, status)))
    assert isinstance(error, TryAgain)
    assert error.facts == {"ledger_id": 7, "entry_id": 0, "denied_by": "b2", "no_answer_from": "b0,b1"}
    assert machine.next_deadline() is None


def test_a_damaged_copy_is_neither_an_entry_nor_a_denial() -> None:
    machine = reading()
    give(machine, B0, answer(0))
    for body in (frame(0)[:-1] + b"x", frame(1), None):
        assert give(machine, B1, ReadResponse(0, Status.OK, LEDGER_ID, 0, body)) == []
    assert plain(give(machine, B2, found(0))) == plain([*adds((0, frame(0)))])


def test_only_damaged_copies_end_the_recovery() -> None:
    machine = reading()
    for bookie_id in (B0, B1):
        assert give(machine, bookie_id, ReadResponse(0, Status.OK, LEDGER_ID, 0, b"junk")) == []
    error = failure(give(machine, B2, ReadResponse(0, Status.OK, LEDGER_ID, 0, b"junk")))
    assert isinstance(error, TryAgain)
    assert error.facts["no_answer_from"] == "b0,b1,b2"
    assert error.facts["denied_by"] == "none"


def test_reads_time_out_and_a_definite_response_before_still_counts() -> None:
    machine = reading()
    give(machine, B0, answer(0), now=2.0)
    assert machine.tick(now=5.9) == []
    error = failure(machine.tick(now=6.0))
    assert isinstance(error, TryAgain)
    assert error.facts == {"ledger_id": 7, "entry_id": 0, "denied_by": "b0", "no_answer_from": "b1,b2"}


def test_only_the_reads_whose_time_is_over_time_out() -> None:
    machine = reading()
    give(machine, B0, found(0), found(1))
    stored(machine, B0, 0, 1, now=3.0)
    sent = stored(machine, B1, 0, 1, now=3.0)
    assert [a.entry_ids for a in sent if isinstance(a, SendReads)] == [(2, 3)] * 3
    assert machine.next_deadline() == 6.0
    assert machine.tick(now=6.0) == []
    assert machine.next_deadline() == 8.0
    error = failure(machine.tick(now=8.0))
    assert isinstance(error, TryAgain)
    assert error.facts["entry_id"] == 2


def test_at_most_the_configured_entries_are_in_flight() -> None:
    machine = fencing(settings=RecoverySettings(entries_in_flight_max=3))
    give(machine, B0, last_none())
    assert give(machine, B1, last_none()) == reads(0, 1, 2)
    assert [list(a.entry_ids) for a in give(machine, B0, found(0)) if isinstance(a, SendReads)] == []
    stored(machine, B0, 0)
    assert [a.entry_ids for a in stored(machine, B1, 0) if isinstance(a, SendReads)] == [(3,)] * 3


def test_by_default_sixteen_entries_are_in_flight() -> None:
    machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER)
    machine.start(now=0.0)
    machine.recovery_begun(ledger(), now=0.0)
    give(machine, B0, last_none())
    assert give(machine, B1, last_none()) == reads(*range(16))
    default = RecoverySettings()
    assert (default.read_timeout_s, default.add_timeout_s, default.bytes_in_flight_max) == (5.0, 10.0, 16_777_216)


@pytest.mark.parametrize(("size", "expected"), [(30, (0, 1, 2)), (60, (0,)), (101, (0,))])
def test_large_entries_reduce_the_entries_in_flight(size: int, expected: tuple[int, ...]) -> None:
    """The last entry that a bookie returned to the fence gives the size; one entry is always read."""
    machine = fencing(settings=RecoverySettings(entries_in_flight_max=16, bytes_in_flight_max=100))
    body = pack(DIGESTER, ledger_id=LEDGER_ID, entry_id=0, lac=-1, length=size, payload=bytes(size))
    give(machine, B0, ReadResponse(0, Status.OK, LEDGER_ID, -1, body))
    assert give(machine, B1, last_none()) == reads(*expected)


# --- bookies that fail, and ensembles ---------------------------------------------------------------------------------


def test_a_bookie_that_fails_a_write_back_is_replaced_in_memory_and_published_by_the_close() -> None:
    machine = reading()
    give(machine, B0, found(0))
    (change,) = machine.bookie_failed(B2, "reset", now=1.0)
    assert change == ChangeEnsemble({2: B2}, 0, publish=False)
    changed = ledger().with_changes(segments=(Segment(EntryId(0), (B0, B1, B3)),))
    (sent,) = machine.ensemble_changed(changed, now=1.0)
    assert isinstance(sent, SendAdds)
    assert (sent.bookie_id, list(sent.entry_ids)) == (B3, [0])
    assert machine.metadata == changed
    stored(machine, B0, 0)
    stored(machine, B3, 0)
    give(machine, B0, answer(1))
    assert give(machine, B1, answer(1)) == [CloseRecovered(ledger().segments, changed.segments, 0, 10)]


def test_reads_use_the_ensembles_from_before_the_recovery() -> None:
    machine = reading()
    give(machine, B0, found(0))
    machine.bookie_failed(B2, "reset", now=1.0)
    machine.ensemble_changed(ledger().with_changes(segments=(Segment(EntryId(0), (B0, B1, B3)),)), now=1.0)
    stored(machine, B0, 0)
    sent = stored(machine, B1, 0)
    assert sorted(a.bookie_id for a in sent if isinstance(a, SendReads)) == [B0, B1, B2]


def test_without_a_spare_the_recovery_goes_on_with_an_ack_quorum() -> None:
    machine = reading()
    give(machine, B0, found(0))
    machine.bookie_failed(B2, "reset", now=1.0)
    assert machine.ensemble_change_failed(NotEnoughBookies("no spare"), now=1.0) == [Degraded(B2, 0, "no spare")]
    stored(machine, B0, 0)
    assert any(isinstance(action, SendReads) for action in stored(machine, B1, 0))
    assert machine.step == "read"


def test_without_an_ack_quorum_the_recovery_fails() -> None:
    machine = reading()
    give(machine, B0, found(0))
    machine.bookie_failed(B2, "reset", now=1.0)
    machine.bookie_failed(B1, "reset", now=1.0)
    error = failure(machine.ensemble_change_failed(NotEnoughBookies("no spare"), now=1.0))
    assert isinstance(error, TryAgain)
    assert machine.is_finished


def test_an_error_of_the_write_back_is_wrapped_so_that_a_client_tries_again() -> None:
    machine = reading()
    give(machine, B0, found(0))
    machine.bookie_failed(B2, "reset", now=1.0)
    cause = NotThere("gone")
    error = failure(machine.ensemble_change_failed(cause, now=1.0))
    assert type(error) is TryAgain
    assert error.facts == {"ledger_id": 7, "reason": "gone"}
    assert error.__cause__ is cause


def test_an_error_that_says_try_again_is_not_wrapped() -> None:
    machine = reading()
    give(machine, B0, found(0))
    machine.bookie_failed(B2, "reset", now=1.0)
    cause = BookieUnavailable("later")
    assert failure(machine.ensemble_change_failed(cause, now=1.0)) is cause


def test_a_write_back_without_a_response_replaces_the_bookie() -> None:
    machine = reading()
    give(machine, B0, found(0), now=2.0)
    give(machine, B1, answer(1), now=2.0)
    give(machine, B2, answer(1), now=2.0)
    stored(machine, B0, 0, now=2.0)
    assert machine.next_deadline() == 12.0
    assert machine.tick(now=11.9) == []
    assert machine.tick(now=12.0) == [ChangeEnsemble({1: B1, 2: B2}, 0, publish=False)]


def test_a_lost_bookie_counts_as_silent_for_the_entries_that_it_has_not_denied() -> None:
    machine = reading()
    machine.bookie_failed(B0, "reset", now=1.0)
    machine.bookie_failed(B1, "reset", now=1.0)
    error = failure(give(machine, B2, answer(0)))
    assert isinstance(error, TryAgain)
    assert error.facts["no_answer_from"] == "b0,b1"


def test_a_lost_bookie_outside_the_ensemble_changes_nothing() -> None:
    machine = reading()
    assert machine.bookie_failed(B3, "reset", now=1.0) == []
    give(machine, B0, answer(0))
    assert give(machine, B1, answer(0, Status.IO_ERROR)) == [], "b2 may still answer"
    assert give(machine, B2, answer(0)) == [CloseRecovered(ledger().segments, ledger().segments, -1, 0)]


# --- measure and close ------------------------------------------------------------------------------------------------


def measuring() -> tuple[LedgerRecovery, list[object]]:
    """A recovery that knows that entry 3 is the last one, but not the ledger's length, and its last actions."""
    machine = fencing(ledger(4))
    give(machine, B0, last_none())
    give(machine, B1, last_none())
    give(machine, B0, answer(4))
    return machine, give(machine, B1, answer(4))


def test_the_last_entry_is_read_for_its_length_if_no_response_contained_it() -> None:
    machine, sent = measuring()
    assert sent == [SendReads(bookie_id, (3,), False) for bookie_id in (B0, B1, B3)]
    assert machine.step == "measure"
    assert machine.next_deadline() == 6.0
    assert give(machine, B0, answer(3)) == []
    assert give(machine, B1, found(3, lac=2)) == [CloseRecovered(ledger(4).segments, ledger(4).segments, 3, 40)]


def test_the_length_of_the_entry_after_the_last_one_is_enough() -> None:
    """Its length without its payload is the length up to the last entry."""
    machine = fencing()
    give(machine, B0, last(4, lac=3))
    give(machine, B1, last_none())
    give(machine, B1, answer(4))
    assert give(machine, B2, answer(4)) == [CloseRecovered(ledger().segments, ledger().segments, 3, 40)]


def test_the_last_entry_must_be_read_by_someone() -> None:
    machine, _ = measuring()
    give(machine, B0, answer(3))
    give(machine, B1, answer(3, Status.IO_ERROR))
    error = failure(machine.bookie_failed(B3, "reset", now=1.0))
    assert isinstance(error, TryAgain)
    assert error.facts == {"ledger_id": 7, "entry_id": 3, "denied_by": "b0", "no_answer_from": "b1,b3"}


def test_measuring_times_out() -> None:
    machine, _ = measuring()
    assert machine.tick(now=5.9) == []
    error = failure(machine.tick(now=6.0))
    assert isinstance(error, TryAgain)
    assert error.facts["entry_id"] == 3


def test_a_refused_client_cannot_measure() -> None:
    machine, _ = measuring()
    assert isinstance(failure(give(machine, B0, answer(3, Status.UNAUTHORIZED))), Unauthorized)


def test_a_ledger_that_is_not_closed_after_the_close_must_be_recovered_again() -> None:
    machine = reading()
    give(machine, B0, answer(0))
    give(machine, B1, answer(0))
    error = failure(machine.recovery_closed(ledger().with_changes(state=LedgerState.OPEN), now=1.0))
    assert isinstance(error, TryAgain)
    assert error.facts == {"ledger_id": 7}


def test_events_after_the_last_entry_is_known_change_nothing() -> None:
    machine = reading()
    give(machine, B0, answer(0))
    give(machine, B1, answer(0))
    assert machine.step == "close"
    assert give(machine, B2, found(0)) == []
    assert stored(machine, B2, 0) == []
    assert machine.bookie_failed(B2, "reset", now=1.0) == []
    assert machine.ensemble_changed(ledger(), now=1.0) == []
    assert machine.ensemble_change_failed(NotEnoughBookies("no spare"), now=1.0) == []
    assert machine.tick(now=100.0) == []

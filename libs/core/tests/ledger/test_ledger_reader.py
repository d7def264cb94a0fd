"""Reads: error precedence, LAC coverage, choice of replicas. Sequences of events: transcripts/reads.txt."""

from itertools import product

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack, pack_lac
from bindery_core.errors import BookieUnavailable, DamagedStorage, DigestMismatch, LedgerStateUnknown, NoSuchEntry
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import Done, Fail, SendReads
from bindery_core.ledger.ledger_reader import LacRead, LedgerRead, ReaderSettings, long_poll_targets
from bindery_core.wire.messages import ReadLacResponse, ReadResponse, Status

LEDGER_ID = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)
B0, B1, B2, B3 = (BookieId(f"b{i}") for i in range(4))


def metadata(*, ensemble_size: int = 3, write_quorum: int = 3, first: int = 0) -> LedgerMetadata:
    ensemble = (B0, B1, B2, B3)[:ensemble_size]
    segments = (Segment(EntryId(0), ensemble),)
    if first:
        segments = (
            Segment(EntryId(0), tuple(BookieId(f"old{i}") for i in range(ensemble_size))),
            Segment(EntryId(first), ensemble),
        )
    return LedgerMetadata(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=2, segments=segments)


def frame(entry_id: int, *, lac: int = -1) -> bytes:
    return pack(DIGESTER, ledger_id=LEDGER_ID, entry_id=entry_id, lac=lac, length=1, payload=b"x")


def answer(status: int, entry_id: int = 0, body: bytes | None = None, max_lac: int | None = None) -> ReadResponse:
    return ReadResponse(0, status, LEDGER_ID, entry_id, body, max_lac)


def read_of(first: int, last: int, **options: object) -> LedgerRead:
    return LedgerRead(LEDGER_ID, metadata(), entry_ids=range(first, last + 1), digester=DIGESTER, **options)  # type: ignore[arg-type]


OUTCOMES = {
    "denied": (answer(Status.NO_ENTRY), NoSuchEntry),
    "no ledger": (answer(Status.NO_LEDGER), NoSuchEntry),
    "lost": (None, BookieUnavailable),
    "io": (answer(Status.IO_ERROR), DamagedStorage),
    "limbo": (answer(Status.UNKNOWN_LEDGER_STATE), LedgerStateUnknown),
    "flipped": (answer(Status.OK, body=frame(0)[:-1] + b"y"), DigestMismatch),
    "other entry": (answer(Status.OK, body=frame(1)), DigestMismatch),
    "empty": (answer(Status.OK), DigestMismatch),
}


@pytest.mark.parametrize("outcomes", list(product(OUTCOMES, repeat=3)), ids="/".join)
def test_a_failed_read_reports_the_error_of_the_highest_rank(outcomes: tuple[str, ...]) -> None:
    """Goal: NoSuchEntry is reported only if every replica denies, and a lost connection only without other errors."""
    read = read_of(0, 0)
    actions = read.start(now=0.0)
    for outcome in outcomes:
        (sent,) = actions
        assert isinstance(sent, SendReads)
        response = OUTCOMES[outcome][0]
        if response is None:
            actions = read.bookie_failed(sent.bookie_id, "lost", now=0.0)
        else:
            actions = read.receive_many(sent.bookie_id, [response], now=0.0)
    kinds = [OUTCOMES[outcome][1] for outcome in outcomes]
    real = [kind for kind in kinds if kind not in (NoSuchEntry, BookieUnavailable)]
    expected = real[0] if real else BookieUnavailable if BookieUnavailable in kinds else NoSuchEntry
    (failure,) = actions
    assert isinstance(failure, Fail)
    assert type(failure.error) is expected
    assert read.is_finished


def test_entries_are_in_order_for_any_order_of_responses() -> None:
    read = read_of(0, 5)
    sent = read.start(now=0.0)
    done: list[object] = []
    for action in reversed(sent):
        assert isinstance(action, SendReads)
        answers = [answer(Status.OK, e, frame(e), max_lac=e) for e in reversed(action.entry_ids)]
        done += read.receive_many(action.bookie_id, answers, now=0.0)
    assert done == [Done()]
    assert [entry.entry_id for entry in read.take_entries()] == list(range(6))
    assert read.max_lac == 5
    assert read.next_deadline() is None


def test_a_read_sends_one_request_per_bookie_and_round() -> None:
    sent = read_of(0, 99).start(now=0.0)
    assert [action.bookie_id for action in sent if isinstance(action, SendReads)] == [B0, B1, B2]
    assert sum(len(action.entry_ids) for action in sent if isinstance(action, SendReads)) == 100


def test_a_run_is_read_from_one_bookie_if_every_bookie_has_every_entry() -> None:
    actions = read_of(0, 9, run_size=4).start(now=0.0)
    runs = sorted((action.entry_ids for action in actions if isinstance(action, SendReads)), key=min)
    assert runs == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert len({action.bookie_id for action in actions if isinstance(action, SendReads)}) == 3
    striped = LedgerRead(LEDGER_ID, metadata(write_quorum=2), entry_ids=range(6), digester=DIGESTER, run_size=4)
    asked = [action.entry_ids for action in striped.start(now=0.0) if isinstance(action, SendReads)]
    assert sorted(asked) == [(0, 3), (1, 4), (2, 5)], "otherwise the write sets determine the bookies"


def test_bookies_to_avoid_are_read_last() -> None:
    read = read_of(0, 0, avoid=[B0, B1])
    (first,) = read.start(now=0.0)
    assert first == SendReads(B2, (0,))
    (second,) = read.bookie_failed(B2, "lost", now=0.0)
    assert second == SendReads(B0, (0,))


def test_a_read_times_out_at_each_replica_and_ends() -> None:
    """Goal: without any response, the read ends within the sum of the timeouts."""
    read = read_of(0, 3, settings=ReaderSettings(speculative_s=None, read_timeout_s=2.0))
    read.start(now=0.0)
    now, actions = 0.0, []
    for _ in range(10):
        deadline = read.next_deadline()
        if deadline is None:
            break
        now = deadline
        actions = read.tick(now=now)
    assert now == 6.0
    assert isinstance(actions[-1], Fail)
    assert isinstance(actions[-1].error, BookieUnavailable)


def test_a_late_response_still_counts() -> None:
    read = read_of(0, 0, settings=ReaderSettings(speculative_s=None, read_timeout_s=2.0))
    read.start(now=0.0)
    assert read.tick(now=2.0) == [SendReads(B1, (0,))]
    assert read.receive_many(B0, [answer(Status.OK, 0, frame(0))], now=2.1) == [Done()]


def lac_answer(status: int, *, explicit: int | None = None, entry_lac: int | None = None) -> ReadLacResponse:
    return ReadLacResponse(
        0,
        status,
        LEDGER_ID,
        None if explicit is None else pack_lac(DIGESTER, ledger_id=LEDGER_ID, lac=explicit),
        None if entry_lac is None else frame(entry_lac + 1, lac=entry_lac),
    )


def test_the_lac_is_the_greatest_one_once_the_responses_cover_the_ensemble() -> None:
    read = LacRead(LEDGER_ID, metadata(), digester=DIGESTER)
    assert read.targets == (B0, B1, B2)
    read.receive(B0, lac_answer(Status.OK, explicit=4, entry_lac=2))
    assert (read.result, read.best) == (None, 4)
    read.receive(B1, lac_answer(Status.OK, entry_lac=3))
    assert read.result == 4


def test_denials_count_towards_the_lac_and_errors_do_not() -> None:
    read = LacRead(LEDGER_ID, metadata(first=9), digester=DIGESTER)
    read.receive(B0, lac_answer(Status.NO_ENTRY))
    read.receive(B1, lac_answer(Status.IO_ERROR, explicit=50))
    assert read.result is None
    assert read.error is None
    read.receive(B2, lac_answer(Status.NO_LEDGER))
    assert read.result == 8  # a new ensemble begins only after all earlier entries were confirmed


def test_a_lac_without_enough_responses_is_an_error() -> None:
    read = LacRead(LEDGER_ID, metadata(), digester=DIGESTER)
    read.bookie_failed(B0, "refused")
    assert read.error is None
    read.bookie_failed(B2, "no answer")
    assert "b0: refused; b2: no answer" in str(read.error)


def test_a_damaged_last_entry_is_a_failure_but_a_damaged_explicit_lac_is_ignored() -> None:
    read = LacRead(LEDGER_ID, metadata(), digester=DIGESTER)
    read.receive(B0, ReadLacResponse(0, Status.OK, LEDGER_ID, b"junk", frame(3, lac=2)))
    assert read.best == 2
    read.receive(B1, ReadLacResponse(0, Status.OK, LEDGER_ID, None, b"junk"))
    assert read.result is None
    read.receive(B2, lac_answer(Status.NO_ENTRY))
    assert read.result == 2


def test_long_polls_go_to_the_write_set_of_the_entry() -> None:
    striped = metadata(ensemble_size=4, write_quorum=2)
    assert long_poll_targets(striped, entry_id=3) == [B3, B0]
    assert long_poll_targets(striped, entry_id=3, avoid=[B3]) == [B0, B3]

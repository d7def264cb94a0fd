"""The last confirmed entry of an open ledger, derived from the responses of its bookies."""

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack, pack_lac
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import ReadLacResponse, Status
from bindery_spark.reading.open_ledgers import tail_of

A, B, C, D = (BookieId(letter) for letter in "abcd")


LEDGER = LedgerId(7)


DIGESTER = Digester(DigestType.CRC32C)


def metadata(**changes: object) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),)
    ).with_changes(**changes)


def answer(
    *, last: int | None = None, lac: int = -1, explicit: int | None = None, status: int = int(Status.OK)
) -> ReadLacResponse:
    frame = packet = None
    if last is not None:
        frame = pack(DIGESTER, ledger_id=LEDGER, entry_id=last, lac=lac, length=10 * (last + 1), payload=b"0123456789")
    if explicit is not None:
        packet = pack_lac(DIGESTER, ledger_id=LEDGER, lac=explicit)
    return ReadLacResponse(1, status, LEDGER, packet, frame)


def test_the_highest_reported_lac_counts() -> None:
    tail = tail_of(LEDGER, metadata(), {A: answer(last=9, lac=6), B: answer(last=7, lac=5, explicit=7)})
    assert (tail.lac, tail.held, tail.length, tail.length_at) == (7, {A: 9, B: 7}, 100, 9)


def test_bookies_without_entries_report_that_no_entry_is_confirmed() -> None:
    nothing = answer(status=int(Status.NO_ENTRY))
    tail = tail_of(LEDGER, metadata(), {A: nothing, C: answer(status=int(Status.NO_LEDGER))})
    assert (tail.lac, tail.held) == (-1, {A: -1, C: -1})
    explicit = answer(status=int(Status.IO_ERROR), explicit=-1)
    assert tail_of(LEDGER, metadata(), {A: nothing, B: explicit}).held == {A: -1, B: -1}


@pytest.mark.parametrize("status", [Status.NO_ENTRY, Status.NO_LEDGER])
def test_a_bookie_without_entries_does_not_replace_a_silent_ack_quorum(status: Status) -> None:
    """Two of three may have confirmed a thousand entries without the third."""
    tail = tail_of(LEDGER, metadata(), {A: answer(status=int(status))})
    assert (tail.lac, tail.held) == (None, {A: -1})
    assert tail_of(LEDGER, metadata(ack_quorum=3), {A: answer(status=int(status))}).lac == -1
    moved = metadata(segments=(Segment(EntryId(0), (A, B, C)), Segment(EntryId(3), (D, B, C))))
    assert tail_of(LEDGER, moved, {D: answer(status=int(status))}).lac is None
    assert tail_of(LEDGER, moved, {D: answer(last=4, lac=2)}).lac is None, "entry 2 is in the previous segment"
    assert tail_of(LEDGER, moved, {D: answer(last=4, lac=3)}).lac == 3


def test_a_bookie_that_cannot_read_its_last_entry_does_not_count() -> None:
    nothing = answer(status=int(Status.NO_ENTRY))
    assert tail_of(LEDGER, metadata(), {A: nothing, B: answer(status=int(Status.IO_ERROR))}).lac is None


def test_bookies_without_an_answer_or_in_limbo_do_not_count() -> None:
    assert tail_of(LEDGER, metadata(), {}).lac is None
    assert tail_of(LEDGER, metadata(), {A: answer(status=int(Status.UNKNOWN_LEDGER_STATE))}).lac is None


def test_responses_with_invalid_digests_do_not_count() -> None:
    damaged = answer(last=9, lac=6, explicit=8)
    assert damaged.last_entry_body is not None
    assert damaged.lac_body is not None
    damaged.last_entry_body = damaged.last_entry_body[:-1] + b"!"
    assert tail_of(LEDGER, metadata(), {A: damaged}).lac is None
    damaged.last_entry_body = None
    damaged.lac_body = damaged.lac_body[:-1] + b"!"
    assert tail_of(LEDGER, metadata(), {A: damaged, B: answer(last=2, lac=1)}).lac == 1

"""Deferred sync: acknowledged entries become durable and readable only by a force of the whole ensemble."""

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import peek_header
from bindery_core.errors import BookieUnavailable, LedgerFenced
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.deferred_writer import DeferredLedgerWriter
from bindery_core.ledger.ledger_actions import Confirm, Fail, SealLedger, SendAdds, SendLac
from bindery_core.wire.messages import AddResponse, Status

LEDGER = LedgerId(7)
B0, B1, B2 = ENSEMBLE = (BookieId("b0"), BookieId("b1"), BookieId("b2"))


def writer() -> DeferredLedgerWriter:
    metadata = LedgerMetadata(ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), ENSEMBLE),))
    return DeferredLedgerWriter(LEDGER, metadata, digester=Digester(DigestType.CRC32C))


def ack(one: DeferredLedgerWriter, bookie_id: BookieId, *entry_ids: int, status: int = 0) -> list[object]:
    responses = [AddResponse(1, status, LEDGER, entry_id) for entry_id in entry_ids]
    return list(one.receive_many(bookie_id, responses, now=0.0))


def lacs(actions: list[object]) -> list[int]:
    sent = [action for action in actions if isinstance(action, SendAdds) and action.bookie_id == B0]
    return [peek_header(frame).lac for action in sent for frame in action.frames]


def test_acks_confirm_entries_and_a_force_publishes_them() -> None:
    one = writer()
    one.add_many([b"a", b"bc"], now=0.0)
    assert ack(one, B0, 0, 1) == []
    assert ack(one, B2, 0, 1) == [Confirm(0, 1)]
    assert (one.published_lac, one.published_length) == (-1, 0)
    assert lacs(list(one.add_many([b"d"], now=0.0))) == [-1], "frames carry the LAC of forced entries only"
    mark = one.mark()
    assert mark == (1, 3)
    ack(one, B0, 2)
    ack(one, B1, 0, 1, 2)
    assert one.forced(mark) == [SendLac(ENSEMBLE, 1)], "entry 2 came after the force began"
    assert (one.published_lac, one.published_length) == (1, 3)
    assert lacs(list(one.add_many([b"e"], now=0.0))) == [1]


def test_overlapping_forces_never_decrease_the_published_lac() -> None:
    one = writer()
    one.add_many([b"a"], now=0.0)
    ack(one, B0, 0)
    ack(one, B1, 0)
    early = one.mark()
    one.add_many([b"b"], now=0.0)
    ack(one, B0, 1)
    ack(one, B1, 1)
    late = one.mark()
    assert one.forced(late) == [SendLac(ENSEMBLE, 1)]
    assert one.forced(early) == []
    assert one.published_lac == 1


def test_no_timer_publishes_entries_that_were_not_forced() -> None:
    one = writer()
    one.add_many([b"a"], now=0.0)
    for bookie_id in ENSEMBLE:
        ack(one, bookie_id, 0)
    for now in (0.2, 1.0, 9.0):
        assert not any(isinstance(action, SendLac) for action in one.tick(now=now))


def test_a_bookie_that_fails_breaks_the_handle_and_changes_no_ensemble() -> None:
    for fail in (
        lambda one: one.bookie_failed(B1, "connection lost", now=0.0),
        lambda one: ack(one, B1, 0, status=Status.IO_ERROR),
        lambda one: one.tick(now=20.0),
    ):
        one = writer()
        one.add_many([b"a"], now=0.0)
        (failed,) = fail(one)
        assert isinstance(failed, Fail)
        with pytest.raises(BookieUnavailable, match="deferred sync") as refused:
            one.add_many([b"b"], now=0.0)
        assert refused.value is failed.error


def test_a_fenced_add_is_reported_as_fenced() -> None:
    one = writer()
    one.add_many([b"a"], now=0.0)
    (failed,) = ack(one, B1, 0, status=Status.FENCED)
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, LedgerFenced)


def test_closing_waits_for_adds_in_flight() -> None:
    one = writer()
    one.add_many([b"a", b"b"], now=0.0)
    assert one.close(now=0.0) == []
    ack(one, B0, 0, 1)
    assert ack(one, B1, 0, 1) == [Confirm(0, 1), SealLedger(1, 2)]

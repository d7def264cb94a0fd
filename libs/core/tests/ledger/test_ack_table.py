"""The ack table of a writer, and late responses of a sealed ledger."""

import pytest
from bindery_core.digest import Digester
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ack_table import AckTable
from bindery_core.ledger.ledger_actions import SealLedger
from bindery_core.ledger.ledger_writer import LedgerWriter
from bindery_core.wire.messages import AddResponse, Status

LEDGER_ID = LedgerId(7)


def ledger(*, write_quorum: int) -> LedgerMetadata:
    """Four bookies. With a write quorum of 2, entry n is stored by the members n % 4 and (n + 1) % 4."""
    ensemble = tuple(BookieId(f"b{i}") for i in range(4))
    return LedgerMetadata(
        ensemble_size=4, write_quorum=write_quorum, ack_quorum=2, segments=(Segment(EntryId(0), ensemble),)
    )


def table(*, write_quorum: int = 2, entries: int = 4) -> AckTable:
    found = AckTable(ledger(write_quorum=write_quorum), first_entry_id=10)
    found.extend(entries)
    return found


def response(entry_id: int, status: Status = Status.OK) -> AddResponse:
    return AddResponse(0, status, LEDGER_ID, entry_id)


@pytest.mark.parametrize("write_quorum", [2, 4])
def test_only_acks_of_known_entries_by_members_of_their_write_set_are_recorded(write_quorum: int) -> None:
    acks = table(write_quorum=write_quorum)
    refused = acks.record(0b0001, [response(entry_id) for entry_id in range(9, 15)])
    assert refused == []
    # Entry 10 is on members 2 and 3, entry 11 on 3 and 0, entry 12 on 0 and 1, entry 13 on 1 and 2.
    assert acks.acks == ([0, 1, 1, 0] if write_quorum == 2 else [1, 1, 1, 1])


@pytest.mark.parametrize("write_quorum", [2, 4])
def test_responses_with_an_error_are_returned_and_not_recorded(write_quorum: int) -> None:
    acks = table(write_quorum=write_quorum)
    responses = [response(11, Status.IO_ERROR), response(12), response(99, Status.FENCED)]
    assert acks.record(0b0001, responses) == [responses[0], responses[2]]
    assert acks.acks == [0, 0, 1, 0]


def test_a_replaced_member_leaves_no_empty_set_of_lost_members() -> None:
    acks = table(write_quorum=4)
    assert acks.give_up(0b0011, 11, 13) == 11
    acks.discard(0b0001, 10, 14)
    assert acks.lost == {11: 0b0010, 12: 0b0010}
    acks.discard(0b0010, 10, 14)
    assert acks.lost == {}


@pytest.mark.parametrize("write_quorum", [3, 4])
def test_late_responses_of_a_sealed_ledger_count_only_if_the_entry_was_stored(write_quorum: int) -> None:
    """Every bookie stores entry n; with a write quorum of 3, all but member (n + 3) % 4 do."""
    writer = LedgerWriter(LEDGER_ID, ledger(write_quorum=write_quorum), digester=Digester(DigestType.CRC32C))
    writer.add_many([b"x"] * 5, now=0.0)
    for name in ("b0", "b1", "b2"):
        writer.receive_many(BookieId(name), [response(entry_id) for entry_id in range(5)], now=0.0)
    assert writer.close(now=0.0) == [SealLedger(4, 5)]
    late = BookieId("b3")
    assert writer.unanswered() == {late: 0 if write_quorum == 4 else 1}
    responses = [response(0), response(1), response(2, Status.IO_ERROR), response(3), response(4), response(5)]
    assert writer.receive_many(late, responses, now=0.0) == []
    assert writer.unanswered() == {late: 2}
    assert writer.receive_many(late, [response(2)], now=0.0) == []
    assert writer.unanswered() == {}

"""Znode values and cursor records: golden bytes, and every state is decoded unchanged."""

import struct
import zlib
from pathlib import Path

import pytest
from bindery_core.errors import Corrupt
from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.managed_ledger_codec import (
    NO_LEDGER,
    CursorInfo,
    CursorState,
    TopicInfo,
    decode_cursor,
    decode_position,
    decode_topic,
    encode_cursor,
    encode_position,
    encode_topic,
)
from bindery_pulsar.managed_ledger_pb2 import (
    ManagedLedgerInfo,
    ManagedLedgerInfoMetadata,
    MessageRange,
    NestedPositionInfo,
    PositionInfo,
)
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position
from hypothesis import given, settings
from hypothesis import strategies as st

GOLDEN = Path(__file__).parent / "golden"


def ranges(*items: tuple[int, int, int]) -> AckRanges:
    acked = AckRanges()
    for item in items:
        acked.add_range(*item)
    return acked


TOPIC = TopicInfo(
    ledgers=(
        LedgerRecord(ledger_id=5, entries=50_000, size=1_000_000, closed_ms=1_700_000_000_000),
        LedgerRecord(ledger_id=9),
    ),
    properties={"owner": "me"},
)
STATE = CursorState(
    mark_delete=Position(5, 17),
    acked=ranges((5, 10_019, 10_022), (9, 0, 0)),
    batches={Position(5, 30): (1 << 70) | 0b101, Position(9, 3): 1 << 63},
    properties={"redelivered": 3},
)
SCATTERED = CursorState(
    mark_delete=Position(5, -1), acked=ranges(*[(5, entry, entry) for entry in range(1, 200, 2)], (5, 63, 65))
)
CURSOR = CursorInfo(ledger_id=12, state=STATE, cursor_properties={"tag": "1"}, last_active_ms=1_700_000_000_000)

GOLDENS = {
    "topic_info.bin": encode_topic(TOPIC),
    "topic_info_terminated.bin": encode_topic(TopicInfo(ledgers=TOPIC.ledgers[:1], terminated=Position(5, 49_999))),
    "cursor_info.bin": encode_cursor(CURSOR),
    "cursor_info_inline.bin": encode_cursor(CursorInfo(ledger_id=NO_LEDGER, state=STATE)),
    "position_info_ranges.bin": encode_position(STATE),
    "position_info_bits.bin": encode_position(SCATTERED),
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_values_are_encoded_to_the_golden_bytes(name: str) -> None:
    assert GOLDENS[name] == (GOLDEN / name).read_bytes()


def test_the_golden_bytes_are_decoded() -> None:
    assert decode_topic((GOLDEN / "topic_info.bin").read_bytes()) == TOPIC
    assert decode_topic((GOLDEN / "topic_info_terminated.bin").read_bytes()).terminated == Position(5, 49_999)
    assert decode_cursor((GOLDEN / "cursor_info.bin").read_bytes()) == CURSOR
    assert decode_position((GOLDEN / "position_info_ranges.bin").read_bytes()) == STATE
    assert decode_position((GOLDEN / "position_info_bits.bin").read_bytes()) == SCATTERED


def test_the_golden_topic_matches_the_specification() -> None:
    """Encoded by hand: field 1 = ledgers (1 id, 2 entries, 3 size, 4 timestamp), field 3 = properties."""
    closed = b"\x08\x05" + b"\x10\xd0\x86\x03" + b"\x18\xc0\x84\x3d" + b"\x20\x80\xd0\x95\xff\xbc\x31"
    current = b"\x08\x09" + b"\x20\x00"
    owner = b"\x0a\x05owner\x12\x02me"
    parts = [(b"\x0a", closed), (b"\x0a", current), (b"\x1a", owner)]
    assert GOLDENS["topic_info.bin"] == b"".join(tag + bytes([len(body)]) + body for tag, body in parts)


def test_the_shorter_form_of_ranges_is_chosen() -> None:
    assert PositionInfo.FromString(GOLDENS["position_info_ranges.bin"]).individualDeletedMessages
    bits = PositionInfo.FromString(GOLDENS["position_info_bits.bin"])
    assert not bits.individualDeletedMessages
    assert len(bits.individualDeletedMessageRanges[0].values) == 4
    assert len(GOLDENS["position_info_bits.bin"]) < 60


def test_the_size_of_a_record_depends_on_the_gaps_and_not_on_the_entries() -> None:
    one_hole = CursorState(mark_delete=Position(5, 0), acked=ranges((5, 2, 10_000_000)))
    assert len(encode_position(one_hole)) < 50


ENTRIES = st.integers(0, 300)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 3), ENTRIES, st.integers(0, 60)), max_size=40),
    st.dictionaries(st.builds(Position, st.integers(0, 2**62), ENTRIES), st.integers(1, 2**200), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_every_state_is_decoded_unchanged(
    items: list[tuple[int, int, int]], batches: dict[Position, int], numbers: dict[str, int], texts: dict[str, str]
) -> None:
    acked = ranges(*[(ledger, first, first + length) for ledger, first, length in items])
    state = CursorState(mark_delete=Position(2**63 - 1, -1), acked=acked, batches=batches, properties=numbers)
    assert decode_position(encode_position(state)) == state
    info = CursorInfo(ledger_id=NO_LEDGER, state=state, cursor_properties=texts, last_active_ms=5)
    assert decode_cursor(encode_cursor(info)) == info


def test_unknown_fields_are_kept() -> None:
    message = ManagedLedgerInfo.FromString(GOLDENS["topic_info.bin"])
    message.ledgerInfo[0].offloadContext.uidMsb = 7
    message.ledgerInfo[0].properties.add(key="a", value="b")
    data = message.SerializeToString()
    info = decode_topic(data)
    assert info.ledgers[0].entries == 50_000
    assert ManagedLedgerInfo.FromString(encode_topic(info)) == message


def test_ledgers_are_sorted_and_a_repeated_ledger_is_corrupt() -> None:
    message = ManagedLedgerInfo()
    for ledger_id in (9, 5):
        message.ledgerInfo.add(ledgerId=ledger_id)
    assert [record.ledger_id for record in decode_topic(message.SerializeToString()).ledgers] == [5, 9]
    message.ledgerInfo.add(ledgerId=5)
    with pytest.raises(Corrupt, match="twice"):
        decode_topic(message.SerializeToString())


def test_an_empty_znode_is_a_topic_without_ledgers() -> None:
    assert decode_topic(b"") == TopicInfo()


def test_a_range_over_a_ledger_boundary_counts_in_its_last_ledger() -> None:
    message = PositionInfo(ledgerId=1, entryId=0)
    message.individualDeletedMessages.append(
        MessageRange(
            lowerEndpoint=NestedPositionInfo(ledgerId=1, entryId=7),
            upperEndpoint=NestedPositionInfo(ledgerId=2, entryId=3),
        )
    )
    assert decode_position(message.SerializeToString()).acked == ranges((2, 0, 3))


def compressed(body: bytes, kind: int, size: int) -> bytes:
    head = ManagedLedgerInfoMetadata(compressionType=kind, uncompressedSize=size).SerializeToString()
    return struct.pack(">HI", 0x4778, len(head)) + head + body


def test_compressed_values_are_read() -> None:
    plain = GOLDENS["topic_info.bin"]
    assert decode_topic(compressed(zlib.compress(plain), 2, len(plain))) == TOPIC
    assert decode_topic(compressed(plain, 0, len(plain))) == TOPIC


@pytest.mark.parametrize(
    "data",
    [
        compressed(b"x", 1, 1),
        compressed(b"x", 2, 1),
        compressed(zlib.compress(b"xy"), 2, 1),
        compressed(b"", 2, 2**31 - 1),
        compressed(b"", 2, -1),
        b"\x47\x78\x00\x00\x00\x09\xff",
        b"\x08",
        b"\xff" * 9,
    ],
)
def test_unreadable_values_are_corrupt(data: bytes) -> None:
    for decode in (decode_topic, decode_cursor):
        with pytest.raises(Corrupt):
            decode(data)


def test_a_cursor_that_pulsar_left_without_a_position_has_no_state() -> None:
    assert decode_cursor(encode_cursor(CursorInfo(ledger_id=3, state=None))).state is None

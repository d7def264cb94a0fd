"""The subscription log: golden bytes, every state and change is replayed, and damage is reported, never skipped."""

import random
from pathlib import Path
from typing import Any

import pytest
from bindery_core.errors import Corrupt
from bindery_pulsar import managed_ledger_pb2, subscription_log
from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.cursor_fields import BLOB_SIZE_MAX, Counts
from bindery_pulsar.managed_ledger_codec import CursorState, decode_position, encode_position
from bindery_pulsar.managed_ledger_pb2 import PositionInfo
from bindery_pulsar.managed_ledger_records import Position
from bindery_pulsar.subscription_log import (
    CursorChange,
    Extent,
    LogReplay,
    encode_change,
    encode_snapshot,
    find_extent,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

GOLDEN = Path(__file__).parent / "golden"


def ranges(*items: tuple[int, int, int]) -> AckRanges:
    acked = AckRanges()
    for item in items:
        acked.add_range(*item)
    return acked


STATE = CursorState(
    mark_delete=Position(5, 17),
    acked=ranges((5, 19, 22), (9, 0, 0)),
    batches={Position(5, 30): 0b101},
    properties={"n": 3},
    redelivery_counts={Position(5, 40): ((1, 0b01), (7, 0b10)), Position(5, 41): ((2, 1),), Position(5, 42): ((2, 1),)},
    blobs={"a": b"1", "b": b"2"},
)
CHANGE = CursorChange(
    mark_delete=Position(5, 22),
    properties={"n": 4},
    acked=ranges((5, 30, 30), (5, 41, 41)),
    batches={Position(5, 31): 1},
    redelivery_counts={Position(5, 42): ((3, 1),)},
    blobs={"c": b"3"},
    removed_blobs=["a"],
)
CHANGED = CursorState(
    mark_delete=Position(5, 22),
    acked=ranges((5, 30, 30), (5, 41, 41), (9, 0, 0)),
    batches={Position(5, 31): 1},
    properties={"n": 4},
    redelivery_counts={Position(5, 40): ((1, 0b01), (7, 0b10)), Position(5, 42): ((3, 1),)},
    blobs={"b": b"2", "c": b"3"},
)
MOVE = CursorChange(mark_delete=Position(5, 3), acked=ranges((5, 6, 6)), is_move=True)
MOVED = CursorState(mark_delete=Position(5, 3), acked=ranges((5, 6, 6)))


def replayed(records: list[bytes], *, first: int = 0) -> CursorState:
    replay = LogReplay()
    for offset, record in enumerate(records):
        replay.feed(first + offset, record)
    return replay.state()


def snapshot(state: CursorState, *, entry_id: int = 0) -> list[bytes]:
    return list(encode_snapshot(state, entry_id=entry_id))


def log() -> list[bytes]:
    """A snapshot, a change, a move and a change."""
    return [
        *snapshot(STATE),
        *encode_change(CHANGE, snapshot_entry=0, entry_id=1),
        *encode_change(MOVE, snapshot_entry=0, entry_id=2),
        *encode_change(CursorChange(mark_delete=Position(5, 4)), snapshot_entry=0, entry_id=3),
    ]


GOLDENS = {
    "subscription_log_snapshot.bin": snapshot(STATE, entry_id=6)[0],
    "subscription_log_change.bin": encode_change(CHANGE, snapshot_entry=6, entry_id=7)[0],
    "subscription_log_move.bin": encode_change(MOVE, snapshot_entry=6, entry_id=8)[0],
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_records_are_encoded_to_the_golden_bytes(name: str) -> None:
    assert GOLDENS[name] == (GOLDEN / name).read_bytes()


def test_the_golden_records_are_replayed() -> None:
    names = ("subscription_log_snapshot.bin", "subscription_log_change.bin", "subscription_log_move.bin")
    records = [(GOLDEN / name).read_bytes() for name in names]
    assert [replayed(records[:count], first=6) for count in (1, 2, 3)] == [STATE, CHANGED, MOVED]


def test_the_golden_move_matches_the_specification() -> None:
    """Encoded by hand: ledger and entry, bit 6 of ledger 5, and field 1001 with kind 3, 6 and 2."""
    position = b"\x08\x05" + b"\x10\x03"
    acked = b"\x32\x04" + b"\x08\x05\x10\x40"
    relation = b"\xca\x3e\x06" + b"\x08\x03" + b"\x10\x06" + b"\x18\x02"
    assert GOLDENS["subscription_log_move.bin"] == position + acked + relation


def test_a_reader_without_our_field_finds_the_position_and_acknowledgements_that_hold() -> None:
    """Pulsar reads the last record only. It must never skip a message that is not acknowledged."""
    file = descriptor_pb2.FileDescriptorProto()
    managed_ledger_pb2.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        kept = [field for field in message.field if field.number <= 1000]
        del message.field[:]
        message.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    theirs: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("bindery.managed_ledger.PositionInfo"))
    for record, state in zip(log()[:3], (STATE, CHANGED, MOVED), strict=True):
        read = theirs.FromString(record)
        assert (read.ledgerId, read.entryId) == state.mark_delete
        assert {item.name: item.value for item in read.properties} == state.properties
        read.DiscardUnknownFields()
        pulsars = decode_position(read.SerializeToString())
        assert all(state.acked.contains(ledger, entry) for ledger, entry, _ in pulsars.acked)
        assert all(state.batches[position] == bits for position, bits in pulsars.batches.items())
    read = theirs.FromString(log()[0])
    read.DiscardUnknownFields()
    assert read.SerializeToString() == encode_position(STATE), "a snapshot is exactly the form of Pulsar"


def test_a_record_of_pulsar_is_the_complete_state() -> None:
    plain = CursorState(mark_delete=Position(5, 1), acked=ranges((5, 3, 3)), batches={Position(5, 7): 2})
    assert replayed([encode_position(plain)], first=8) == plain
    assert replayed([*log(), encode_position(plain)]) == plain
    change = encode_change(CursorChange(mark_delete=Position(5, 3)), snapshot_entry=4, entry_id=5)
    assert replayed([*log(), encode_position(plain), *change]).mark_delete == Position(5, 3)
    stale = encode_change(CursorChange(mark_delete=Position(5, 3)), snapshot_entry=0, entry_id=5)
    with pytest.raises(Corrupt, match="another snapshot"):
        replayed([*log(), encode_position(plain), *stale])


LARGE = CursorState(
    mark_delete=Position(5, -1),
    acked=ranges((5, 3, 4)),
    batches={Position(6, entry): 1 << 600 for entry in range(12_000)},
    redelivery_counts={Position(7, entry): ((1 + entry % 5, 1 << 60),) for entry in range(40_000)},
    blobs={f"blob {i}": bytes([i]) * BLOB_SIZE_MAX for i in range(3)},
)


def test_a_large_snapshot_has_several_records_of_about_a_megabyte() -> None:
    records = snapshot(LARGE, entry_id=10)
    assert len(records) > 5
    assert max(map(len, records)) < 1.1 * 2**20
    assert replayed(records, first=10) == LARGE
    assert decode_position(records[-1]).acked == LARGE.acked, "the last record has what Pulsar reads"
    for count in (0, 1, len(records) - 1):
        with pytest.raises(Corrupt, match="no complete snapshot"):
            replayed(records[:count], first=10)


def test_acknowledgements_that_exceed_a_record_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_log, "_SLICE_BLOCKS_MAX", 2)
    acked = ranges(*[(5, entry, entry) for entry in range(0, 40_000, 2)], (6, 0, 10**6), (7, 1, 3))
    state = CursorState(mark_delete=Position(5, -1), acked=acked)
    records = snapshot(state)
    assert len(records) == 7
    assert replayed(records) == state
    messages = [PositionInfo.FromString(record) for record in records]
    assert not any(each.individualDeletedMessages and each.individualDeletedMessageRanges for each in messages)


def test_a_large_change_counts_as_a_whole_or_not_at_all() -> None:
    change = CursorChange(
        mark_delete=Position(5, 20),
        blobs={f"blob {i}": bytes([i]) * BLOB_SIZE_MAX for i in range(64)},
        removed_blobs=["a", "b"],
    )
    records = encode_change(change, snapshot_entry=0, entry_id=1)
    assert len(records) == 65
    assert replayed([*snapshot(STATE), *records]).blobs == change.blobs
    for count in (0, 1, 64):
        assert replayed([*snapshot(STATE), *records[:count]]) == STATE
    for bad in (records[1:], [records[0], records[2]], [*records[:2], *records]):
        with pytest.raises(Corrupt):
            replayed([*snapshot(STATE), *bad])


def test_the_extent_of_a_log_begins_with_its_last_complete_snapshot() -> None:
    records = log()
    assert find_extent(3, records[3]) == Extent(0, 3, True)
    assert find_extent(9, encode_position(STATE)) == Extent(9, 9, True)
    large = snapshot(LARGE, entry_id=4)
    assert find_extent(4, large[0]) == find_extent(6, large[2]) == Extent(3, 3, False)
    assert find_extent(3 + len(large), large[-1]) == Extent(4, 3 + len(large), True)
    with pytest.raises(Corrupt, match="no complete snapshot"):
        find_extent(0, snapshot(LARGE)[0])


@pytest.mark.parametrize("first", range(4))
def test_a_record_out_of_its_place_is_corrupt(first: int) -> None:
    records = log()
    for other in range(6):
        if other != first:
            with pytest.raises(Corrupt, match="place"):
                LogReplay().feed(other, records[first])
            with pytest.raises(Corrupt, match="place"):
                find_extent(other, records[first])


def test_a_missing_or_repeated_record_is_corrupt() -> None:
    records = log()
    for wrong in (
        [records[0], records[2]],
        records[1:],
        [records[0], records[0]],
        [records[0], records[1], records[1]],
    ):
        with pytest.raises(Corrupt):
            replayed(wrong)
    replay = LogReplay()
    with pytest.raises(Corrupt, match="no complete snapshot"):
        replay.state()
    with pytest.raises(Corrupt, match="another snapshot"):
        replay.feed(1, records[1])


def test_the_position_moves_back_in_a_move_only() -> None:
    back = encode_change(CursorChange(mark_delete=Position(5, 16)), snapshot_entry=0, entry_id=1)
    with pytest.raises(Corrupt, match="back"):
        replayed([*snapshot(STATE), *back])


def damaged(**fields: Any) -> bytes:
    message = PositionInfo.FromString(GOLDENS["subscription_log_snapshot.bin"])
    for name, value in fields.items():
        setattr(message.log, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "fields",
    [{"kind": 0}, {"kind": 4}, {"snapshot_entry": -1}, {"snapshot_entry": 7}, {"sequence": 1}, {"part": 1}],
)
def test_an_invalid_relation_to_other_records_is_corrupt(fields: dict[str, int]) -> None:
    with pytest.raises(Corrupt):
        replayed([damaged(**fields)], first=6)


@pytest.mark.parametrize(
    "counts",
    [
        {"entries": 0},
        {"entries": -1},
        {"entries": 1_000_001},
        {"entries": 2**62},
        {"first_entry": -1},
        {"levels": []},
        {"levels": [(0, [1])]},
        {"levels": [(2**31, [1])]},
        {"levels": [(1, [0])]},
        {"levels": [(1, [1]), (2, [3])]},
        {"levels": [(2, [1]), (1, [2])]},
    ],
)
def test_invalid_redelivery_counts_are_corrupt_and_take_no_time(counts: dict[str, Any]) -> None:
    message = PositionInfo.FromString(GOLDENS["subscription_log_snapshot.bin"])
    run = message.log.extra.redelivery_counts[0]
    for name in counts.keys() - {"levels"}:
        setattr(run, name, counts[name])
    if "levels" in counts:
        del run.levels[:]
        for count, messages in counts["levels"]:
            run.levels.add(count=count, messages=messages)
    with pytest.raises(Corrupt, match="redelivery counts"):
        replayed([message.SerializeToString()], first=6)


def test_too_many_or_too_large_blobs_are_corrupt() -> None:
    for blobs in ({str(i): b"" for i in range(65)}, {"a": bytes(BLOB_SIZE_MAX + 1)}):
        with pytest.raises(Corrupt, match="blob"):
            replayed(snapshot(CursorState(mark_delete=Position(5, 1), blobs=blobs)))


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_a_truncated_or_changed_record_is_corrupt_or_another_valid_one(name: str) -> None:
    """Nothing else than Corrupt is raised, whatever is damaged. Bookies detect damage by checksums before that."""
    record = GOLDENS[name]
    entry_id = PositionInfo.FromString(record).log.sequence + 6
    chance = random.Random(name)
    variants = [record[:size] for size in range(len(record))]
    for _ in range(2000):
        changed = bytearray(record)
        for _ in range(chance.choice([1, 1, 1, 3])):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        variants.append(bytes(changed))
    outcomes = set()
    for variant in variants:
        replay = LogReplay()
        try:
            replay.feed(6, GOLDENS["subscription_log_snapshot.bin"])
            if entry_id == 8:
                replay.feed(7, GOLDENS["subscription_log_change.bin"])
            if entry_id > 6:
                replay.feed(entry_id, variant)
            else:
                replay = LogReplay()
                replay.feed(6, variant)
            replay.state()
            outcomes.add("valid")
        except Corrupt:
            outcomes.add("corrupt")
    assert outcomes == {"valid", "corrupt"}


LEDGER = st.integers(3, 5)
ENTRY = st.integers(0, 9000)
POSITION = st.builds(Position, LEDGER, ENTRY)
LEVELS: st.SearchStrategy[Counts] = st.one_of(
    st.builds(lambda count: ((count, 1),), st.integers(1, 3)),
    st.builds(lambda count, bits: ((count, bits), (count + 1, 1 << 100)), st.integers(1, 9), st.integers(1, 2**99)),
)
RANGES = st.lists(st.tuples(LEDGER, ENTRY, st.integers(0, 9000)), max_size=20)


@settings(deadline=None, max_examples=100)
@given(
    POSITION,
    RANGES,
    st.dictionaries(POSITION, st.integers(1, 2**200), max_size=20),
    st.dictionaries(POSITION, LEVELS, max_size=30),
    st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.integers(0, 2**40),
)
def test_every_state_is_replayed_unchanged(
    mark_delete: Position,
    items: list[tuple[int, int, int]],
    batches: dict[Position, int],
    counts: dict[Position, Counts],
    blobs: dict[str, bytes],
    properties: dict[str, int],
    entry_id: int,
) -> None:
    acked = ranges(*[(ledger, first, first + length) for ledger, first, length in items])
    acked.remove_upto(*mark_delete)

    def is_kept(position: Position) -> bool:
        return position > mark_delete and not acked.contains(*position)

    state = CursorState(
        mark_delete=mark_delete,
        acked=acked,
        batches={position: bits for position, bits in batches.items() if is_kept(position)},
        properties=properties,
        redelivery_counts={position: levels for position, levels in counts.items() if is_kept(position)},
        blobs=blobs,
    )
    assert replayed(snapshot(state, entry_id=entry_id), first=entry_id) == state

"""Fields of a cursor's state: the shorter form is chosen, runs are joined, sizes are not underestimated."""

import pytest
from bindery_core.errors import Corrupt
from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.cursor_fields import (
    BLOB_SIZE_MAX,
    BLOBS_MAX,
    batch_of,
    batch_size,
    bits_of,
    bits_size,
    count_runs,
    counts_size,
    put_acked,
    put_counts,
    read_acked,
    read_blobs,
    read_counts,
    words_of,
)
from bindery_pulsar.managed_ledger_pb2 import CursorExtra, PositionInfo
from bindery_pulsar.managed_ledger_records import Position


@pytest.mark.parametrize(
    ("entries", "as_bits"),
    [
        (range(1), True),  # a word takes less than a range
        (range(6400, 6401), False),  # a hundred words of zeros before it
        (range(0, 6400, 2), True),
        (range(1_000_000, 1_000_100, 2), False),  # 15,625 words of zeros before it
        (range(1_000_000, 1_010_000, 2), True),
    ],
)
def test_acknowledged_entries_are_stored_in_the_shorter_form(entries: range, as_bits: bool) -> None:
    acked = AckRanges()
    for entry in entries:
        acked.add(5, entry)
    message = PositionInfo(ledgerId=5, entryId=-1)
    put_acked(message, acked)
    assert bool(message.individualDeletedMessageRanges) == as_bits
    assert bool(message.individualDeletedMessages) != as_bits
    assert read_acked(message.individualDeletedMessages, message.individualDeletedMessageRanges) == acked


def test_a_long_range_is_no_bit_set() -> None:
    acked = AckRanges()
    acked.add_range(5, 0, 2**61)
    message = PositionInfo(ledgerId=5, entryId=-1)
    put_acked(message, acked)
    assert message.ByteSize() < 60


def test_adjacent_entries_with_equal_counts_are_one_run() -> None:
    counts = {Position(3, entry): ((2, 1),) for entry in (5, 6, 7, 9)}
    counts |= {Position(3, 8): ((1, 1),), Position(4, 10): ((2, 1),)}
    runs = list(count_runs(sorted(counts.items())))
    assert runs == [
        (Position(3, 5), 3, ((2, 1),)),
        (Position(3, 8), 1, ((1, 1),)),
        (Position(3, 9), 1, ((2, 1),)),
        (Position(4, 10), 1, ((2, 1),)),
    ]
    extra = CursorExtra()
    for run in runs:
        put_counts(extra, *run)
    assert dict(read_counts(extra.redelivery_counts)) == counts
    assert list(count_runs([])) == []


def test_sizes_are_not_underestimated() -> None:
    largest = 2**63 - 1
    for bits in (1, 1 << 63, (1 << 64) - 1, (1 << 1000) - 1):
        assert bits_of(words_of(bits)) == bits
        assert batch_of(Position(largest, largest), bits).ByteSize() + 4 <= batch_size(bits)
        extra = CursorExtra()
        counts = ((2**31 - 2, bits), (2**31 - 1, bits << 1000))
        put_counts(extra, Position(largest, largest - 1000), 1000, counts)
        assert extra.ByteSize() <= counts_size(counts)
    assert bits_size(0) > 0


def test_blobs_within_the_limits_are_read() -> None:
    extra = CursorExtra()
    for number in range(BLOBS_MAX):
        extra.blobs.add(name=str(number), value=bytes(BLOB_SIZE_MAX) if number == 0 else b"")
    assert len(read_blobs(extra)) == BLOBS_MAX
    extra.blobs.add(name="one more", value=b"")
    with pytest.raises(Corrupt, match="blob"):
        read_blobs(extra)

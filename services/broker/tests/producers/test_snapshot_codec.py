"""The blobs of a snapshot: what is written is read; what another broker wrote beside them is noticed."""

import random

import pytest
from bindery_broker.producers.keys import KeyRecord, Run
from bindery_broker.producers.snapshot_codec import decode_records, decode_times, encode_record, encode_times
from bindery_core.errors import Corrupt

NOW = 1_700_000_000_000 // 60_000 * 60_000


def test_times_are_read_in_minutes() -> None:
    times = {"b": NOW + 59_999, "a": NOW + 60_000, "ü\u2028": 0}
    assert decode_times(encode_times(times), times) == {"b": NOW, "a": NOW + 60_000, "ü\u2028": 0}


@pytest.mark.parametrize("names", [["a"], ["a", "c"], [], ["a", "b", "c"]], ids=str)
def test_times_of_other_producers_are_ignored(names: list[str]) -> None:
    assert decode_times(encode_times({"a": NOW, "b": NOW}), names) == {}
    assert decode_times(b"", names) == {}


def test_ten_thousand_producers_take_40_kib() -> None:
    assert len(encode_times({str(number): NOW for number in range(10_000)})) == 8 + 4 * 10_000


def record(chance: random.Random) -> tuple[bytes, KeyRecord]:
    found = KeyRecord(chance.randbytes(16), 10_000, NOW)
    for number in range(chance.randrange(4)):
        found.add(Run(number * 100, chance.randrange(2**62), number * 7, 2, 3))
    return chance.randbytes(16), found


def same(a: KeyRecord, b: KeyRecord) -> bool:
    return (a.content, a.count, a.stored, a.stored_ms, a.runs) == (b.content, b.count, b.stored, b.stored_ms, b.runs)


def test_records_are_read_in_order() -> None:
    records = [record(random.Random(seed)) for seed in range(20)]
    blob = b"".join(encode_record(*one) for one in records)
    for (key, found), (wanted_key, wanted) in zip(decode_records(blob), records, strict=True):
        assert key == wanted_key
        assert same(found, wanted)


def test_a_blob_that_is_cut_short_is_corrupt() -> None:
    whole = encode_record(*record(random.Random(3)))
    for size in range(1, len(whole)):
        with pytest.raises(Corrupt):
            list(decode_records(whole[:size]))

"""Sequence ids of rows, and attempts that repeat a partition with the same or with other rows."""

import random

import pytest
from bindery_core.errors import BadRequest
from bindery_spark.sources.sink import sequence
from bindery_spark.sources.sink.sequence import (
    BATCH_MAX,
    ROWS_MAX,
    PartitionRows,
    RowsChanged,
    Stored,
    parts_of,
    producer_name,
    sequence_id,
)

T = "persistent://public/default/t"


def attempt(contents: list[bytes], *, batch: int = 3, last: int = -1, topic: str = T) -> list[int | None]:
    rows = PartitionRows(batch)
    rows.begin(topic, last)
    ids = [rows.add(topic, content) for content in contents]
    rows.end()
    assert rows.count == len(contents)
    return ids


def attempt_into(sent: list[int | None], rows: PartitionRows, contents: list[bytes]) -> None:
    sent.extend(rows.add(T, content) for content in contents)
    rows.end()


def test_ids_ascend_by_batch_then_row_and_fit_into_63_bits() -> None:
    assert sequence_id(BATCH_MAX, ROWS_MAX - 1, 1023) == 2**63 - 1
    ids = [sequence_id(batch, row, check) for batch in (0, 1, 9) for row in (0, 1, 5_000) for check in (1023, 0)]
    rows = [one >> 10 for one in ids]
    assert rows == sorted(rows)
    for one in ids:
        assert sequence_id(*parts_of(one)) == one
    assert parts_of(sequence_id(7, 8, 9)) == Stored(7, 8, 9)
    assert producer_name("q", 4) == "spark-q-4"


def test_a_repeated_attempt_skips_what_is_stored_and_continues() -> None:
    contents = [b"%d" % i for i in range(50)]
    first = attempt(contents)
    assert all(one is not None for one in first)
    assert first == sorted(first, key=lambda one: one or 0)
    for stored in range(50):
        last = first[stored]
        assert last is not None
        again = attempt(contents, last=last)
        assert again == [None] * (stored + 1) + first[stored + 1 :]


def test_the_next_batch_begins_at_its_first_row() -> None:
    last = attempt([b"a", b"b"], batch=3)[-1]
    assert last is not None
    following = attempt([b"a", b"b"], batch=4, last=last)
    assert [parts_of(one).row for one in following if one is not None] == [0, 1]
    assert min(one for one in following if one is not None) > last


def test_other_rows_are_detected_before_anything_is_stored() -> None:
    contents = [b"%d" % i for i in range(20)]
    last = attempt(contents)[9]
    assert last is not None
    changed = [*contents[:4], b"x", *contents[5:]]
    swapped = [contents[1], contents[0], *contents[2:]]
    for other in (changed, swapped, contents[1:], contents[:9], contents[:5], []):
        rows = PartitionRows(3)
        rows.begin(T, last)
        sent: list[int | None] = []
        with pytest.raises(RowsChanged, match="the same rows"):
            attempt_into(sent, rows, other)
        assert set(sent) <= {None}


def test_nearly_all_differences_are_detected() -> None:
    chance = random.Random(5)
    missed = 0
    for _ in range(2_000):
        contents = [chance.randbytes(8) for _ in range(4)]
        last = attempt(contents)[2]
        assert last is not None
        rows = PartitionRows(3)
        rows.begin(T, last)
        try:
            for content in [chance.randbytes(8), *contents[1:]]:
                rows.add(T, content)
        except RowsChanged:
            continue
        missed += 1
    assert missed < 20  # 2 are expected


def test_a_later_batch_in_the_topic_is_an_error() -> None:
    last = attempt([b"a"], batch=9)[0]
    assert last is not None
    with pytest.raises(RowsChanged, match="a later batch"):
        attempt([b"a"], batch=8, last=last)


def test_each_topic_of_a_partition_is_compared() -> None:
    rows = PartitionRows(1)
    ids = []
    for topic, content in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("b", b"4")):
        if not rows.knows(topic):
            rows.begin(topic, -1)
        ids.append(rows.add(topic, content))
    first_b = ids[1]
    assert first_b is not None
    again = PartitionRows(1)
    again.begin("a", -1)
    again.begin("b", first_b)
    assert [again.add("a", b"1"), again.add("b", b"2"), again.add("a", b"3"), again.add("b", b"4")] == [
        ids[0], None, ids[2], ids[3],
    ]  # fmt: skip
    other = PartitionRows(1)
    other.begin("a", -1)
    other.begin("b", first_b)
    other.add("a", b"1")
    other.add("a", b"2")
    with pytest.raises(RowsChanged):
        other.add("b", b"2")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest):
        PartitionRows(BATCH_MAX + 1)
    monkeypatch.setattr(sequence, "ROWS_MAX", 2)
    with pytest.raises(BadRequest, match="more than 2 rows; repartition"):
        attempt([b"a", b"b", b"c"])

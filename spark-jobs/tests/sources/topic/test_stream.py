"""The stream reader of a topic, without a cluster."""

from datetime import UTC, datetime
from typing import Any

import pytest
from bindery_core.errors import NoSuchEntry
from bindery_pulsar.message_id import EARLIEST
from bindery_spark.sources import cluster
from bindery_spark.sources.topic.options import TopicOptions
from bindery_spark.sources.topic.positions import (
    ALL,
    Extent,
    to_offset,
)
from bindery_spark.sources.topic.source import TopicPart, TopicStreamReader, _shares, narrowed
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan
from pyspark.sql.streaming.datasource import ReadAllAvailable
from topic_extents import HOUR_MS, entries_of, extents

T = "public/default/t"


def test_filters_on_publish_time_are_rounded_outwards() -> None:
    at = datetime(1970, 1, 1, 1, 0, 0, 1_500, tzinfo=UTC)  # an hour and 1.5 ms
    name = ("publish_time",)
    assert narrowed(ALL, GreaterThanOrEqual(name, at)).from_ms == HOUR_MS + 1
    assert narrowed(ALL, LessThan(name, at)).to_ms == HOUR_MS + 2
    equal = narrowed(ALL, EqualTo(name, at))
    assert (equal.from_ms, equal.to_ms) == (HOUR_MS + 1, HOUR_MS + 2)
    assert narrowed(ALL, LessThan(("event_time",), at)) is ALL
    assert narrowed(ALL, LessThan(name, datetime.max.replace(tzinfo=UTC))) == ALL


class Stream:
    """A stream over ledgers that change. Each access to `reader` creates a new one, as after a restart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        self.topics: dict[str, list[Extent]] = {T: []}
        self._options = TopicOptions.parse({"zookeeper": "h:1", "topic": "t", **options})
        monkeypatch.setattr(cluster, "run", lambda _: self.topics)

    @property
    def reader(self) -> TopicStreamReader:
        return TopicStreamReader(self._options)

    def end(self, start: dict[str, Any]) -> dict[str, Any]:
        return self.reader.latestOffset(start, ReadAllAvailable())

    def entries(self, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int]]:
        parts = self.reader.partitions(start, end)
        return [each for part in parts if isinstance(part, TopicPart) for each in entries_of(list(part.slices))]


@pytest.mark.parametrize("start", ["earliest", "latest", "1970-01-01T01:30:00Z"])
def test_a_first_batch_that_is_read_again_after_a_restart_has_the_same_entries(
    monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    stream = Stream(monkeypatch, start=start)
    stream.topics = {T: extents(3, 3)}
    before = stream.reader.initialOffset()
    begin = stream.end(before)
    assert stream.entries(before, begin) == []
    expected = {"earliest": [(10, n) for n in range(4)] + [(20, n) for n in range(4)], "latest": []}
    noted = stream.end(begin)
    assert stream.entries(begin, noted) == expected.get(start, [(20, n) for n in range(4)])
    stream.topics = {T: extents(3, 3, 3)}
    assert stream.reader.initialOffset() == before, "Spark requests it again"
    assert stream.entries(before, begin) == []
    assert stream.entries(noted, stream.end(noted)) == [(30, n) for n in range(4)]


def test_a_stream_from_earliest_detects_deletion_by_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch)
    stream.topics = {T: extents(9, 9, 9)}
    begin = stream.end(stream.reader.initialOffset())
    noted = stream.end(begin)
    stream.topics = {T: extents(9, 9, 9)[2:]}
    with pytest.raises(NoSuchEntry, match="retention"):
        stream.entries(begin, noted)
    with pytest.raises(NoSuchEntry, match="retention"):
        stream.end(begin)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_partitions_added_later_are_read_from_their_first_entry(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    stream = Stream(monkeypatch, start=start)
    at = stream.end(stream.reader.initialOffset())
    assert at == to_offset({T: EARLIEST})
    stream.topics = {T: extents(1), "public/default/u": extents(0)}
    seen = []
    while (end := stream.end(at)) != at:
        seen += stream.entries(at, end)
        at = end
    assert seen == [(10, 0), (10, 1), (10, 0)]


def test_a_limit_is_shared_by_partitions_with_entries() -> None:
    assert _shares(10, [0, 100, 100]) == [0, 5, 5]
    assert _shares(10, [2, 100, 1]) == [2, 7, 1]
    assert _shares(1, [5, 5]) in ([1, 0], [0, 1])

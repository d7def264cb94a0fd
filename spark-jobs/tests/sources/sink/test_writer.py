"""Rows written by a real Spark to a broker that fails: each is stored exactly once, in the order of its partition."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bindery_pulsar.murmur3 import murmur3_hash
from bindery_spark.sources import register
from bindery_spark.sources.sink.sequence import parts_of
from fake_broker import CUT, CUT_AFTER, FakeBroker
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture(scope="module", autouse=True)
def _registered(spark: SparkSession) -> None:
    register(spark)


def rows(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(count, numPartitions=partitions).select(
        F.col("id").cast("string").alias("value"), (F.col("id") % 3).cast("string").alias("key")
    )


def write(frame: DataFrame, broker: FakeBroker, topic: str = "t", **options: Any) -> None:
    options = {"url": broker.url, "request_messages": 10, "retry_s": 20, **options}
    frame.write.format("bindery-topic").mode("append").options(topic=topic, **options).save()


def check(broker: FakeBroker, topic: str, expected: list[str]) -> None:
    """Each row is stored once, and those of a producer in order."""
    assert Counter(broker.payloads(topic)) == Counter(expected)
    by_producer: dict[str, list[int]] = {}
    for message in broker.messages[topic]:
        by_producer.setdefault(message["producer"], []).append(message["sequence_id"])
    assert all(ids == sorted(set(ids)) for ids in by_producer.values())


def texts(*numbers: range) -> list[str]:
    return [str(n) for each in numbers for n in each]


def test_a_table_is_written_once_although_requests_fail(spark: SparkSession, broker: FakeBroker) -> None:
    broker.fail = lambda number: (503, 200, CUT_AFTER, CUT, 200)[number % 5]
    write(rows(spark, 200), broker)
    check(broker, "t", texts(range(200)))
    assert broker.duplicates > 0
    assert {message["key"] for message in broker.messages["t"]} == {"0", "1", "2"}
    assert len({message["producer"] for message in broker.messages["t"]}) == 2
    write(rows(spark, 5, 1), broker)
    assert len(broker.payloads("t")) == 205, "without sink_id each write is one of its own"


def test_a_partitioned_topic_gets_each_row_once_in_the_partition_of_its_key(
    spark: SparkSession, broker: FakeBroker
) -> None:
    broker.partitions["t"] = 3
    broker.fail = lambda number: (503, 200, CUT_AFTER, CUT, 200)[number % 5]
    write(rows(spark, 200), broker, sink_id="job")
    for at in (5, 2):
        broker.posts = 0
        # All from `at` on: the other task of a write that failed goes on for a while, and one refusal might be its.
        broker.fail = lambda number, at=at: 400 if number >= at else 200  # type: ignore[misc]
        with pytest.raises(Exception, match="was refused: made up"):
            write(rows(spark, 300), broker, sink_id="job2")
    broker.fail = lambda _number: 200
    for _ in range(2):
        write(rows(spark, 300), broker, sink_id="job2")
    stored = {f"t-partition-{n}": broker.messages.get(f"t-partition-{n}", []) for n in range(3)}
    assert Counter(m["payload"] for some in stored.values() for m in some) == Counter(texts(range(200), range(300)))
    assert "t" not in broker.messages
    for name, messages in stored.items():
        for message in messages:
            assert name == f"t-partition-{murmur3_hash(message['key'].encode()) % 3}"
        assert (
            broker.messages.get(name) is None
            or Counter((m["producer"], m["sequence_id"]) for m in messages).most_common(1)[0][1] == 1
        )


def test_a_write_that_failed_is_completed_by_repeating_it(spark: SparkSession, broker: FakeBroker) -> None:
    for at in (7, 3, 11):
        broker.posts = 0
        broker.fail = lambda number, at=at: 400 if number == at else 200  # type: ignore[misc]
        with pytest.raises(Exception, match="was refused: made up"):
            write(rows(spark, 300, 1), broker, sink_id="job")
    broker.fail = lambda _number: 200
    before = broker.posts
    write(rows(spark, 300, 1), broker, sink_id="job")
    check(broker, "t", texts(range(300)))
    assert broker.posts - before == 30 - 7 - 3 - 11, "rows that are stored are not sent again"
    write(rows(spark, 300, 1), broker, sink_id="job")
    check(broker, "t", texts(range(300)))


def test_a_repeated_write_with_other_rows_fails_and_stores_nothing(spark: SparkSession, broker: FakeBroker) -> None:
    write(rows(spark, 40, 1), broker, sink_id="job")
    for other in (rows(spark, 41, 1).where("value != '7'"), rows(spark, 30, 1), rows(spark, 40, 2)):
        with pytest.raises(Exception, match="an earlier attempt has stored other rows"):
            write(other, broker, sink_id="job")
    assert len(broker.payloads("t")) <= 40 + 20  # partition 1 of the last one is a producer of its own


def test_each_row_may_have_its_topic(spark: SparkSession, broker: FakeBroker) -> None:
    frame = rows(spark, 100).withColumn("topic", F.expr("concat('t', key)"))
    broker.fail = lambda number: 503 if number % 3 == 1 else 200
    write(frame, broker, sink_id="job")
    write(frame, broker, sink_id="job")
    for key in range(3):
        check(broker, f"t{key}", [str(n) for n in range(100) if n % 3 == key])


def test_errors_name_the_row_and_the_reason(spark: SparkSession, broker: FakeBroker) -> None:
    bad = rows(spark, 20, 1).withColumn("value", F.expr("if(value = '12', null, value)"))
    with pytest.raises(Exception, match="row 12 of partition 0: column value is null"):
        write(bad, broker)
    with pytest.raises(Exception, match="no column for colour"):
        write(rows(spark, 1).withColumn("colour", F.lit("red")), broker)
    with pytest.raises(Exception, match="messages of a topic cannot be replaced"):
        rows(spark, 1).write.format("bindery-topic").mode("overwrite").options(url=broker.url, topic="t").save()
    broker.fail = lambda _number: 503
    with pytest.raises(Exception, match=r"no broker accepted rows 0 to 0 .* within 1 s.*made up"):
        write(rows(spark, 1, 1), broker, retry_s=1)


class Stream:
    """A stream of files to a topic, with a checkpoint."""

    def __init__(self, spark: SparkSession, broker: FakeBroker, folder: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.input = folder / "input"
        self.input.mkdir()
        self.checkpoint = str(folder / "checkpoint")

    def add(self, *numbers: range) -> None:
        for each in numbers:
            name = f"{each.start:08}.txt"
            making = self.input.parent / name
            making.write_text("".join(f"{n}\n" for n in each))
            making.replace(self.input / name)

    def run(self, change: Callable[[DataFrame], DataFrame] = lambda frame: frame, **options: Any) -> None:
        frame = change(self.spark.readStream.option("maxFilesPerTrigger", 2).text(str(self.input)))
        options = {"url": self.broker.url, "topic": "t", "request_messages": 10, "retry_s": 5, **options}
        writer = frame.writeStream.format("bindery-topic").options(checkpointLocation=self.checkpoint, **options)
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()


@pytest.fixture
def stream(spark: SparkSession, broker: FakeBroker, tmp_path: Path) -> Stream:
    return Stream(spark, broker, tmp_path)


def test_a_stream_that_fails_anywhere_continues_with_each_row_exactly_once(stream: Stream) -> None:
    broker = stream.broker
    stream.add(range(35), range(35, 70), range(70, 100))
    failures = 0
    for at in (0, 1, 3, 5, 6, 7):
        broker.posts = 0
        broker.fail = lambda number, at=at: 400 if number == at else 200  # type: ignore[misc]
        try:
            stream.run()
        except StreamingQueryException:
            failures += 1
    assert failures >= 3
    broker.fail = lambda _number: 200
    stream.add(range(100, 130))
    stream.run()
    check(broker, "t", texts(range(130)))
    batches = {parts_of(message["sequence_id"]).batch for message in broker.messages["t"]}
    assert batches == {0, 1, 2}
    assert len({message["producer"].rsplit("-", 1)[0] for message in broker.messages["t"]}) == 1


def test_a_repeated_micro_batch_with_other_rows_fails(stream: Stream) -> None:
    broker = stream.broker
    stream.add(range(50))
    broker.fail = lambda number: 400 if number == 3 else 200
    with pytest.raises(StreamingQueryException, match="was refused"):
        stream.run()
    broker.fail = lambda _number: 200
    stored = broker.payloads("t")
    with pytest.raises(StreamingQueryException, match="an earlier attempt has stored other rows"):
        stream.run(lambda frame: frame.where("value != '4'"))
    assert broker.payloads("t") == stored
    stream.run()
    check(broker, "t", texts(range(50)))


def test_a_checkpoint_that_is_older_than_the_topic_is_refused(stream: Stream, tmp_path: Path) -> None:
    stream.add(range(10), range(10, 20), range(20, 30))
    stream.run(sink_id="mine")
    stored = stream.broker.payloads("t")
    assert len(stored) == 30
    stream.checkpoint = str(tmp_path / "another")
    with pytest.raises(StreamingQueryException, match="a later batch with this sink id"):
        stream.run(sink_id="mine")
    assert stream.broker.payloads("t") == stored
    stream.run(sink_id="another")
    assert len(stream.broker.payloads("t")) == 60


def test_a_table_written_in_each_micro_batch_is_written_once(stream: Stream) -> None:
    broker = stream.broker
    stream.add(range(25), range(25, 50), range(50, 75))
    frame = stream.spark.readStream.option("maxFilesPerTrigger", 1).text(str(stream.input))
    failing = [True, True]

    def store(batch: DataFrame, _batch_id: int) -> None:
        write(batch, broker, sink_id="each")
        if failing and failing.pop():
            raise RuntimeError("made up, after the write")

    for _ in range(3):
        query = frame.writeStream.foreachBatch(store).option("checkpointLocation", stream.checkpoint)
        running = query.trigger(availableNow=True).start()
        try:
            running.awaitTermination()
        except StreamingQueryException as error:
            assert "made up, after the write" in str(error)  # noqa: PT017
    check(broker, "t", texts(range(75)))

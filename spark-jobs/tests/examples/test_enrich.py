"""The example job on a real Spark and a broker that fails: totals are stored exactly once."""

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bindery_spark.sources import register
from bindery_spark.sources.sink.sequence import parts_of
from fake_broker import CUT_AFTER, FakeBroker
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(300)

SHUFFLE = "spark.sql.shuffle.partitions"
CUSTOMERS = 7


def load_example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "enrich.py"
    spec = importlib.util.spec_from_file_location("bindery_example_enrich", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


enrich = load_example()


@pytest.fixture
def broker(spark: SparkSession) -> Iterator[FakeBroker]:
    register(spark)
    before = spark.conf.get(SHUFFLE)
    spark.conf.set(SHUFFLE, "3")
    with FakeBroker() as broker:
        yield broker
    spark.conf.set(SHUFFLE, before or "1")


def messages(spark: SparkSession, payloads: list[Any]) -> DataFrame:
    rows = [(str(n), None, payload) for n, payload in enumerate(payloads)]
    return spark.createDataFrame(rows, "message_id string, event_time timestamp, payload binary")


def test_only_orders_with_a_usable_amount_count(spark: SparkSession) -> None:
    payloads = [
        b'{"customer": "ann", "amount": 0.1}',
        b'{"customer": "ann", "amount": 0.2}',
        b'{"customer": "bob", "amount": -7}',
        *(b"no order", b"{}", None, b'{"customer": "ann"}', b'{"amount": 3}', b'{"customer": "ann", "amount": "x"}'),
        *(b'{"customer": "ann", "amount": %s}' % amount for amount in (b"NaN", b"Infinity", b"1e12", b"-1e300")),
    ]
    orders = enrich.orders_of(messages(spark, payloads))
    assert {row.message_id for row in orders.collect()} == {"0", "1", "2"}
    totals = {row.customer: (row.orders, row.total) for row in enrich.totals_of(orders).collect()}
    assert totals == {"ann": (2, Decimal("0.30")), "bob": (1, Decimal(-7))}
    found = [json.loads(row.value) for row in enrich.enriched(orders).collect()]
    assert [order["large"] for order in found] == [False] * 3


class Totals:
    """The query of the totals over files of orders; a micro-batch reads one file."""

    def __init__(self, spark: SparkSession, broker: FakeBroker, folder: Path) -> None:
        self._spark = spark
        self._broker = broker
        self._folder = folder
        (folder / "input").mkdir()
        self.count = 0

    def add(self, count: int) -> None:
        lines = (
            json.dumps({"customer": f"c{n % CUSTOMERS}", "amount": n / 100})
            for n in range(self.count, self.count + count)
        )
        made = self._folder / "made"
        made.write_text("\n".join(lines))
        # Spark reads the oldest file first, by milliseconds: files made within one would come in any order.
        os.utime(made, (1_700_000_000 + self.count, 1_700_000_000 + self.count))
        made.replace(self._folder / "input" / f"{self.count:08}.txt")
        self.count += count

    def run(self, checkpoint: str = "checkpoint") -> None:
        lines = self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._folder / "input"))
        orders = enrich.orders_of(lines.selectExpr("'1:1' message_id", "null event_time", "value payload"))
        writer = enrich.totals_of(orders).writeStream.outputMode("update").foreachBatch(
            lambda frame, _batch: enrich.write_totals(frame, url=self._broker.url, topic="public/default/totals")
        )  # fmt: skip
        writer = writer.option("checkpointLocation", str(self._folder / checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()


@pytest.mark.long_run
def test_totals_are_stored_once_although_micro_batches_fail_anywhere(
    spark: SparkSession, broker: FakeBroker, tmp_path: Path
) -> None:
    totals = Totals(spark, broker, tmp_path)
    for count in (40, 3, 60):
        totals.add(count)
    failures = 0
    for at in (0, 1, 1, 2, 1):
        broker.posts = 0
        # All from `at` on: tasks of a query that failed go on for a while, and one refusal might be theirs.
        broker.fail = lambda number, at=at: 400 if number >= at else CUT_AFTER if number % 3 == 1 else 200  # type: ignore[misc]
        try:
            totals.run()
        except PySparkException as error:
            assert "row 0 was refused: made up" in str(error)  # noqa: PT017
            failures += 1
    assert failures >= 3
    broker.fail = lambda number: CUT_AFTER if number % 3 == 1 else 200
    totals.add(20)
    totals.run()
    stored = [(m["key"], json.loads(m["payload"])) for m in broker.messages["totals"]]
    wanted: Counter[tuple[str, int, str]] = Counter()
    sums = dict.fromkeys((f"c{c}" for c in range(CUSTOMERS)), Decimal(0))
    orders: Counter[str] = Counter()
    for batch in (range(40), range(40, 43), range(43, 103), range(103, 123)):
        for n in batch:
            sums[f"c{n % CUSTOMERS}"] += Decimal(n) / 100
            orders[f"c{n % CUSTOMERS}"] += 1
        wanted.update((c, orders[c], f"{sums[c]:.2f}") for c in {f"c{n % CUSTOMERS}" for n in batch})
    assert Counter((key, row["orders"], f"{row['total']:.2f}") for key, row in stored) == wanted
    for customer in sums:
        counts = [row["orders"] for key, row in stored if key == customer]
        assert counts == sorted(counts), customer
    assert {parts_of(message["sequence_id"]).batch for message in broker.messages["totals"]} == {0, 1, 2, 3}


def test_a_job_with_a_new_checkpoint_is_a_new_write(spark: SparkSession, broker: FakeBroker, tmp_path: Path) -> None:
    totals = Totals(spark, broker, tmp_path)
    totals.add(CUSTOMERS)
    totals.run()
    totals.run("another")
    assert Counter(message["key"] for message in broker.messages["totals"]) == {f"c{c}": 2 for c in range(CUSTOMERS)}
    assert len({message["producer"].rsplit("-", 1)[0] for message in broker.messages["totals"]}) == 2

"""Sequence ids of rows, by which brokers store each row once, and the detection of rows that changed. Pure.

Each Spark partition writes as a producer of its own, `spark-<sink id>-<partition>`. A broker stores a message only if
its sequence id is higher than the highest one that is stored of its producer.

| bits   | part  | meaning                                                                                      |
|--------|-------|----------------------------------------------------------------------------------------------|
| 32..62 | batch | number of the micro-batch; 0 for tables                                                      |
| 10..31 | row   | number of the row in the partition, from 0                                                   |
| 0..9   | check | checksum of this row and all before it in the partition                                      |

An attempt that repeats a partition first asks the broker for the highest sequence id that is stored, skips the rows up
to it, and compares its check with that of the same row of its own. If they differ, this attempt has other rows, or the
same in another order, and the task fails before it stores anything: some rows would be missing, and others stored
twice. A difference remains unnoticed once in 1,024 times.

Several attempts may write at the same time, as speculative ones do. Each sends a request when all rows before it are
stored, so what is stored is at any time the beginning of the same sequence, whoever has sent it.
"""

import zlib
from typing import Final, NamedTuple

from bindery_core.errors import BadRequest, Conflict

ROW_BITS: Final = 22
CHECK_BITS: Final = 10
ROWS_MAX: Final = 2**ROW_BITS
"""Maximum number of rows of a partition in one batch."""
BATCH_MAX: Final = 2**31 - 1

assert ROW_BITS + CHECK_BITS == 32


class RowsChanged(Conflict):
    """The rows of a partition are not those that an earlier attempt has begun to store. Nothing was stored now."""

    code = "rows_changed"


class Stored(NamedTuple):
    """The parts of a sequence id."""

    batch: int
    row: int
    check: int


def sequence_id(batch: int, row: int, check: int) -> int:
    assert 0 <= batch <= BATCH_MAX
    assert 0 <= row < ROWS_MAX
    assert 0 <= check < 2**CHECK_BITS
    return batch << 32 | row << CHECK_BITS | check


def parts_of(sequence_id: int) -> Stored:
    return Stored(sequence_id >> 32, sequence_id >> CHECK_BITS & (ROWS_MAX - 1), sequence_id & (2**CHECK_BITS - 1))


def producer_name(sink_id: str, partition: int) -> str:
    return f"spark-{sink_id}-{partition}"


class PartitionRows:
    """The rows of one partition in one batch, in order. Topics are independent of one another for the broker."""

    def __init__(self, batch: int) -> None:
        if not 0 <= batch <= BATCH_MAX:
            raise BadRequest("the number of the micro-batch must be 0 to 2^31 - 1", batch=batch)
        self._batch = batch
        self._stored: dict[str, Stored | None] = {}
        """What is stored of this batch, by topic; None: nothing, or it was compared."""
        self._crc = 0
        self.count = 0
        """Number of rows so far."""

    def knows(self, topic: str) -> bool:
        """Whether `begin` was called for the topic."""
        return topic in self._stored

    def begin(self, topic: str, last_sequence_id: int) -> None:
        """`last_sequence_id`: the highest one of the producer that is stored in the topic; -1: none.

        Raises RowsChanged if a later batch is stored.
        """
        stored = parts_of(last_sequence_id) if last_sequence_id >= 0 else None
        if stored is not None and stored.batch > self._batch:
            raise RowsChanged(
                "the topic has rows of a later batch with this sink id: the checkpoint is older than the topic, or "
                "another query uses the same sink id. Choose another sink_id; earlier rows may then be stored again",
                topic=topic,
                batch=self._batch,
                stored_batch=stored.batch,
            )
        self._stored[topic] = stored if stored is not None and stored.batch == self._batch else None

    def add(self, topic: str, content: bytes) -> int | None:
        """Return the sequence id of the next row, or None if it is stored already. Call `begin` for its topic before.

        `content`: the bytes of the message, the same in each attempt. Raises RowsChanged, BadRequest for too many rows.
        """
        row = self.count
        if row >= ROWS_MAX:
            raise BadRequest(f"a partition has more than {ROWS_MAX} rows; repartition the data", batch=self._batch)
        self.count += 1
        self._crc = zlib.crc32(content, zlib.crc32(topic.encode(), self._crc))
        check = self._crc & (2**CHECK_BITS - 1)
        stored = self._stored[topic]
        if stored is None:
            return sequence_id(self._batch, row, check)
        if row < stored.row:
            return None
        if row > stored.row or check != stored.check:
            raise self._changed(topic, stored)
        self._stored[topic] = None
        return None

    def end(self) -> None:
        """There are no more rows. Raises RowsChanged if an earlier attempt stored more."""
        for topic, stored in self._stored.items():
            if stored is not None:
                raise self._changed(topic, stored)

    def _changed(self, topic: str, stored: Stored) -> RowsChanged:
        return RowsChanged(
            "an earlier attempt has stored other rows of this partition: a repeated partition must have the same rows "
            "in the same order (see docs/topics-in-spark.md). For an independent write, choose another sink_id",
            topic=topic,
            batch=self._batch,
            rows_stored=stored.row + 1,
        )

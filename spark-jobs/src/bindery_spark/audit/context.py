"""Hold what all phases of a run share: Spark, the cluster, the run's directory, and the metadata that it stores.

A run reads the cluster's metadata up to three times and keeps each reading as Parquet files in its directory:

| when   | read                  | tables          |
|--------|-----------------------|-----------------|
| BEFORE | when the run begins   | METADATA_TABLES |
| AFTER  | after the first pass  | METADATA_TABLES |
| AGAIN  | after the second pass | ledgers         |
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as parquet
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.checks import copies as copy_checks
from bindery_spark.audit.ledger_history import KnownLedger
from bindery_spark.audit.options import Options
from bindery_spark.audit.source import Source
from bindery_spark.progress import AuditProgress
from bindery_spark.schemas import TABLES

METADATA_TABLES: Final = ("ledgers", "bookies", "marks", "topics", "cursors")
"""In the order of reading. Each reading takes the ledgers before the topics, so that BEFORE or AFTER has every ledger
that a topic names."""
BEFORE, AFTER, AGAIN = "before", "after", "again"


class RunContext:
    """One run in one directory. `clock_ms`: wall clock."""

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        directory: RunDirectory,
        options: Options,
        *,
        clock_ms: Callable[[], int],
        progress: AuditProgress,
    ) -> None:
        self.spark = spark
        self.source = source
        self.directory = directory
        self.options = options
        self.clock_ms = clock_ms
        self.progress = progress
        self._gone: dict[str, frozenset[str]] = {}

    def frame(self, rows: Sequence[Any], schema: Any) -> DataFrame:
        return self.spark.createDataFrame(rows, schema)

    # --- metadata -----------------------------------------------------------------------------------------------------

    def keep_metadata(self, when: str) -> None:
        """Read METADATA_TABLES and store them as the tables `when`."""
        for name in METADATA_TABLES:
            self.source.keep_table(name, self.directory.table(when, name))

    def table(self, when: str, name: str) -> DataFrame:
        return self.spark.read.schema(TABLES[name]).parquet(str(self.directory.table(when, name)))

    def row_count(self, when: str, name: str) -> int:
        """Number of rows, from the footers of the Parquet files."""
        files = self.directory.table(when, name).glob("*.parquet")
        return sum(parquet.read_metadata(path).num_rows for path in files)

    def gone_bookies(self, when: str) -> frozenset[str]:
        """Bookies that left for good, judged by all ledgers. Cached, because every group needs them."""
        known = self._gone.get(when)
        if known is None:
            rows = copy_checks.gone_bookies(self.table(when, "bookies"), self.table(when, "ledgers")).collect()
            known = self._gone[when] = frozenset(row.bookie for row in rows)
        return known

    def ledger_rows(self, when: str, first: int, last: int) -> list[Row]:
        """Rows of LEDGERS with ids first..last (inclusive) in ascending order, in the driver. Segments are read only if
        the option `bookie` needs them."""
        names = [name for name in TABLES["ledgers"].names if name not in ("custom", "segments")]
        columns = names if self.options.bookie is None else [*names, "segments"]
        within = [("ledger_id", ">=", first), ("ledger_id", "<=", last)]
        table = parquet.read_table(self.directory.table(when, "ledgers"), columns=columns, filters=within)
        rows = (Row(**row) for batch in table.to_batches() for row in batch.to_pylist())
        return sorted(rows, key=lambda row: row.ledger_id)

    def is_selected(self, row: Row) -> bool:
        """Return True if the option `bookie` is not set, or if `row` (of `ledger_rows`) names that bookie."""
        bookie = self.options.bookie
        return bookie is None or any(bookie in segment["ensemble"] for segment in row.segments)

    def selected(self, ledgers: DataFrame) -> DataFrame:
        """Rows of LEDGERS for which `is_selected` is true."""
        if self.options.bookie is None:
            return ledgers
        members = F.flatten(F.transform("segments", lambda s: s["ensemble"]))
        return ledgers.where(F.array_contains(members, self.options.bookie))

    def known_ledgers(self, when: str) -> dict[int, KnownLedger]:
        names = KnownLedger.__dataclass_fields__
        table = parquet.read_table(self.directory.table(when, "ledgers"), columns=[*names])
        known = (KnownLedger(**row) for batch in table.to_batches() for row in batch.to_pylist())
        return {ledger.ledger_id: ledger for ledger in known}

    # --- the first pass -----------------------------------------------------------------------------------------------

    def groups(self) -> list[Path]:
        """Directories of the groups that are done."""
        return [self.directory.group(number) for number in sorted(self.directory.done())]

    def found_kinds(self) -> set[tuple[int, str]]:
        """Ledger id and kind of the findings of the first pass."""
        rows = rows_of((directory / "findings" for directory in self.groups()), columns=("ledger_id", "kind"))
        return {(row["ledger_id"], row["kind"]) for row in rows}


def rows_of(directories: Iterable[Path], *, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of Parquet directories, batch by batch. `columns` None: all."""
    for directory in directories:
        for batch in parquet.read_table(directory, columns=None if columns is None else list(columns)).to_batches():
            yield from batch.to_pylist()

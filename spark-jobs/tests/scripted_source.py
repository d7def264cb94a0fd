"""A scripted cluster for full audit runs without a cluster."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from bindery_core.errors import BinderyError
from bindery_metadata.ledgers.verified_records import Verified
from bindery_metadata.recovery.last_audits import LastAudit
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.schemas import SEGMENT, TABLES
from frames import Tables, bookie, copy
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema

ABC = ["a", "b", "c"]


@dataclass
class Scripted:
    """A cluster that changes with each reading. After the last step it stays as it is."""

    tables: Tables
    ledgers: list[list[dict]]
    copies: Callable[[int], list[dict]]
    """Rows of the nth reading of the copies."""
    verified: dict[int, Verified] = field(default_factory=dict)
    read: list[tuple[int, int]] = field(default_factory=list)
    kept: int = 0
    beside: list[dict] = field(default_factory=list)
    """Bookies that no metadata names."""
    unlisted: list[dict] = field(default_factory=list)
    """Rows of bookies that cannot list their ledgers or entries."""
    bookies: list[list[dict]] = field(default_factory=list)
    """Bookies at the beginning and at the end of a run, instead of ABC."""
    marks: list[list[dict]] = field(default_factory=list)
    """Marks at the beginning and at the end of a run."""
    last: list[LastAudit] = field(default_factory=list)
    """All records of audits that were written."""
    refusal: BinderyError | None = None
    """Raised by writes to the cluster."""

    def keep_table(self, name: str, directory: Path) -> None:
        """Write the table without Spark, as `ClusterSource` does."""
        rows = []
        if name == "ledgers":
            for row in self.ledgers[min(self.kept, len(self.ledgers) - 1)]:
                segments = [dict(zip(SEGMENT.names, segment, strict=True)) for segment in row["segments"]]
                rows.append({**row, "segments": segments})
            self.kept += 1
        elif name == "bookies":
            known = [bookie(each) for each in ABC]
            rows = [*(_nth(self.bookies, directory) if self.bookies else known), *self.beside]
        elif name == "marks" and self.marks:
            rows = _nth(self.marks, directory)
        directory.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows, schema=to_arrow_schema(TABLES[name], timezone="UTC"))
        parquet.write_table(table, directory / "part-0.parquet")

    def blocks(
        self, ids: Sequence[int], *, entries: str, unexpected_in: tuple[int, int] | None, unexpected_on: str | None
    ) -> DataFrame:
        self.read.append(unexpected_in or (ids[0], ids[-1]))
        rows = [row for row in self.copies(len(self.read)) if row["ledger_id"] in ids]
        return self.tables.blocks([*rows, *self.unlisted], self.ledgers[0])

    def facts(self) -> tuple[Facts, Sequence[Verified]]:
        return Facts("c-1", lost_bookie_delay_ms=60_000), list(self.verified.values())

    def write_verified(self, records: Sequence[Verified], gone: Collection[int]) -> None:
        if self.refusal:
            raise self.refusal
        self.verified |= {record.ledger_id: record for record in records}
        for ledger_id in gone:
            del self.verified[ledger_id]

    def write_last(self, audit: LastAudit) -> None:
        self.last.append(audit)


def _nth(script: list[list[dict]], directory: Path) -> list[dict]:
    """The first or the last step, by the directory of the table."""
    return script[0 if directory.parent.name == "before" else -1]


def whole(ledger_id: int, *, missing: Collection[int] = ()) -> list[dict]:
    """Four entries on three bookies. `missing`: entries that are missing on bookie a."""
    return [
        copy(ledger_id, entry_id, name, "missing" if name == "a" and entry_id in missing else "good")
        for entry_id in range(4)
        for name in ABC
    ]

"""Interface between an audit and the cluster, so that a run can be tested without a cluster."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as parquet
from bindery_client.connection.security import NO_FILES, SecurityFiles
from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.verified_records import Verified
from bindery_metadata.recovery.last_audits import LastAudit
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from bindery_spark.audit import cluster_facts as driver
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.schemas import TABLES
from bindery_spark.sources.block_reader import read_blocks
from bindery_spark.sources.metadata import MetadataReader
from bindery_spark.sources.options import LedgersOptions, MetadataOptions, parse_size


class Source(Protocol):
    """Reads a cluster and records the results of a run in it."""

    def keep_table(self, name: str, directory: Path) -> None:
        """Read a table of `schemas.TABLES` and write it below `directory` as Parquet, replacing earlier files."""
        ...

    def blocks(
        self, ids: Sequence[int], *, entries: str, unexpected_in: tuple[int, int] | None, unexpected_on: str | None
    ) -> DataFrame:
        """BLOCKS of the ledgers `ids`; each evaluation reads them again. `entries`: see `BookieReader.read`.
        `unexpected_in`: also list orphaned data of ledgers first..last (inclusive); `unexpected_on`: on this bookie
        only, None: on all."""
        ...

    def facts(self) -> tuple[Facts, Sequence[Verified]]: ...

    def write_verified(self, records: Sequence[Verified], gone: Collection[int]) -> None: ...

    def write_last(self, audit: LastAudit) -> None: ...


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """`Source` of a real cluster. `rate`: maximum bytes/s read from one bookie, as text with a unit; 0: unlimited."""

    spark: SparkSession
    zookeeper: str
    ledgers_root: str
    rate: str
    timeout_s: float
    security: SecurityFiles = NO_FILES
    access: AccessFiles = NO_ACCESS

    def keep_table(self, name: str, directory: Path) -> None:
        """Read the table in the driver, which takes less time than starting readers in Spark."""
        where = {"zookeeper": self.zookeeper, "ledgers_root": self.ledgers_root, "table": name}
        options = replace(MetadataOptions.parse(where), security=self.security, access=self.access)
        reader = MetadataReader(options, TABLES[name])
        directory.mkdir(parents=True, exist_ok=True)
        making = directory / "part-0.making"
        with parquet.ParquetWriter(making, to_arrow_schema(TABLES[name], timezone="UTC")) as writer:
            for part in reader.partitions():
                for batch in reader.read(part):
                    writer.write_batch(batch)
        making.replace(directory / "part-0.parquet")

    def blocks(
        self, ids: Sequence[int], *, entries: str, unexpected_in: tuple[int, int] | None, unexpected_on: str | None
    ) -> DataFrame:
        options = LedgersOptions(
            zookeeper=self.zookeeper,
            ledgers_root=self.ledgers_root,
            entries=entries,
            rate=parse_size(self.rate, name="rate"),
            timeout_s=self.timeout_s,
            security=self.security,
            access=self.access,
        )
        ledger_ids = [LedgerId(each) for each in ids]
        return read_blocks(self.spark, options, ledger_ids, unexpected_in=unexpected_in, unexpected_on=unexpected_on)

    def facts(self) -> tuple[Facts, Sequence[Verified]]:
        return driver.facts_of(self.zookeeper, self.ledgers_root)

    def write_verified(self, records: Sequence[Verified], gone: Collection[int]) -> None:
        driver.write_verified(self.zookeeper, records, gone)

    def write_last(self, audit: LastAudit) -> None:
        driver.write_last(self.zookeeper, audit)

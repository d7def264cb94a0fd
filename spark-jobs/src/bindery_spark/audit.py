"""One audit: plan, read group by group, judge, confirm, and write what was found.

    begin --plan--> groups: read, judge, keep ... --> metadata again --> confirm --> marks --> findings, summary

| level    | reads                                             | checks                                              |
|----------|---------------------------------------------------|-----------------------------------------------------|
| quick    | metadata; first and last entries of each fragment | copies, ensembles, ledgers open too long, marks     |
| standard | metadata; every entry from every bookie           | the same of every entry; marks that lie             |
| deep     | the same, and what bookies hold beside it         | and placement, topics, cursors, orphans             |

A cluster at work changes while it is read. So nothing is believed that was seen once and may have been on its way:
- what the metadata say must be said by them at the beginning and at the end;
- what copies lack in ledgers that were open, or whose metadata changed meanwhile, must be seen in a second reading;
- ledgers that are gone at the end have no findings; marks count that stood all the time.

A run that is interrupted loses the group that it is at. Nothing is ever changed in the cluster but the records of what
was verified, and of what the run came to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow.parquet as parquet
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX, LedgerId
from bindery_metadata.verified_records import LEVELS, Verified
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from bindery_spark.checkpoint import RunDirectory, last_finished
from bindery_spark.checks import copies as copy_checks
from bindery_spark.checks import ledgers as ledger_checks
from bindery_spark.checks import marks as mark_checks
from bindery_spark.checks import topics as topic_checks
from bindery_spark.checks.again import carried, confirmed, seen_twice, unread_ledgers, unreadable_bookies
from bindery_spark.checks.shape import Run, kept, together
from bindery_spark.facts import Facts
from bindery_spark.findings import Severity
from bindery_spark.plan import Plan, PlannedLedger, make_plan, planned
from bindery_spark.schemas import FINDINGS, NO_LEDGER, TABLES
from bindery_spark.source import Source
from bindery_spark.sources.security import NO_FILES, SecurityFiles

READ_TABLES: Final = ("ledgers", "bookies", "marks", "topics", "cursors")
COVERAGE: Final = "ledger_id long, bookie string, copies long, unknown long, bytes long, reason string"
AWAY: Final = "unreachable: bookie is not registered"
AGAIN_BATCH: Final = 200
"""Ledgers that are read a second time in one go."""
HEALTHY_SEVERITIES: Final = (str(Severity.INFO), str(Severity.WARNING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an audit is asked for. Kept in the run, so that a resumed one does the same."""

    zookeeper: str = ""
    ledgers_root: str = "/ledgers"
    level: str = "deep"
    first: int = 0
    last: int = ID_MAX
    bookie: str | None = None
    """Only ledgers that name it."""
    since_verified_ms: int | None = None
    """Ledgers that were verified within that time, as deeply, are left out."""
    open_max_ms: int = 7 * 86_400_000
    orphan_after_ms: int = 3_600_000
    rate: str = "64MiB/s"
    timeout_s: float = 10.0
    group_bytes: int | None = None
    """Read between two checkpoints; None: as `plan` has it."""
    security: SecurityFiles = NO_FILES
    orphans: bool = True
    """A deep audit looks for what bookies hold beside; they must tell it, by their admin HTTP."""
    record: bool = True
    """Keep in the cluster which ledgers were found whole, and what the run came to."""

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Options":
        """Raises BadRequest: another version asked for something else."""
        try:
            return cls(**{**given, "security": SecurityFiles(**given.get("security", {}))})
        except TypeError as error:
            raise BadRequest("the run was begun by another version: begin a new one", reason=str(error)) from None

    @property
    def ends_only(self) -> bool:
        return self.level == "quick"

    @property
    def entries(self) -> str:
        """As of `BookieReader`."""
        return {"quick": "ends", "standard": "listed", "deep": "all"}[self.level]

    def sees_no_more_than(self, other: Mapping[str, Any]) -> bool:
        """Whether a run with the options `other` looked at all that this one looks at, as deeply. Then what it did not
        find was not there: hourly quick runs do not make weekly deep ones forget since when something is wrong."""
        level, first, last = other.get("level"), other.get("first", 0), other.get("last", -1)
        is_as_deep = level in LEVELS and LEVELS.index(level) >= LEVELS.index(self.level)
        is_as_wide = first <= self.first and self.last <= last and other.get("bookie") in (None, self.bookie)
        return is_as_deep and is_as_wide and other.get("orphans", True) >= self.orphans

    @property
    def is_deep(self) -> bool:
        return self.level == "deep"

    @property
    def looks_beside(self) -> bool:
        return self.is_deep and self.orphans

    @property
    def is_whole(self) -> bool:
        """Every ledger is looked at: then references between tables can be judged."""
        return (self.first, self.last, self.bookie) == (0, ID_MAX, None)


class Progress(Protocol):
    def plan(self, size: int, done: int, groups: int) -> None:
        """Bytes of all groups, and of those that were done before."""
        ...

    def group(self, number: int, ledgers: int, size: int) -> None:
        """It begins."""
        ...

    def done(self, size: int) -> None: ...

    def phase(self, words: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """Ledgers that were left out because they were verified lately."""

    ledgers: int = 0
    oldest_ms: int | None = None


def rows_of(directory: Path) -> int:
    """Of Parquet files, without reading them."""
    return sum(parquet.read_metadata(path).num_rows for path in directory.glob("*.parquet"))


class Audit:
    """One run in one directory. `clock_ms`: wall clock."""

    def __init__(
        self, spark: SparkSession, source: Source, directory: RunDirectory, options: Options, *,
        clock_ms: Callable[[], int], progress: Progress,
    ) -> None:  # fmt: skip
        self._spark = spark
        self._source = source
        self._directory = directory
        self._options = options
        self._clock_ms = clock_ms
        self._progress = progress
        self._gone_by_table: dict[str, frozenset[str]] = {}

    # --- begin ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the metadata and plan. From now on the run can be resumed."""
        options, directory = self._options, self._directory
        self._progress.phase("reading metadata")
        began_ms = self._clock_ms()
        facts, verified = self._source.facts()
        self._keep_tables("before")
        rows = self._ledger_rows("before", options.first, options.last)
        fresh = self._fresh({record.ledger_id: record for record in verified}, rows, began_ms)
        named = {row.ledger_id for row in rows if self._names_the_bookie(row)}
        wanted = [
            planned(row, is_wanted=row.ledger_id not in fresh and row.ledger_id in named) if row.problem is None
            else PlannedLedger(row.ledger_id, 0, 0)
            for row in rows
        ]  # fmt: skip
        plan = make_plan(wanted, first=options.first, last=options.last, group_bytes=options.group_bytes)
        skipped = Skipped(len(fresh), min((r.verified_at_ms for r in fresh.values()), default=None))
        directory.write_run(
            {
                "options": asdict(options), "began_ms": began_ms, "facts": facts.to_json(), "plan": plan.to_json(),
                "skipped": asdict(skipped),
            }
        )  # fmt: skip

    def _fresh(self, verified: dict[LedgerId, Verified], rows: list[Any], now_ms: int) -> dict[int, Verified]:
        """Those that need not be read: closed, and verified lately, as deeply, as their metadata are now."""
        window_ms = self._options.since_verified_ms
        if window_ms is None:
            return {}
        deep_enough = LEVELS[LEVELS.index(self._options.level) :]
        return {
            row.ledger_id: record
            for row in rows
            if row.state == "closed"
            and (record := verified.get(row.ledger_id)) is not None
            and record.metadata_version == row.metadata_version
            and record.level in deep_enough
            and now_ms - record.verified_at_ms < window_ms
        }

    # --- groups ---------------------------------------------------------------------------------------------------

    def read_groups(self) -> None:
        """Read and judge what is not done yet."""
        facts = self._directory.read_run()
        plan, done = Plan.from_json(facts["plan"]), self._directory.done()
        self._progress.plan(plan.size, sum(g.size for g in plan.groups if g.number in done), len(plan.groups))
        run = Run(self._directory.run_id, facts["began_ms"])
        for group in plan.groups:
            if group.number in done:
                continue
            self._progress.group(group.number, group.ledgers, group.size)
            making = self._directory.begin_group(group.number)
            rows = self._ledger_rows("before", group.first, group.last)
            ids = [row.ledger_id for row in rows if self._names_the_bookie(row)]
            ledgers = self._table("before", "ledgers").where(F.col("ledger_id").between(group.first, group.last))
            self._judge(ids, ledgers, "before", (group.first, group.last), run, making)
            self._directory.finish_group(group.number)
            self._progress.done(group.size)

    def _judge(
        self, ids: Sequence[int], ledgers: DataFrame, when: str, around: tuple[int, int], run: Run, making: Path
    ) -> None:
        """Read those of `ledgers` that are in `ids` once, and what bookies hold beside in the range `around`; write
        coverage and findings below `making`."""
        options = self._options
        blocks = self._source.blocks(
            ids, entries=options.entries, unexpected_in=around if options.looks_beside else None,
            beside_on=options.bookie,
        )  # fmt: skip
        blocks = blocks.persist(StorageLevel.MEMORY_AND_DISK)
        gone = self._gone(when)
        known = copy_checks.with_gone(blocks, gone)
        seen = copy_checks.coverage(known)
        if options.looks_beside:
            seen = seen.unionByName(copy_checks.unlisted(blocks))
        seen.coalesce(1).write.parquet(str(making / "coverage"))
        found = [copy_checks.closed_lengths(blocks, ledgers, run)]
        suspects = kept(copy_checks.suspects(known))
        if not suspects.isEmpty():
            found.append(copy_checks.entry_faults(blocks, suspects, gone, ledgers, run))
        if options.looks_beside:
            found.append(copy_checks.orphan_data(blocks, ledgers, run))
        together(found).coalesce(1).write.parquet(str(making / "findings"))
        blocks.unpersist()

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, out: Path) -> DataFrame:
        """Confirm what was seen, judge metadata and marks, and write all findings. `out`: where earlier runs are."""
        facts = self._directory.read_run()
        run = Run(self._directory.run_id, facts["began_ms"])
        known = Facts.from_json(facts["facts"])
        self._progress.phase("reading metadata again")
        self._keep_tables("after")
        self._progress.phase("confirming")
        of_copies = self._confirmed_copies(run)
        of_metadata = kept(self._metadata_findings("after", run))
        if not of_metadata.isEmpty():
            of_metadata = seen_twice(self._metadata_findings("before", run), of_metadata)
        previous = last_finished(out, before=self._directory.run_id, cluster_id=known.cluster_id)
        coverage = self.coverage()
        unlisted = sorted(self.unlisted().items())
        listless = self._rows(unlisted, "bookie string, why string") if unlisted else None
        unreadable = unreadable_bookies(coverage, run, unlisted=listless)
        if not self._options.ends_only:
            unreadable = unreadable.unionByName(unread_ledgers(self._to_be_read(facts["plan"]), coverage, run))
        alike = last_finished(
            out, before=self._directory.run_id, cluster_id=known.cluster_id, fits=self._options.sees_no_more_than
        )
        earlier = self._spark.read.schema(FINDINGS).parquet(str(alike.findings)) if alike else None
        seen = kept(carried(together([of_copies, of_metadata, unreadable]), earlier))
        self._progress.phase("checking marks")
        of_marks = carried(self._mark_findings(seen, coverage, run, known, previous), earlier)
        findings = together([seen, of_marks])
        findings.coalesce(1).write.mode("overwrite").parquet(str(self._directory.findings))
        marked = parquet.read_table(self._directory.table("after", "marks"), columns=["ledger_id"])
        self._directory.write_json("marks.json", sorted(marked["ledger_id"].to_pylist()))
        return self._spark.read.schema(FINDINGS).parquet(str(self._directory.findings))

    def coverage(self) -> DataFrame:
        """What was looked at, by ledger and bookie; of ledgers that are still there."""
        parts = self._parts("coverage", COVERAGE)
        there = self._table("after", "ledgers").select("ledger_id")
        return parts.join(there, "ledger_id", "left_semi")

    def unlisted(self) -> dict[str, str]:
        """Bookies where orphans were to be looked for and could not be, and why. Who left for good counts nowhere."""
        if not self._options.looks_beside:
            return {}
        rows = [row for row in self._coverage_rows() if row["ledger_id"] == NO_LEDGER]
        # Nobody asks a bookie that is away and that metadata do not name: its disks may hold anything.
        known = parquet.read_table(self._directory.table("before", "bookies")).to_pylist()
        away = [row for row in known if row["registration"] == "absent" and row["cookie"]]
        wanted = self._options.bookie
        found = {row["bookie"]: AWAY for row in away if wanted in (None, row["bookie"])}
        for row in rows:
            found[row["bookie"]] = min(row["reason"], found.get(row["bookie"], row["reason"]))
        if found:
            for gone in self._gone("before"):
                found.pop(gone, None)
        return found

    def _parts(self, name: str, schema: Any) -> DataFrame:
        """All rows of all groups."""
        paths = [str(self._directory.group(number) / name) for number in sorted(self._directory.done())]
        return self._spark.read.schema(schema).parquet(*paths)

    def _to_be_read(self, plan: Any) -> DataFrame:
        """Ledgers of the groups whose metadata were the same at both ends."""
        same = self._table("after", "ledgers").select("ledger_id", "metadata_version")
        ledgers = self._table("before", "ledgers").join(same, ["ledger_id", "metadata_version"], "left_semi")
        ranges = [F.col("ledger_id").between(g.first, g.last) for g in Plan.from_json(plan).groups]
        return self._naming_the_bookie(ledgers).where(reduce(Column.__or__, ranges, F.lit(False)))

    def _confirmed_copies(self, run: Run) -> DataFrame:
        """What groups found, without what was on its way: see the module's text."""
        if not sum(rows_of(self._directory.group(number) / "findings") for number in self._directory.done()):
            return self._rows([], FINDINGS)
        found = self._parts("findings", FINDINGS)
        before, after = self._table("before", "ledgers"), self._table("after", "ledgers")
        state = before.select("ledger_id", F.col("state").alias("was"), F.col("metadata_version").alias("had")).join(
            after.select("ledger_id", F.col("state").alias("is"), F.col("metadata_version").alias("has")),
            "ledger_id", "full",
        )  # fmt: skip
        # A ledger in neither is data without a ledger; one in `after` alone was made meanwhile.
        is_steady = (F.col("was") == "closed") & (F.col("is") == "closed") & (F.col("had") == F.col("has"))
        is_orphan = F.col("was").isNull() & F.col("is").isNull()
        marked = found.join(state, "ledger_id", "left").withColumn(
            "steady", F.coalesce(is_steady, F.lit(False)) | is_orphan
        )
        steady = marked.where("steady").select(*FINDINGS.names)
        doubtful = marked.where("not steady and was is not null and is is not null").select(*FINDINGS.names)
        ids = sorted(row.ledger_id for row in doubtful.select("ledger_id").distinct().collect())
        if not ids:
            return steady
        self._progress.phase(f"reading {len(ids)} ledgers again")
        again = together([self._again(ids[at : at + AGAIN_BATCH], run, at) for at in range(0, len(ids), AGAIN_BATCH)])
        return steady.unionByName(confirmed(doubtful, again))

    def _again(self, ids: list[int], run: Run, number: int) -> DataFrame:
        making = self._directory.begin_group(10_000_000 + number)
        ledgers = self._table("after", "ledgers").where(F.col("ledger_id").isin(ids))
        self._judge(ids, ledgers, "after", (ids[0], ids[-1]), run, making)
        return self._spark.read.schema(FINDINGS).parquet(str(making / "findings"))

    def _metadata_findings(self, when: str, run: Run) -> DataFrame:
        options = self._options
        tables = {name: self._table(when, name) for name in READ_TABLES}
        ledgers = tables["ledgers"].where(F.col("ledger_id").between(options.first, options.last))
        ledgers = self._naming_the_bookie(ledgers)
        bookies, topics, cursors = tables["bookies"], tables["topics"], tables["cursors"]
        found = [
            ledger_checks.unreadable_metadata(ledgers, topics, cursors, run),
            ledger_checks.stale_ensembles(ledgers, bookies, run),
            ledger_checks.open_too_long(ledgers, run, open_max_ms=options.open_max_ms),
        ]
        if options.is_deep:
            found.append(ledger_checks.bad_placements(ledgers, bookies, run))
        has_topics = any(rows_of(self._directory.table(when, name)) for name in ("topics", "cursors"))
        if options.is_deep and options.is_whole and not has_topics:
            orphan_after_ms = options.orphan_after_ms
            found.append(topic_checks.unnamed_ledgers(topics, cursors, ledgers, run, orphan_after_ms=orphan_after_ms))
        elif options.is_deep and options.is_whole:
            found.append(
                topic_checks.topic_findings(topics, cursors, ledgers, run, orphan_after_ms=options.orphan_after_ms)
            )
        return together(found)

    def _mark_findings(
        self, seen: DataFrame, coverage: DataFrame, run: Run, known: Facts, previous: RunDirectory | None
    ) -> DataFrame:
        ledgers, bookies, marks = (self._table("after", name) for name in ("ledgers", "bookies", "marks"))
        found = [self._rows([], FINDINGS)]
        absences = self._rows(sorted(known.absent_since_ms.items()), "bookie string, since_ms long")
        lacking = mark_checks.lacking(seen)
        if known.absent_since_ms:
            lacking = lacking.unionByName(mark_checks.away(ledgers, bookies, absences))
        if (known.absent_since_ms or not seen.isEmpty()) and not (lacking := kept(lacking)).isEmpty():
            healed = self._rows([(i,) for i in sorted(self._healed(known, previous))], "ledger_id long")
            not_healed = mark_checks.not_healed(lacking, marks, healed, run)
            missing = mark_checks.missing_marks(lacking, marks, not_healed, run, delay_ms=known.lost_bookie_delay_ms)
            found += [not_healed, missing]
        if not self._options.ends_only and rows_of(self._directory.table("after", "marks")):
            steady = marks.join(self._table("before", "marks").select("ledger_id"), "ledger_id", "left_semi")
            covered = coverage.groupBy("ledger_id").agg(F.sum("unknown").alias("unknown")).where("unknown = 0")
            found.append(mark_checks.false_marks(steady, ledgers, bookies, covered.select("ledger_id"), seen, run))
        return together(found)

    def _healed(self, known: Facts, previous: RunDirectory | None) -> set[int]:
        """Ledgers that were marked at the end of the last run, or told as healed since."""
        if previous is None:
            return set()
        since_ms = previous.read_json("summary.json")["began_ms"]
        return set(previous.read_json("marks.json")) | {i for i, at_ms in known.healed.items() if at_ms >= since_ms}

    # --- verified -------------------------------------------------------------------------------------------------

    def verified(self, findings: Iterable[Mapping[str, Any]]) -> list[Verified]:
        """Closed ledgers that were found whole."""
        began_ms = self._directory.read_run()["began_ms"]
        bad = {row["ledger_id"] for row in findings if row["severity"] not in HEALTHY_SEVERITIES}
        seen_of: dict[int, int] = {}
        for row in self.seen():
            seen_of[row["ledger_id"]] = seen_of.get(row["ledger_id"], 0) + row["unknown"]
        had = {row.ledger_id: row.metadata_version for row in self._ledger_rows("before", 0, ID_MAX)}
        run_id, level = self._directory.run_id, self._options.level
        return [
            Verified(LedgerId(row.ledger_id), level, began_ms, run_id, row.metadata_version)
            for row in self._ledger_rows("after", 0, ID_MAX)
            if row.state == "closed" and row.problem is None and row.ledger_id not in bad
            and had.get(row.ledger_id) == row.metadata_version and seen_of.get(row.ledger_id) == 0
        ]  # fmt: skip

    def write_verified(self, records: Sequence[Verified]) -> None:
        """Record them in the cluster, and forget ledgers that are gone."""
        there = {row.ledger_id for row in self._ledger_rows("after", 0, ID_MAX)}
        _, known = self._source.facts()
        self._source.write_verified(records, [r.ledger_id for r in known if r.ledger_id not in there])

    def seen(self) -> Iterator[dict[str, Any]]:
        """`coverage`, row by row in the driver."""
        there = {row.ledger_id for row in self._ledger_rows("after", 0, ID_MAX)}
        yield from (row for row in self._coverage_rows() if row["ledger_id"] in there)

    def _coverage_rows(self) -> Iterator[dict[str, Any]]:
        for number in sorted(self._directory.done()):
            table = parquet.read_table(self._directory.group(number) / "coverage")
            for batch in table.to_batches():
                yield from batch.to_pylist()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _keep_tables(self, when: str) -> None:
        # Ledgers first and last: what topics name in between was there, and is a ledger of one of the two readings.
        for name in READ_TABLES:
            self._source.keep_table(name, self._directory.table(when, name))

    def _table(self, when: str, name: str) -> DataFrame:
        return self._spark.read.schema(TABLES[name]).parquet(str(self._directory.table(when, name)))

    def _gone(self, when: str) -> frozenset[str]:
        """Bookies that left for good. Of all ledgers, so that it is asked once and not for each group."""
        known = self._gone_by_table.get(when)
        if known is None:
            rows = copy_checks.gone_bookies(self._table(when, "bookies"), self._table(when, "ledgers")).collect()
            known = self._gone_by_table[when] = frozenset(row.bookie for row in rows)
        return known

    def _ledger_rows(self, when: str, first: int, last: int) -> list[Row]:
        """LEDGERS first..last, ascending, for the driver itself. Segments only where a bookie is asked for."""
        names = [name for name in TABLES["ledgers"].names if name not in ("custom", "segments")]
        columns = names if self._options.bookie is None else [*names, "segments"]
        within = [("ledger_id", ">=", first), ("ledger_id", "<=", last)]
        table = parquet.read_table(self._directory.table(when, "ledgers"), columns=columns, filters=within)
        rows = (Row(**row) for batch in table.to_batches() for row in batch.to_pylist())
        return sorted(rows, key=lambda row: row.ledger_id)

    def _names_the_bookie(self, row: Row) -> bool:
        """Whether `row` of `_ledger_rows` names the bookie that is asked for, if any."""
        bookie = self._options.bookie
        return bookie is None or any(bookie in segment["ensemble"] for segment in row.segments)

    def _naming_the_bookie(self, ledgers: DataFrame) -> DataFrame:
        """Those that name the bookie which is asked for; all, if none is."""
        if self._options.bookie is None:
            return ledgers
        members = F.flatten(F.transform("segments", lambda s: s["ensemble"]))
        return ledgers.where(F.array_contains(members, self._options.bookie))

    def _rows(self, rows: list[Any], schema: Any) -> DataFrame:
        return self._spark.createDataFrame(rows, schema)

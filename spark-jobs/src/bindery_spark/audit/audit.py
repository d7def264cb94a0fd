"""One audit: plan, read group by group, judge, confirm, and write what was found.

    begin --plan--> groups: read, judge, keep ... --> metadata again --> confirm --> marks --> findings, summary

| level    | reads                                             | checks                                              |
|----------|---------------------------------------------------|-----------------------------------------------------|
| quick    | metadata; first and last entries of each fragment | copies, ensembles, ledgers open too long, marks     |
| standard | metadata; every entry from every bookie           | the same of every entry; marks that lie             |
| deep     | the same, and what bookies hold beside it         | and placement, topics, cursors, orphans             |

A cluster at work changes while it is read. So nothing is believed that was seen once and may have been on its way:
- what the metadata say must be said by them at the beginning and at the end;
- ledgers of which copies are bad, and those that moved while they were read, are read once more (`rereading`); what
  their bookies cannot say then was not seen, or is as it was where nothing moved;
- ledgers that are gone at the end have no findings; marks count that stood, or were missing, all the time.

A run that is interrupted loses the group that it is at, or the batch of the second reading. Nothing is ever changed in
the cluster but the records of what was verified, and of what the run came to.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
from bindery_client.connection.security import NO_FILES, SecurityFiles
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX, LedgerId
from bindery_metadata.ledgers.verified_records import LEVELS, Verified
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from bindery_spark.audit.checkpoint import RunDirectory, last_finished
from bindery_spark.audit.checks import copies as copy_checks
from bindery_spark.audit.checks import ledgers as ledger_checks
from bindery_spark.audit.checks import marks as mark_checks
from bindery_spark.audit.checks import topics as topic_checks
from bindery_spark.audit.checks.again import (
    carried,
    confirmed,
    mended,
    seen_twice,
    unread_ledgers,
    unreadable_bookies,
    unseen_ledgers,
)
from bindery_spark.audit.checks.finding_rows import Run, kept, together
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.audit.findings.findings import Kind, Severity
from bindery_spark.audit.plan import Plan, PlannedLedger, batches, make_plan, planned
from bindery_spark.audit.second_pass.copy_states import SAID, read_well, said, unsaid
from bindery_spark.audit.second_pass.rules import (
    Fate,
    KnownLedger,
    Rereading,
    broken_since,
    fates,
    is_steady,
    is_steady_throughout,
    rereading,
)
from bindery_spark.audit.source import Source
from bindery_spark.schemas import FINDINGS, NO_LEDGER, TABLES

READ_TABLES: Final = ("ledgers", "bookies", "marks", "topics", "cursors")
COVERAGE: Final = "ledger_id long, bookie string, copies long, unknown long, bytes long, reason string"
COVERAGE_ARROW: Final = pa.schema(
    [
        ("ledger_id", pa.int64()), ("bookie", pa.string()), ("copies", pa.int64()), ("unknown", pa.int64()),
        ("bytes", pa.int64()), ("reason", pa.string()),
    ]
)  # fmt: skip
"""The same in Arrow's words."""
AWAY: Final = "unreachable: bookie is not registered"
CAME_BACK: Final = "unread: the bookie counted as gone for good when the run began"
AGAIN_BATCH: Final = 200
"""Ledgers that are read a second time in one go."""
AGAIN_PAUSE_MS: Final = 3_600_000
"""A run that stood still for longer begins its second reading anew: much may have healed."""
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


def _coverage_of(directory: Path, there: pa.Array) -> pa.Table:
    """What one reading saw of the ledgers `there`."""
    table = parquet.read_table(directory / "coverage").select(COVERAGE_ARROW.names).cast(COVERAGE_ARROW)
    return table.filter(pc.is_in(table["ledger_id"], there))


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
        self._read_again: list[Path] = []
        """Directories of what was read a second time."""

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
        left_out = [record for ledger_id, record in fresh.items() if not plan.covers(ledger_id)]
        skipped = Skipped(len(left_out), min((record.verified_at_ms for record in left_out), default=None))
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
        self, ids: Sequence[int], ledgers: DataFrame, when: str, around: tuple[int, int], run: Run, making: Path, *,
        keeps_said: bool = False,
    ) -> None:  # fmt: skip
        """Read those of `ledgers` that are in `ids` once, and what bookies hold beside in the range `around`; write
        coverage and findings below `making`, and SAID, if `keeps_said`."""
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
        if keeps_said:
            said(blocks).coalesce(1).write.parquet(str(making / "said"))
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
        again = self._rereading(facts["plan"])
        self._reread(again, run)
        of_copies = self._confirmed_copies(again, run)
        self._keep_coverage(again)
        of_metadata = kept(self._metadata_findings("after", run))
        if not of_metadata.isEmpty():
            of_metadata = seen_twice(self._metadata_findings("before", run), of_metadata)
        previous = last_finished(out, before=self._directory.run_id, cluster_id=known.cluster_id)
        coverage = self.coverage()
        unlisted = sorted(self.unlisted().items())
        listless = self._rows(unlisted, "bookie string, why string") if unlisted else None
        unreadable = unreadable_bookies(coverage, run, unlisted=listless)
        if unseen := self._unseen(again):
            rows = self._rows(unseen, "ledger_id long, kind string, expected string, found string")
            unreadable = unreadable.unionByName(unseen_ledgers(rows, run))
        if not self._options.ends_only:
            unreadable = unreadable.unionByName(unread_ledgers(self._to_be_read(facts["plan"], again), coverage, run))
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
        """What was looked at, by ledger and bookie, of ledgers that are still there; of those that were read again,
        what the second reading saw."""
        return self._spark.read.schema(COVERAGE).parquet(str(self._directory.table("after", "coverage")))

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
            for gone in self._gone("before") & self._gone("after"):
                found.pop(gone, None)
        return found

    def _parts(self, name: str, schema: Any) -> DataFrame:
        """All rows of all groups."""
        paths = [str(self._directory.group(number) / name) for number in sorted(self._directory.done())]
        return self._spark.read.schema(schema).parquet(*paths)

    def _to_be_read(self, plan: Any, again: Rereading) -> DataFrame:
        """Ledgers of the groups whose metadata were the same at both ends; and those that were read again, as they were
        then, as long as they are there."""
        after = self._table("after", "ledgers")
        same = after.select("ledger_id", "metadata_version")
        ledgers = self._table("before", "ledgers").join(same, ["ledger_id", "metadata_version"], "left_semi")
        ranges = [F.col("ledger_id").between(g.first, g.last) for g in Plan.from_json(plan).groups]
        ledgers = self._naming_the_bookie(ledgers).where(reduce(Column.__or__, ranges, F.lit(False)))
        if not again.ids:
            return ledgers
        ids = self._rows([(i,) for i in again.ids], "ledger_id long")
        there = self._rows([(i,) for i in again.ids if i in self._last], "ledger_id long")
        now = after.join(there, "ledger_id", "left_semi").select(*ledgers.columns)
        return ledgers.join(ids, "ledger_id", "left_anti").unionByName(now)

    # --- the second reading ---------------------------------------------------------------------------------------

    @cached_property
    def _before(self) -> dict[int, KnownLedger]:
        return self._known_ledgers("before")

    @cached_property
    def _after(self) -> dict[int, KnownLedger]:
        return self._known_ledgers("after")

    @cached_property
    def _again(self) -> dict[int, KnownLedger]:
        return self._known_ledgers("again")

    @property
    def _last(self) -> dict[int, KnownLedger]:
        """As they were when the second reading had ended."""
        return self._again if self._read_again else self._after

    def _known_ledgers(self, when: str) -> dict[int, KnownLedger]:
        names = KnownLedger.__dataclass_fields__
        table = parquet.read_table(self._directory.table(when, "ledgers"), columns=[*names])
        known = (KnownLedger(**row) for batch in table.to_batches() for row in batch.to_pylist())
        return {ledger.ledger_id: ledger for ledger in known}

    def _found(self) -> set[tuple[int, str]]:
        """Ledger and kind of what groups found."""
        found: set[tuple[int, str]] = set()
        for number in sorted(self._directory.done()):
            table = parquet.read_table(self._directory.group(number) / "findings", columns=["ledger_id", "kind"])
            found |= {(row["ledger_id"], row["kind"]) for row in table.to_pylist()}
        return found

    def _copies(self, directories: Iterable[Path]) -> Counter[int]:
        """How many were seen of each ledger, by these readings."""
        copies: Counter[int] = Counter()
        for directory in directories:
            table = parquet.read_table(directory / "coverage", columns=["ledger_id", "copies"])
            for batch in table.to_batches():
                for ledger_id, count in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    copies[ledger_id] += count
        return copies

    def _groups(self) -> list[Path]:
        return [self._directory.group(number) for number in sorted(self._directory.done())]

    def _rereading(self, plan: Any) -> Rereading:
        whole = Plan.from_json(plan)
        asked = {i for i in self._before if whole.covers(i)}
        if self._options.bookie is not None:
            rows = self._ledger_rows("before", 0, ID_MAX)
            asked &= {row.ledger_id for row in rows if self._names_the_bookie(row)}
        return rereading(
            self._before, self._after, self._found(), self._copies(self._groups()), asked=asked,
            ends_only=self._options.ends_only,
        )  # fmt: skip

    def _reread(self, again: Rereading, run: Run) -> None:
        if not again.ids:
            return
        self._progress.phase(f"reading {len(again.ids)} ledgers again")
        known = self._kept_batches(again)
        wanted = (self._after[i] for i in again.ids if i not in known)
        sizes = [planned(row) if row.problem is None else PlannedLedger(row.ledger_id, 0, 0) for row in wanted]
        begin = max(self._directory.batches(), default=-1) + 1
        for number, ids in enumerate(batches(sizes, ledgers_max=AGAIN_BATCH), begin):
            making = self._directory.begin_batch(number)
            ledgers = self._table("after", "ledgers").where(F.col("ledger_id").isin(ids))
            self._judge(ids, ledgers, "after", (ids[0], ids[-1]), run, making, keeps_said=True)
            rows = [asdict(self._after[i]) for i in ids]
            now_ms, gone = self._clock_ms(), sorted(self._gone("after"))
            self._directory.finish_batch(number, {"ended_ms": now_ms, "gone": gone, "ledgers": rows})
            self._read_again.append(self._directory.batch(number))
        self._source.keep_table("ledgers", self._directory.table("again", "ledgers"))

    def _kept_batches(self, again: Rereading) -> set[int]:
        """Ledgers that were read again before the run was interrupted, and did not change since. Forgets the others."""
        batches_done = self._directory.batches()
        last_ms = max((facts["ended_ms"] for facts in batches_done.values()), default=0)
        is_recent = self._clock_ms() - last_ms <= AGAIN_PAUSE_MS
        gone, ids = sorted(self._gone("after")), frozenset(again.ids)
        known: set[int] = set()
        for number, facts in batches_done.items():
            rows = [KnownLedger(**row) for row in facts["ledgers"]]
            is_same = all(row.ledger_id in ids and self._after[row.ledger_id] == row for row in rows)
            if is_recent and is_same and facts["gone"] == gone:
                known |= {row.ledger_id for row in rows}
                self._read_again.append(self._directory.batch(number))
            else:
                self._directory.drop_batch(number)
        return known

    def _confirmed_copies(self, again: Rereading, run: Run) -> DataFrame:
        """What groups found, without what was on its way, and what the second reading made of it: see `rereading`."""
        seen = self._found()
        known = fates(self._before, self._after, self._last, seen, again)
        parts = [self._rows([], FINDINGS)]
        if known:
            rows = [(*key, str(fate)) for key, fate in sorted(known.items())]
            fate_of = self._rows(rows, "ledger_id long, beside boolean, fate string")
            found = self._parts("findings", FINDINGS).withColumn("beside", F.col("kind") == str(Kind.ORPHAN_DATA))
            found = found.join(F.broadcast(fate_of), ["ledger_id", "beside"])
            parts.append(found.where(F.col("fate") == str(Fate.STANDS)).select(*FINDINGS.names))
        if not self._read_again:
            return together(parts)
        second = self._spark.read.schema(FINDINGS).parquet(*(str(each / "findings") for each in self._read_again))
        if Fate.TWICE in known.values():
            twice = found.where(F.col("fate") == str(Fate.TWICE)).select(*FINDINGS.names)
            parts.append(confirmed(twice, second))
        told = self._spark.read.schema(SAID).parquet(*(str(each / "said") for each in self._read_again))
        if Fate.RENEWED in known.values():
            renewed = found.where(F.col("fate") == str(Fate.RENEWED)).select(*FINDINGS.names)
            parts.append(unsaid(renewed, second, told))
        if set(known.values()) - {Fate.STANDS}:
            is_damage = (F.col("fate") != str(Fate.STANDS)) & (F.col("kind") == str(Kind.DIGEST_MISMATCH))
            parts.append(mended(read_well(found.where(is_damage).select(*FINDINGS.names), told)))
        settled = [(i,) for i in again.ids if is_steady(self._after.get(i), self._last.get(i))]
        if settled:
            by_id = F.broadcast(self._rows(settled, "ledger_id long"))
            of_copies = second.where(F.col("kind") != str(Kind.ORPHAN_DATA))
            parts.append(of_copies.join(by_id, "ledger_id", "left_semi").select(*FINDINGS.names))
        return together(parts)

    def _unseen(self, again: Rereading) -> list[tuple[int, str, str, str]]:
        """Ledgers that the run cannot speak for: ledger_id, kind, expected, found."""
        broken = broken_since(self._after, self._last, again)
        wanted = "readable ledger metadata at both ends of the run"
        unseen = [(i, str(Kind.METADATA_UNREADABLE), wanted, problem) for i, problem in sorted(broken.items())]
        if self._options.ends_only or not again.ids:
            return unseen
        # An open ledger only grows: one that became shorter has bookies that told of it, and do not any more.
        first, second = self._copies(self._groups()), self._copies(self._read_again)
        for i in again.ids:
            is_open = i in self._last and i not in broken and self._after[i].state != "closed"
            if is_open and second[i] < first[i]:
                kind = str(Kind.UNREADABLE_BOOKIE)
                unseen.append((i, kind, f"{first[i]} copies", f"{second[i]} were looked at the second time"))
        return unseen

    def _keep_coverage(self, again: Rereading) -> None:
        """Write what `coverage` reads."""
        there = pa.array(sorted(self._after.keys() & self._last.keys()), pa.int64())
        steady = {i for i in again.ids if is_steady_throughout(i, self._before, self._after, self._last)}
        unsaid_of: dict[tuple[int, str], int] = {}
        for making in self._read_again:
            seen = _coverage_of(making, there)
            rows = seen.filter(pc.greater(seen["unknown"], 0)).to_pylist()
            unsaid_of |= {(r["ledger_id"], r["bookie"]): r["unknown"] for r in rows if r["ledger_id"] in steady}
        known_better: set[tuple[int, str]] = set()
        reread = pa.array(again.ids, pa.int64())
        gone = self._gone("before")
        back = pa.array(sorted(gone - self._gone("after")) if gone else [], pa.string())
        directory = self._directory.table("after", "coverage")
        directory.mkdir(parents=True, exist_ok=True)
        with parquet.ParquetWriter(directory / "part-0.parquet", COVERAGE_ARROW) as writer:
            for group in self._groups():
                seen = _coverage_of(group, there)
                # Its copies counted as looked at, and nobody asked it.
                is_back = pc.is_in(seen["bookie"], back)
                seen = seen.set_column(3, "unknown", pc.if_else(is_back, seen["copies"], seen["unknown"]))
                seen = seen.set_column(5, "reason", pc.if_else(is_back, CAME_BACK, seen["reason"]))
                is_reread = pc.is_in(seen["ledger_id"], reread)
                writer.write_table(seen.filter(pc.invert(is_reread)))
                better = [
                    row for row in (seen.filter(is_reread).to_pylist() if unsaid_of else ())
                    if row["unknown"] < unsaid_of.get((row["ledger_id"], row["bookie"]), 0)
                ]  # fmt: skip
                known_better |= {(row["ledger_id"], row["bookie"]) for row in better}
                writer.write_table(pa.Table.from_pylist(better, COVERAGE_ARROW))
            for making in self._read_again:
                seen = _coverage_of(making, there)
                if known_better:
                    pairs = zip(seen["ledger_id"].to_pylist(), seen["bookie"].to_pylist(), strict=True)
                    seen = seen.filter(pa.array([pair not in known_better for pair in pairs], pa.bool_()))
                writer.write_table(seen)

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
        begun = self._table("before", "marks").select("ledger_id")
        found = [self._rows([], FINDINGS)]
        absences = self._rows(sorted(known.absent_since_ms.items()), "bookie string, since_ms long")
        lacking = mark_checks.lacking(seen)
        if known.absent_since_ms:
            lacking = lacking.unionByName(mark_checks.away(ledgers, bookies, absences))
        if (known.absent_since_ms or not seen.isEmpty()) and not (lacking := kept(lacking)).isEmpty():
            healed = self._rows([(i,) for i in sorted(self._healed(known, previous))], "ledger_id long")
            either = marks.select("ledger_id").union(begun)
            not_healed = mark_checks.not_healed(lacking, either, healed, run)
            missing = mark_checks.missing_marks(lacking, either, not_healed, run, delay_ms=known.lost_bookie_delay_ms)
            found += [not_healed, missing]
        if not self._options.ends_only and rows_of(self._directory.table("after", "marks")):
            steady = marks.join(begun, "ledger_id", "left_semi")
            if not self._options.is_deep:
                steady = mark_checks.judged_by_lists(steady)
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
        bad = self._bad_ledgers(findings)
        seen_of: dict[int, int] = {}
        for row in self.seen():
            seen_of[row["ledger_id"]] = seen_of.get(row["ledger_id"], 0) + row["unknown"]
        had = {row.ledger_id: row.metadata_version for row in self._before.values()}
        run_id, level = self._directory.run_id, self._options.level
        return [
            Verified(LedgerId(row.ledger_id), level, began_ms, run_id, row.metadata_version)
            for row in self._after.values()
            if row.state == "closed" and row.problem is None and row.ledger_id not in bad
            and had.get(row.ledger_id) == row.metadata_version and seen_of.get(row.ledger_id) == 0
        ]  # fmt: skip

    @staticmethod
    def _bad_ledgers(findings: Iterable[Mapping[str, Any]]) -> set[int]:
        return {row["ledger_id"] for row in findings if row["severity"] not in HEALTHY_SEVERITIES}

    def write_verified(self, records: Sequence[Verified]) -> None:
        """Record them in the cluster, and forget what is not true any more: of ledgers that are gone, and of those that
        this run looked at and did not find whole. One that sees less of a ledger than the record tells of may find it
        bad, and proves nothing by not seeing it."""
        whole = {record.ledger_id for record in records}
        _, known = self._source.facts()
        seen = {row["ledger_id"] for row in self.seen()} if known else set()
        bad = self._bad_ledgers(read_findings(self._directory.findings)) if known else set()
        depth = LEVELS.index(self._options.level)

        def is_stale(record: Verified) -> bool:
            if record.ledger_id not in self._last or record.ledger_id in bad:
                return True
            is_as_deep = record.level not in LEVELS or LEVELS.index(record.level) <= depth
            return record.ledger_id in seen and record.ledger_id not in whole and is_as_deep

        self._source.write_verified(records, [record.ledger_id for record in known if is_stale(record)])

    def seen(self) -> Iterator[dict[str, Any]]:
        """`coverage`, row by row in the driver."""
        with parquet.ParquetFile(self._directory.table("after", "coverage") / "part-0.parquet") as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()

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

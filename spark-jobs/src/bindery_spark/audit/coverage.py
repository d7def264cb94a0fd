"""Coverage of a run: which copies of each ledger were checked on each bookie, both passes merged. Arrow tables.

If a ledger was read again, the coverage of the second pass counts. There is one exception: if the ledger did not change
during the run, and a bookie answered for more copies in the first pass, the first pass counts for that bookie.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
from pyspark.sql import DataFrame

from bindery_spark.audit.context import AFTER, BEFORE, RunContext, rows_of
from bindery_spark.audit.findings.findings import Kind
from bindery_spark.audit.second_pass.second_pass import SecondPass, copies_of
from bindery_spark.schemas import NO_LEDGER

COVERAGE: Final = "ledger_id long, bookie string, copies long, unknown long, bytes long, reason string"
"""Schema of coverage: one row per ledger and bookie, see `checks.copies.coverage`."""
COVERAGE_ARROW: Final = pa.schema(
    {
        "ledger_id": pa.int64(),
        "bookie": pa.string(),
        "copies": pa.int64(),
        "unknown": pa.int64(),
        "bytes": pa.int64(),
        "reason": pa.string(),
    }
)
"""COVERAGE as an Arrow schema."""
NOT_REGISTERED: Final = "unreachable: bookie is not registered"
"""Why orphaned data of an absent bookie was not checked."""
CAME_BACK: Final = "unread: the bookie counted as gone for good when the run began"
"""Why copies of a bookie were not read in the first pass."""


def write_coverage(context: RunContext, second: SecondPass) -> None:
    """Merge the coverage of both passes and write it for `coverage_frame` and `coverage_rows`."""
    ledgers = second.ledgers
    there = pa.array(sorted(ledgers.after.keys() & ledgers.last.keys()), pa.int64())
    gone = context.gone_bookies(BEFORE)
    back = pa.array(sorted(gone - context.gone_bookies(AFTER)) if gone else [], pa.string())
    reread = pa.array(second.selection.ids, pa.int64())
    unknown_of = _unknown_copies(second, there)
    kept: set[tuple[int, str]] = set()
    path = _path(context)
    path.parent.mkdir(parents=True, exist_ok=True)
    with parquet.ParquetWriter(path, COVERAGE_ARROW) as writer:
        for directory in context.groups():
            table = _with_unread(_read(directory, there), back)
            is_reread = pc.is_in(table["ledger_id"], reread)
            writer.write_table(table.filter(pc.invert(is_reread)))
            better = better_rows(table.filter(is_reread).to_pylist() if unknown_of else [], unknown_of)
            kept |= {(row["ledger_id"], row["bookie"]) for row in better}
            writer.write_table(pa.Table.from_pylist(better, COVERAGE_ARROW))
        for directory in second.directories:
            table = _read(directory, there)
            if kept:
                pairs = zip(table["ledger_id"].to_pylist(), table["bookie"].to_pylist(), strict=True)
                table = table.filter(pa.array([pair not in kept for pair in pairs], pa.bool_()))
            writer.write_table(table)


def coverage_frame(context: RunContext) -> DataFrame:
    """COVERAGE of ledgers that still exist at the end of the run."""
    return context.spark.read.schema(COVERAGE).parquet(str(_path(context).parent))


def coverage_rows(context: RunContext) -> Iterator[dict[str, Any]]:
    """`coverage_frame`, row by row in the driver."""
    with parquet.ParquetFile(_path(context)) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def unlisted_bookies(context: RunContext) -> dict[str, str]:
    """Bookies whose orphaned data could not be checked, and why. Bookies that left for good are omitted."""
    if not context.options.reads_orphans:
        return {}
    # An absent bookie that no metadata names gets no request, but its disks may hold orphaned data.
    known = rows_of([context.directory.table(BEFORE, "bookies")])
    absent = [row["bookie"] for row in known if row["registration"] == "absent" and row["cookie"]]
    wanted = context.options.bookie
    found = {bookie: NOT_REGISTERED for bookie in absent if wanted in (None, bookie)}
    for row in rows_of(directory / "coverage" for directory in context.groups()):
        if row["ledger_id"] == NO_LEDGER:
            found[row["bookie"]] = min(row["reason"], found.get(row["bookie"], row["reason"]))
    if found:
        for gone in context.gone_bookies(BEFORE) & context.gone_bookies(AFTER):
            found.pop(gone, None)
    return found


def unchecked(context: RunContext, second: SecondPass) -> list[tuple[int, str, str, str]]:
    """Ledgers that the run has no result for: ledger_id, kind, expected, found."""
    broken = second.broken
    wanted = "readable ledger metadata at both ends of the run"
    rows = [(i, str(Kind.METADATA_UNREADABLE), wanted, problem) for i, problem in sorted(broken.items())]
    if context.options.ends_only or not second.selection.ids:
        return rows
    # An open ledger only grows. If the second pass read fewer copies, a bookie with the last entries did not answer.
    first_pass, second_pass = copies_of(context.groups()), copies_of(second.directories)
    for i in second.selection.ids:
        is_open = i in second.ledgers.last and i not in broken and second.ledgers.after[i].state != "closed"
        if is_open and second_pass[i] < first_pass[i]:
            found = f"{second_pass[i]} were checked in the second pass"
            rows.append((i, str(Kind.UNREADABLE_BOOKIE), f"{first_pass[i]} copies", found))
    return rows


def better_rows(rows: list[dict[str, Any]], unknown_of: Mapping[tuple[int, str], int]) -> list[dict[str, Any]]:
    """Rows of the first pass with fewer unknown copies than the second pass (`unknown_of`, by ledger and bookie)."""
    return [row for row in rows if row["unknown"] < unknown_of.get((row["ledger_id"], row["bookie"]), 0)]


def _unknown_copies(second: SecondPass, there: pa.Array) -> dict[tuple[int, str], int]:
    """Unknown copies in the second pass by ledger and bookie, of ledgers that did not change during the run."""
    ledgers = second.ledgers
    steady = {i for i in second.selection.ids if ledgers.is_steady_before(i) and ledgers.is_steady_after(i)}
    unknown_of: dict[tuple[int, str], int] = {}
    for directory in second.directories:
        table = _read(directory, there)
        for row in table.filter(pc.greater(table["unknown"], 0)).to_pylist():
            if row["ledger_id"] in steady:
                unknown_of[row["ledger_id"], row["bookie"]] = row["unknown"]
    return unknown_of


def _with_unread(table: pa.Table, back: pa.Array) -> pa.Table:
    """Count copies on the bookies `back` as unknown: these bookies counted as gone, so nothing was read from them."""
    is_back = pc.is_in(table["bookie"], back)
    table = table.set_column(3, "unknown", pc.if_else(is_back, table["copies"], table["unknown"]))
    return table.set_column(5, "reason", pc.if_else(is_back, CAME_BACK, table["reason"]))


def _read(directory: Path, there: pa.Array) -> pa.Table:
    """Coverage that one reading wrote, of the ledgers `there`."""
    table = parquet.read_table(directory / "coverage").select(COVERAGE_ARROW.names).cast(COVERAGE_ARROW)
    return table.filter(pc.is_in(table["ledger_id"], there))


def _path(context: RunContext) -> Path:
    return context.directory.table(AFTER, "coverage") / "part-0.parquet"

"""Implement `bindery ledger compare`: print the copies of each entry side by side, as a table or as JSON."""

import sys
from collections import Counter
from typing import Any, Final, Protocol

import typer
from bindery_client.ledger.api import ReadHandle
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import BadRequest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId

from bindery.common import exit_codes
from bindery.common.output import print_json, report_error
from bindery.common.progress import Progress
from bindery.ledger.replicas import Copy, EntryVerdict, ReplicaSource, Row, compare

CELL_WIDTH: Final = 34
"""Width in characters of the column of a bookie."""
REASONS_MAX: Final = 5
"""Maximum number of errors of bookies that the final message names."""


class CompareClient(ReplicaSource, Protocol):
    """The part of the ledger client that this module uses."""

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> ReadHandle: ...


async def run_compare(
    client: CompareClient,
    ledger_id: LedgerId,
    *,
    first: int,
    last: int | None,
    only_bad: bool,
    rate: float,
    as_json: bool,
) -> None:
    """Print the verdict on each entry, then on the ledger.

    Raises typer.Exit: DAMAGE for differences, FAILURE if a bookie did not answer.
    """
    metadata = await client.metadata(ledger_id)
    limit = await last_confirmed(client, ledger_id, metadata)
    end = limit if last is None else last
    if first > end and (last is not None or first > 0):
        raise BadRequest(
            "the range is empty: --last is before --first"
            if last is not None
            else "no entry is confirmed from there on; --last reads entries beyond the last confirmed one",
            first=first,
            last=end,
        )
    summary = Summary(ledger_id, metadata, first=first, last=end, limit=limit)
    progress = Progress(end - first + 1, "entries")
    table = Table()
    async for rows in compare(client, ledger_id, metadata, first=first, last=end, limit=limit, rate=rate):
        shown = [row for row in rows if row.is_bad or not only_bad]
        summary.add(rows)
        if shown:
            progress.clear()
        for row in shown:
            if as_json:
                print_json(row_as_json(row))
            else:
                print(table.line(row))
        if shown:
            sys.stdout.flush()
        progress.update(summary.entry_count, f"{summary.bad_count} bad")
    progress.clear()
    if as_json:
        print_json(summary.as_json())
    else:
        print(summary.text())
    if summary.reasons:
        report_error(summary.complaint(), code="incomplete", exit_code=summary.exit_code, as_json=as_json)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


async def last_confirmed(client: CompareClient, ledger_id: LedgerId, metadata: LedgerMetadata) -> int:
    """Return the last confirmed entry or -1. Reads it from the bookies if the ledger is open; never fences."""
    if metadata.state is LedgerState.CLOSED:
        return int(metadata.last_entry_id)
    handle = await client.open(ledger_id, password=metadata.password or b"", recover=False)
    try:
        return handle.last_add_confirmed
    finally:
        await handle.release()


class Table:
    """Format rows as text. Invariant: the headings above a row name its ensemble."""

    def __init__(self) -> None:
        self._ensemble: tuple[BookieId, ...] = ()

    def line(self, row: Row) -> str:
        cells = [self._cell(row.copies.get(bookie_id)) for bookie_id in row.ensemble]
        line = f"{row.entry_id:>8}  " + "  ".join(cells) + f"  {row.words}"
        if row.ensemble == self._ensemble:
            return line
        self._ensemble = row.ensemble
        heading = f"{'entry':>8}  " + "  ".join(bookie_id.ljust(CELL_WIDTH) for bookie_id in row.ensemble) + "  verdict"
        return heading + "\n" + line

    @staticmethod
    def _cell(copy: Copy | None) -> str:
        if copy is None:
            return "-".ljust(CELL_WIDTH)  # not in the write set
        if copy.crc32c is None:
            return copy.verdict.value.ljust(CELL_WIDTH)
        figures = f"lac={copy.lac} len={copy.length} {copy.crc32c:08x}"
        return (figures if copy.verdict is Verdict.GOOD else f"{copy.verdict.value} {figures}").ljust(CELL_WIDTH)


def row_as_json(row: Row) -> dict[str, Any]:
    return {
        "entry_id": int(row.entry_id),
        "verdict": row.verdict.value,
        "words": row.words,
        "copies": {bookie_id: copy_as_json(copy) for bookie_id, copy in row.copies.items()},
    }


def copy_as_json(copy: Copy) -> dict[str, Any]:
    facts: dict[str, Any] = {"verdict": copy.verdict.value}
    if copy.crc32c is not None:
        facts |= {"lac": copy.lac, "length": copy.length, "size": copy.size, "crc32c": f"{copy.crc32c:08x}"}
    if copy.reason:
        facts["reason"] = copy.reason
    return facts


class Summary:
    """Accumulate the verdict on a ledger."""

    def __init__(self, ledger_id: int, metadata: LedgerMetadata, *, first: int, last: int, limit: int) -> None:
        self._ledger_id = ledger_id
        self._state = metadata.state.name.lower()
        self._first = first
        self._last = last
        self._limit = limit
        self._verdicts: Counter[EntryVerdict] = Counter()
        self._of_bookie: dict[BookieId, Counter[Verdict]] = {}
        self.reasons: Counter[tuple[BookieId, str]] = Counter()
        """Errors of bookies, with the number of entries each concerns."""
        self._differs = False
        self._is_incomplete = False
        self.entry_count = 0
        self.bad_count = 0

    def add(self, rows: list[Row]) -> None:
        self.entry_count += len(rows)
        for row in rows:
            self._verdicts[row.verdict] += 1
            self.bad_count += row.is_bad
            self._differs |= row.differs
            self._is_incomplete |= row.is_incomplete
            for bookie_id, copy in row.copies.items():
                self._of_bookie.setdefault(bookie_id, Counter())[copy.verdict] += 1
                if copy.verdict is Verdict.ERROR:
                    self.reasons[bookie_id, copy.reason] += 1

    @property
    def verdict(self) -> str:
        return "differs" if self._differs else "incomplete" if self._is_incomplete else "agrees"

    @property
    def exit_code(self) -> int:
        if self._differs:
            return exit_codes.DAMAGE
        return exit_codes.FAILURE if self._is_incomplete else exit_codes.OK

    def as_json(self) -> dict[str, Any]:
        return {
            "ledger_id": self._ledger_id,
            "state": self._state,
            "verdict": self.verdict,
            "first": self._first,
            "last": self._last,
            "last_confirmed": self._limit,
            "entries": self.entry_count,
            **{verdict.value: self._verdicts[verdict] for verdict in EntryVerdict},
            "bookies": {b: _named(counts) for b, counts in sorted(self._of_bookie.items())},
            "reasons": [{"bookie": b, "reason": reason, "entries": n} for (b, reason), n in self.reasons.items()],
        }

    def text(self) -> str:
        what = f"ledger {self._ledger_id} ({self._state})"
        if not self.entry_count:
            return f"{what}: no confirmed entries"
        verdicts = ", ".join(f"{n} {verdict.value}" for verdict, n in self._verdicts.items())
        range_text = f"{self.entry_count} entries from {self._first} to {self._last}"
        lines = [f"{what} {self.verdict}: {range_text}: {verdicts}"]
        for bookie_id, counts in sorted(self._of_bookie.items()):
            lines.append(f"  {bookie_id}: " + ", ".join(f"{n} {name}" for name, n in _named(counts).items()))
        return "\n".join(lines)

    def complaint(self) -> str:
        parts = [f"{b}: {reason} ({n} entries)" for (b, reason), n in self.reasons.most_common(REASONS_MAX)]
        rest = f"; and {len(self.reasons) - REASONS_MAX} other reasons" if len(self.reasons) > REASONS_MAX else ""
        return (
            "not all copies could be read: "
            + "; ".join(parts)
            + rest
            + ". Start the bookies that are down, and see the logs of the others"
        )


def _named(counts: Counter[Verdict]) -> dict[str, int]:
    return {verdict.value: n for verdict, n in counts.items()}

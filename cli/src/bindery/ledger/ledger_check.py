"""Implement `bindery ledger check`: read replicas from each bookie that the metadata assigns them to.

The quick check reads the first and the last entry of each fragment from every bookie of their write sets. The deep
check reads every entry, compares payloads and lengths across the copies, and checks that the length of the ledger
grows by each payload.

| verdict on a fragment | meaning                                                                          |
|-----------------------|----------------------------------------------------------------------------------|
| good                  | every copy that was read is present and verifies                                 |
| missing               | the bookie reports that it does not have some entries                            |
| corrupt               | some copies contradict their digest                                              |
| diverged              | some copies verify but differ from other good copies                             |
| gone                  | the bookie is not registered, so it was not read from                            |
| error                 | the bookie did not return the entries, for example because it is in limbo        |

An open ledger is checked up to its last confirmed entry. The ledger is neither fenced, recovered nor changed.
"""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import typer
from bindery_client.client import DIGEST_TYPE_UNTOLD
from bindery_client.ledger.replica import Verdict
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import entry_count_of

from bindery.common import exit_codes
from bindery.common.output import print_json
from bindery.common.progress import Progress
from bindery.ledger import replicas
from bindery.ledger.ledger_compare import CompareClient, last_confirmed, row_as_json
from bindery.ledger.replicas import EntryVerdict, Row

FINDINGS_SHOWN_MAX: Final = 20
"""Maximum number of bad entries, and of length problems, that are printed."""
GONE: Final = "not registered"


class CheckClient(CompareClient, Protocol):
    """The part of the ledger client that this module uses."""

    async def list_bookies(self) -> Mapping[BookieId, bool]: ...


@dataclass(slots=True)
class Fragment:
    """The entries of one segment on one bookie, and what the check found."""

    segment_first: int
    """First entry of the segment."""
    last: int
    """Last entry of the segment that is checked; below `segment_first` if there is none."""
    index: int
    """Position of the bookie in the ensemble."""
    bookie_id: BookieId
    entries: int
    """Number of entries that the metadata assigns to the bookie."""
    is_registered: bool
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def checked(self) -> int:
        return sum(self.counts.values())

    @property
    def verdict(self) -> str:
        if not self.is_registered and self.entries:
            return "gone"
        return next((name for name in ("corrupt", "diverged", "missing", "error") if self.counts[name]), "good")

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "kind": "fragment",
            "first": self.segment_first,
            "last": self.last,
            "index": self.index,
            "bookie": self.bookie_id,
            "entries": self.entries,
            "checked": self.checked,
            "verdict": self.verdict,
        }
        facts |= {name: self.counts[name] for name in ("good", "missing", "corrupt", "diverged", "error")}
        if self.reasons:
            facts["reasons"] = dict(self.reasons)
        return facts


@dataclass(slots=True)
class LengthCheck:
    """Check that the length in the header of each entry is the length in the previous entry plus its own payload.

    A writer that chooses its entry ids itself may add entries in another order. The length of such a ledger does not
    grow by each payload although its copies are good.
    """

    before: tuple[int, int] | None = None
    """(entry id, length) of the last entry read."""
    problems: list[str] = field(default_factory=list)
    count: int = 0

    def see(self, row: Row) -> None:
        """Check one entry. Entries must be passed in ascending order."""
        good = next((copy for copy in row.copies.values() if copy.verdict is Verdict.GOOD), None)
        if good is None or good.length is None or good.size is None:
            self.before = None
            return
        known = self.before is not None and self.before[0] == row.entry_id - 1
        expected = (self.before[1] if known and self.before else 0) + good.size
        if (known or row.entry_id == 0) and good.length != expected:
            self._add_problem(
                f"entry {row.entry_id} records a ledger length of {good.length} bytes instead of {expected}"
            )
        self.before = int(row.entry_id), good.length

    def end(self, metadata: LedgerMetadata) -> None:
        """Compare the length in the last entry with the length in the metadata of a closed ledger."""
        if self.before is None or metadata.state is not LedgerState.CLOSED:
            return
        last, length = self.before
        if last == metadata.last_entry_id and length != metadata.length:
            self._add_problem(f"the metadata records {metadata.length} bytes, the last entry {length}")

    def _add_problem(self, problem: str) -> None:
        self.count += 1
        if len(self.problems) < FINDINGS_SHOWN_MAX:
            self.problems.append(problem)


async def run_check(client: CheckClient, ledger_id: LedgerId, *, deep: bool, rate: float, as_json: bool) -> None:
    """Print one line per fragment, then the verdict.

    Raises typer.Exit: DAMAGE for findings, FAILURE if a bookie did not answer.
    """
    metadata = await client.metadata(ledger_id)
    limit = await last_confirmed(client, ledger_id, metadata)
    registered = await client.list_bookies()
    found = _Found(ledger_id, metadata, limit, registered)
    rows = _deep(client, ledger_id, metadata, limit, rate) if deep else _ends(client, ledger_id, metadata, limit)
    total = limit + 1 if deep else found.ends_count()
    progress = Progress(total, "entries")
    async for row in rows:
        found.see(row)
        progress.update(found.entry_count, f"{len(found.bad)} bad")
    progress.clear()
    if deep:
        found.lengths.end(metadata)
    if as_json:
        for facts in found.as_json(deep=deep):
            print_json(facts)
    else:
        print("\n".join(found.lines(deep=deep)))
    sys.stdout.flush()
    if found.exit_code:
        raise typer.Exit(found.exit_code)


async def _deep(
    client: CheckClient, ledger_id: LedgerId, metadata: LedgerMetadata, limit: int, rate: float
) -> AsyncIterator[Row]:
    async for rows in replicas.compare(client, ledger_id, metadata, first=0, last=limit, limit=limit, rate=rate):
        for row in rows:
            yield row


async def _ends(client: CheckClient, ledger_id: LedgerId, metadata: LedgerMetadata, limit: int) -> AsyncIterator[Row]:
    for entry_id in sorted(ends_of(metadata, limit)):
        async for rows in replicas.compare(client, ledger_id, metadata, first=entry_id, last=entry_id, limit=limit):
            for row in rows:
                yield row


def ends_of(metadata: LedgerMetadata, limit: int) -> set[int]:
    """Return the first and the last entry of each fragment, up to the entry `limit`."""
    ends: set[int] = set()
    for segment, last in segments_of(metadata, limit):
        first = int(segment.first_entry_id)
        size = metadata.ensemble_size
        for index in range(size):
            # Of any `size` consecutive entries, each index holds at least one.
            starts, lasts = range(first, min(first + size, last + 1)), range(max(first, last - size + 1), last + 1)
            ends.update([e for e in starts if (index - e) % size < metadata.write_quorum][:1])
            ends.update([e for e in lasts if (index - e) % size < metadata.write_quorum][-1:])
    return ends


def segments_of(metadata: LedgerMetadata, limit: int) -> list[tuple[Segment, int]]:
    """Return each segment with its last entry, which is below its first if the segment is empty."""
    firsts = [int(segment.first_entry_id) for segment in metadata.segments]
    lasts = [*(first - 1 for first in firsts[1:]), limit]
    return [
        (segment, max(min(last, limit), first - 1))
        for segment, first, last in zip(metadata.segments, firsts, lasts, strict=True)
    ]


class _Found:
    """All findings, by fragment."""

    def __init__(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, limit: int, registered: Mapping[BookieId, bool]
    ) -> None:
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._limit = limit
        self.digest_type = metadata.digest_type or DIGEST_TYPE_UNTOLD
        self.lengths = LengthCheck()
        self.bad: list[Row] = []
        self.entry_count = 0
        self.fragments = [
            Fragment(
                int(segment.first_entry_id),
                last,
                index,
                bookie_id,
                entry_count_of(
                    index,
                    first=int(segment.first_entry_id),
                    last=last,
                    ensemble_size=metadata.ensemble_size,
                    write_quorum=metadata.write_quorum,
                ),
                bookie_id in registered,
            )
            for segment, last in segments_of(metadata, limit)
            for index, bookie_id in enumerate(segment.ensemble)
        ]
        self._by_place = {(f.segment_first, f.bookie_id): f for f in self.fragments}

    def ends_count(self) -> int:
        return len(ends_of(self._metadata, self._limit))

    def see(self, row: Row) -> None:
        self.entry_count += 1
        self.lengths.see(row)
        segment_first = int(self._metadata.segment_of(EntryId(row.entry_id)).first_entry_id)
        majority = max(row.groups, key=len) if row.groups else ()
        for bookie_id, copy in row.copies.items():
            fragment = self._by_place.get((segment_first, bookie_id))
            if fragment is None:  # the ensemble changed during the check
                continue
            name = {Verdict.ABSENT: "missing"}.get(copy.verdict, copy.verdict.value)
            if copy.verdict is Verdict.GOOD and row.verdict is EntryVerdict.DIVERGED and bookie_id not in majority:
                name = "diverged"
            fragment.counts[name] += 1
            if copy.verdict is Verdict.ERROR:
                fragment.reasons[copy.reason] += 1
        if row.is_bad:
            self.bad.append(row)

    @property
    def gone(self) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.verdict == "gone"]

    def verdict(self) -> str:
        differs = any(row.differs for row in self.bad) or self.lengths.count
        if differs or self.gone:
            return "bad"
        return "incomplete" if self.bad else "good"

    @property
    def exit_code(self) -> int:
        return {"bad": exit_codes.DAMAGE, "incomplete": exit_codes.FAILURE, "good": exit_codes.OK}[self.verdict()]

    def as_json(self, *, deep: bool) -> list[dict[str, Any]]:
        return [
            *(fragment.as_json() for fragment in self.fragments),
            *({"kind": "entry", **row_as_json(row)} for row in self.bad),
            {
                "kind": "summary",
                "ledger_id": self._ledger_id,
                "state": self._metadata.state.name.lower(),
                "verdict": self.verdict(),
                "deep": deep,
                "last_confirmed": self._limit,
                "entries_checked": self.entry_count,
                "bad_entries": len(self.bad),
                "lengths": self.lengths.problems,
                "lengths_wrong": self.lengths.count,
                "gone": sorted({fragment.bookie_id for fragment in self.gone}),
            },
        ]

    def lines(self, *, deep: bool) -> list[str]:
        state = self._metadata.state.name.lower()
        if self._limit < 0:
            return [f"ledger {self._ledger_id} ({state}): no confirmed entries", *self._fragment_lines()]
        depth = "every entry" if deep else "first and last of each fragment; --deep reads all"
        lines = [*self._fragment_lines()]
        for row in self.bad[:FINDINGS_SHOWN_MAX]:
            lines.append(f"  entry {row.entry_id}: {row.words}")
        if len(self.bad) > FINDINGS_SHOWN_MAX:
            lines.append(f"  and {len(self.bad) - FINDINGS_SHOWN_MAX} more; --json lists all")
        lines += [f"  length: {problem}" for problem in self.lengths.problems]
        reasons = Counter({(f.bookie_id, why): n for f in self.fragments for why, n in f.reasons.items()})
        lines += [f"  {bookie_id} returned an error: {why} ({n} entries)" for (bookie_id, why), n in reasons.items()]
        lines.append(
            f"ledger {self._ledger_id} ({state}) is {self.verdict()}: {self.entry_count} of {self._limit + 1} entries "
            f"read from all their bookies ({depth}), {len(self.bad)} bad"
        )
        return lines

    def _fragment_lines(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            ("entries", "bookie", "holds", "checked", "good", "missing", "corrupt", "diverged", "error", "verdict")
        ]
        rows += [
            (
                f"{f.segment_first}..{f.last if f.last >= f.segment_first else ''}",
                f.bookie_id,
                str(f.entries),
                str(f.checked),
                *(str(f.counts[n]) for n in ("good", "missing", "corrupt", "diverged", "error")),
                f"GONE: {GONE}" if f.verdict == "gone" else f.verdict if f.verdict == "good" else f.verdict.upper(),
            )
            for f in self.fragments
        ]
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        texts = {0, 1, 9}
        return [
            "  ".join(
                cell.ljust(width) if at in texts else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

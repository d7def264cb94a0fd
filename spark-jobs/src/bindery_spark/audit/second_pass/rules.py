"""Decide which ledgers are read a second time, and how their findings of the first pass are merged then. Pure.

A cluster changes while it is audited. A finding is reported only if changes of the ledger's metadata during the run
cannot explain it. The metadata is read before the first pass (`before`), after it (`after`), and after the second pass
(`last`).

| a ledger, from `before` to `after`                      | read again | its findings of the first pass       |
|---------------------------------------------------------|------------|--------------------------------------|
| a copy is bad or missing                                | yes        | see below                            |
| closed, changed, and fewer copies were read than it has | yes        | see below                            |
| its metadata was unreadable, and is readable now        | yes        | there are none                       |
| its metadata became unreadable                          | no         | are kept; the ledger was not checked |
| deleted, or new                                         | no         | are dropped                          |
| orphaned data, without a ledger or of a steady one      | no         | are kept                             |

A ledger is *steady* between two times if it is closed at both and has the same metadata version. If a ledger was read
again, its findings of the first pass are merged with the second pass by one of these rules:

| before..after | after..last | rule    | reason                                                            |
|---------------|-------------|---------|-------------------------------------------------------------------|
| any           | not steady  | CONFIRM | copies may still be moving: both passes must report the same      |
| not steady    | steady      | REPLACE | the copies that the first pass read may not belong to it any more |
| steady        | steady      | UPDATE  | the same copies: the newer result counts, where there is one      |

The coverage of the second pass replaces that of the first, except that with UPDATE the better of both counts.
Repaired damage stays as a warning: a bookie repairs what a reader reports, but its disk still needs attention.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from bindery_spark.audit.findings.findings import Kind
from bindery_spark.audit.ledger_history import LedgerHistory, LedgerRows, is_steady


class MergeRule(StrEnum):
    """How a ledger's findings of the first pass are merged with the second pass."""

    KEEP = "keep"
    """Keep them unchanged."""
    CONFIRM = "confirm"
    """Keep the parts that the second pass found too."""
    REPLACE = "replace"
    """The findings of the second pass replace them."""
    UPDATE = "update"
    """As REPLACE, but keep the parts about copies that the second pass could not read."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of `select`."""

    ids: tuple[int, ...]
    """Ledgers to read again, ascending."""
    broken: Mapping[int, str]
    """Ledgers whose metadata became unreadable during the run, and the error."""


def select(
    before: LedgerRows,
    after: LedgerRows,
    found: Iterable[tuple[int, str]],
    copies: Mapping[int, int],
    *,
    planned: Collection[int],
    ends_only: bool,
) -> Selection:
    """Select the ledgers to read again.

    `found`: ledger id and kind of the findings of the first pass. `copies`: copies that it read of each ledger.
    `planned`: ids of the ledgers that it was to read. `ends_only`: it read only the ends of fragments, so `copies`
    does not show whether all copies were read.
    """
    broken = {
        ledger_id: now.problem
        for ledger_id in planned
        if (now := after.get(ledger_id)) is not None and now.problem is not None and before[ledger_id].problem is None
    }
    ids = set()
    for ledger_id, kind in found:
        was, now = before.get(ledger_id), after.get(ledger_id)
        is_kept = kind == Kind.ORPHAN_DATA and is_steady(was, now)
        if was is not None and now is not None and ledger_id not in broken and not is_kept:
            ids.add(ledger_id)
    for ledger_id in planned:
        was, now = before[ledger_id], after.get(ledger_id)
        if now is None or now.problem is not None:
            continue
        if was.problem is not None:
            ids.add(ledger_id)
        elif now.state == "closed" and now.metadata_version != was.metadata_version:
            assert now.last_entry_id is not None
            is_short = copies.get(ledger_id, 0) < (now.last_entry_id + 1) * now.write_quorum
            if ends_only or is_short:
                ids.add(ledger_id)
    return Selection(tuple(sorted(ids)), broken)


def broken_ledgers(ledgers: LedgerHistory, selection: Selection) -> dict[int, str]:
    """`selection.broken`, and ledgers whose metadata became unreadable during the second pass."""
    there = (ledgers.last[i] for i in selection.ids if i in ledgers.last and ledgers.after[i].problem is None)
    return {**selection.broken, **{row.ledger_id: row.problem for row in there if row.problem is not None}}


def merge_rules(
    ledgers: LedgerHistory, found: Iterable[tuple[int, str]], selection: Selection
) -> dict[tuple[int, bool], MergeRule]:
    """Rules by (ledger id, whether the finding is ORPHAN_DATA). Findings without a rule are dropped."""
    rules: dict[tuple[int, bool], MergeRule] = {}
    reread, broken = frozenset(selection.ids), broken_ledgers(ledgers, selection)
    for ledger_id, kind in found:
        key = ledger_id, kind == Kind.ORPHAN_DATA
        was, now = ledger_id in ledgers.before, ledger_id in ledgers.after
        if ledger_id in broken or not (was or now):
            rules[key] = MergeRule.KEEP
        elif not (was and now and ledger_id in ledgers.last):
            continue
        elif kind == Kind.ORPHAN_DATA:
            rules[key] = MergeRule.KEEP if ledgers.is_steady_before(ledger_id) else MergeRule.CONFIRM
        elif ledger_id in reread:
            if not ledgers.is_steady_after(ledger_id):
                rules[key] = MergeRule.CONFIRM
            else:
                rules[key] = MergeRule.UPDATE if ledgers.is_steady_before(ledger_id) else MergeRule.REPLACE
    return rules

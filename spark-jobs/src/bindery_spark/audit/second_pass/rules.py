"""Which ledgers a run reads once more at its end, and what becomes of that which its first reading found. Pure.

| a ledger, from `before` to `after`                           | is read again | what its first reading found        |
|--------------------------------------------------------------|---------------|-------------------------------------|
| some copy of it is bad or missing                            | yes           | see below                           |
| closed, changed, and fewer copies were seen than it asks for | yes           | see below                           |
| its metadata could not be understood, and now can be         | yes           | there is none                       |
| its metadata cannot be understood any more                   | no            | stands, and the ledger was not seen |
| gone, or new                                                 | no            | is dropped                          |
| no ledger at all: data without one                           | no            | stands                              |

What bookies hold beside (ORPHAN_DATA) is no copy: of a ledger that did not change it stands as it is.

The second reading lies between `after` and `last`, the ledgers as they are once it is done. Of a ledger that was closed
and did not change in between the second reading alone counts: what healed in place leaves metadata as they are, and so
does what broke. Of another one both readings must say the same. In each case the second reading's coverage takes the
place of the first one's, so that what it could not say was not seen.

A ledger that did not change from `before` to `last` has one set of copies. What a bookie said of them once counts until
it says otherwise: where the second reading could not say, what the first one found stands, and so does its coverage.

Damage that is not there any more stays as a warning: bookies repair what a reader finds, and somebody should look at
the disk.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from bindery_spark.audit.findings.findings import Kind


@dataclass(frozen=True, slots=True)
class KnownLedger:
    """What is needed of a row of LEDGERS. All ledgers of a cluster are kept at once, so that it is little."""

    ledger_id: int
    state: str
    metadata_version: int
    write_quorum: int
    last_entry_id: int | None
    length: int | None
    problem: str | None


LedgerRows = Mapping[int, KnownLedger]
"""By id."""


class Fate(StrEnum):
    """What becomes of findings of the first reading."""

    STANDS = "stands"
    TWICE = "twice"
    """Those parts that the second reading finds, too."""
    REPLACED = "replaced"
    """By what the second reading finds."""
    RENEWED = "renewed"
    """The same where the second reading could say; elsewhere they stand."""


@dataclass(frozen=True, slots=True)
class Rereading:
    ids: tuple[int, ...]
    """To be read again, ascending."""
    broken: Mapping[int, str]
    """Ledgers whose metadata became unreadable during the run, and how."""


def rereading(
    before: LedgerRows, after: LedgerRows, found: Iterable[tuple[int, str]], copies: Mapping[int, int], *,
    asked: Collection[int], ends_only: bool,
) -> Rereading:  # fmt: skip
    """`found`: ledger id and kind of the first reading's findings. `copies`: how many were seen of each ledger.
    `asked`: ledgers that were to be read. `ends_only`: how many copies there are to be is not known."""
    broken = {
        ledger_id: now.problem
        for ledger_id in asked
        if (now := after.get(ledger_id)) is not None and now.problem is not None and before[ledger_id].problem is None
    }
    ids = set()
    for ledger_id, kind in found:
        was, now = before.get(ledger_id), after.get(ledger_id)
        stands = kind == Kind.ORPHAN_DATA and is_steady(was, now)
        if was is not None and now is not None and ledger_id not in broken and not stands:
            ids.add(ledger_id)
    for ledger_id in asked:
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
    return Rereading(tuple(sorted(ids)), broken)


def is_steady(was: KnownLedger | None, now: KnownLedger | None) -> bool:
    """Closed, and the same at both times. None: it was not there."""
    if was is None or now is None:
        return False
    return was.state == now.state == "closed" and was.metadata_version == now.metadata_version


def is_steady_throughout(ledger_id: int, *times: LedgerRows) -> bool:
    """`is_steady` from each time to the next."""
    return all(is_steady(one.get(ledger_id), other.get(ledger_id)) for one, other in pairwise(times))


def broken_since(after: LedgerRows, last: LedgerRows, again: Rereading) -> dict[int, str]:
    """`again.broken`, and those whose metadata became unreadable while they were read again."""
    there = (last[i] for i in again.ids if i in last and after[i].problem is None)
    return {**again.broken, **{each.ledger_id: each.problem for each in there if each.problem is not None}}


def fates(
    before: LedgerRows, after: LedgerRows, last: LedgerRows, found: Iterable[tuple[int, str]], again: Rereading
) -> dict[tuple[int, bool], Fate]:
    """By ledger, and whether it is ORPHAN_DATA. What has no fate is dropped. `last`: the same as `after`, where nothing
    was read again."""
    known: dict[tuple[int, bool], Fate] = {}
    reread, broken = frozenset(again.ids), broken_since(after, last, again)
    for ledger_id, kind in found:
        key = ledger_id, kind == Kind.ORPHAN_DATA
        was, now, then = before.get(ledger_id), after.get(ledger_id), last.get(ledger_id)
        if (was is None and now is None) or ledger_id in broken:
            known[key] = Fate.STANDS
        elif was is None or now is None or then is None:
            continue
        elif kind == Kind.ORPHAN_DATA:
            known[key] = Fate.STANDS if is_steady(was, now) else Fate.TWICE
        elif ledger_id in reread:
            if not is_steady(now, then):
                known[key] = Fate.TWICE
            else:
                known[key] = Fate.RENEWED if is_steady(was, now) else Fate.REPLACED
    return known

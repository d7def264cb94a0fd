"""Kinds of findings, their severities, and the verdict of a run. Pure, and without Spark.

| kind                | severity                  | meaning                                                          |
|---------------------|---------------------------|------------------------------------------------------------------|
| MISSING_REPLICA     | under_replicated          | a bookie does not have a confirmed entry that it should store    |
| DIGEST_MISMATCH     | corrupt, warning          | a copy does not match its digest; warning: repaired since        |
| REPLICA_DIVERGENCE  | corrupt                   | copies with valid digests have different payloads                |
| LENGTH_MISMATCH     | corrupt                   | copies, or copies and metadata, differ in the ledger's length    |
| ENTRY_LOST          | unreadable                | a confirmed entry has no good copy                               |
| METADATA_UNREADABLE | unreadable, incomplete    | a znode of a ledger, topic or cursor cannot be decoded           |
| ORPHAN_DATA         | warning, info             | a bookie stores entries that no metadata assigns to it           |
| ORPHAN_METADATA     | unreadable, warning       | a topic or cursor names a missing ledger, or none names this one |
| STALE_ENSEMBLE      | under_replicated          | the metadata names a bookie that left for good                   |
| BAD_PLACEMENT       | under_replicated, warning | two copies on one bookie, or on fewer racks than possible        |
| OPEN_TOO_LONG       | warning                   | a ledger is open for longer than the limit                       |
| UNREADABLE_BOOKIE   | incomplete                | a bookie did not answer for some copies                          |
| FALSE_MARK          | warning                   | marked as under-replicated, and every copy is stored             |
| MISSING_MARK        | under_replicated          | under-replicated for longer than the delay, and not marked       |
| NOT_HEALED          | under_replicated          | no longer marked, but still under-replicated                     |
| TOPIC_INCONSISTENT  | corrupt, warning          | a topic's metadata contradicts its ledgers                       |
| CURSOR_INCONSISTENT | warning                   | a cursor has a position that its topic cannot have               |

A run with only `info` and `warning` is HEALTHY: every acknowledged entry has all its copies.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum
from typing import Final


class Kind(StrEnum):
    """Kinds of findings, see the module."""

    MISSING_REPLICA = "MISSING_REPLICA"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    REPLICA_DIVERGENCE = "REPLICA_DIVERGENCE"
    LENGTH_MISMATCH = "LENGTH_MISMATCH"
    ENTRY_LOST = "ENTRY_LOST"
    METADATA_UNREADABLE = "METADATA_UNREADABLE"
    ORPHAN_DATA = "ORPHAN_DATA"
    ORPHAN_METADATA = "ORPHAN_METADATA"
    STALE_ENSEMBLE = "STALE_ENSEMBLE"
    BAD_PLACEMENT = "BAD_PLACEMENT"
    OPEN_TOO_LONG = "OPEN_TOO_LONG"
    UNREADABLE_BOOKIE = "UNREADABLE_BOOKIE"
    FALSE_MARK = "FALSE_MARK"
    MISSING_MARK = "MISSING_MARK"
    NOT_HEALED = "NOT_HEALED"
    TOPIC_INCONSISTENT = "TOPIC_INCONSISTENT"
    CURSOR_INCONSISTENT = "CURSOR_INCONSISTENT"


class Severity(StrEnum):
    """In ascending order."""

    INFO = "info"
    WARNING = "warning"
    INCOMPLETE = "incomplete"
    UNDER_REPLICATED = "under_replicated"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


class Action(StrEnum):
    """What an operator should do."""

    MARK = "mark"
    """`--apply` marks the ledger, and replication workers copy the entries."""
    INSPECT = "inspect"
    """An operator must decide: no automatic action is safe."""


class Exit(IntEnum):
    """Exit codes of `bindery audit`."""

    HEALTHY = 0
    UNDER_REPLICATED = 1
    CORRUPT = 2
    INCOMPLETE = 3
    JOB_ERROR = 4


class Verdict(StrEnum):
    """Result of a run. Each verdict has an exit code."""

    HEALTHY = "HEALTHY"
    UNDER_REPLICATED = "UNDER-REPLICATED"
    CORRUPT = "CORRUPT"
    INCOMPLETE = "INCOMPLETE"

    @property
    def exit_code(self) -> Exit:
        return Exit[self.name]


LACKS_COPIES: Final = (Kind.MISSING_REPLICA, Kind.DIGEST_MISMATCH, Kind.STALE_ENSEMBLE)
"""Kinds for which an entry has fewer good copies than its write quorum, and copying repairs it."""

_VERDICTS: Final[Mapping[Severity, Verdict]] = {
    Severity.INFO: Verdict.HEALTHY,
    Severity.WARNING: Verdict.HEALTHY,
    Severity.INCOMPLETE: Verdict.INCOMPLETE,
    Severity.UNDER_REPLICATED: Verdict.UNDER_REPLICATED,
    Severity.CORRUPT: Verdict.CORRUPT,
    Severity.UNREADABLE: Verdict.CORRUPT,
}
assert _VERDICTS.keys() == set(Severity)


def verdict_of(severities: Iterable[str], *, is_complete: bool) -> Verdict:
    """The worst severity decides. `is_complete`: every copy was checked."""
    order = list(Severity)
    found = [Severity(each) for each in severities] + ([] if is_complete else [Severity.INCOMPLETE])
    return _VERDICTS[max(found, key=order.index, default=Severity.INFO)]


WHAT_TO_DO: Final[Mapping[Kind, str]] = {
    Kind.MISSING_REPLICA: "`bindery audit run --apply` marks the ledger, and replication workers copy the entries",
    Kind.DIGEST_MISMATCH: "check the disk; the bookie's scrub or `bindery audit run --apply` repairs the copy",
    Kind.REPLICA_DIVERGENCE: "compare with `bindery ledger compare`, find the second writer, keep both copies",
    Kind.LENGTH_MISMATCH: "compare with `bindery ledger compare`; entries are readable, only sizes are wrong",
    Kind.ENTRY_LOST: "restore a bookie or disk that stored the entry, and delete nothing before",
    Kind.METADATA_UNREADABLE: "restore the znode from a backup (`bindery cluster restore`)",
    Kind.ORPHAN_DATA: "garbage collection removes it; if it stays, check that the bookie's garbage collection runs",
    Kind.ORPHAN_METADATA: "`bindery ledgers orphans` deletes unnamed ledgers; search backups for missing ones",
    Kind.STALE_ENSEMBLE: "run `bindery audit run --apply`: workers copy the entries to other bookies",
    Kind.BAD_PLACEMENT: "add bookies on more racks, then drain a bookie of the ensemble",
    Kind.OPEN_TOO_LONG: "find its writer; if there is none, open the ledger with recovery, which closes it",
    Kind.UNREADABLE_BOOKIE: "start the bookie and audit again; pass `--no-orphans` if bookies have no admin HTTP port",
    Kind.FALSE_MARK: "workers remove it; if it stays, check that recovery is not paused and workers run",
    Kind.MISSING_MARK: "check that an auditor runs; `--apply` marks the ledger",
    Kind.NOT_HEALED: "see `bindery recovery explain LEDGER`; `--apply` marks the ledger again",
    Kind.TOPIC_INCONSISTENT: "see `bindery topics stats`; unload the topic, so that its owner reads the metadata again",
    Kind.CURSOR_INCONSISTENT: "seek the subscription to a valid position",
}
"""Advice by kind."""
assert WHAT_TO_DO.keys() == set(Kind)

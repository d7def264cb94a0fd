"""What an audit may find, how bad it is, and what a run comes to. Pure, and without Spark.

| kind                | severity                  | says                                                               |
|---------------------|---------------------------|--------------------------------------------------------------------|
| MISSING_REPLICA     | under_replicated          | a bookie denies a confirmed entry that it should hold              |
| DIGEST_MISMATCH     | corrupt, warning          | a copy contradicts its digest; did, and was repaired meanwhile     |
| REPLICA_DIVERGENCE  | corrupt                   | copies whose digests hold have different payloads                  |
| LENGTH_MISMATCH     | corrupt                   | copies, or copies and metadata, differ in the ledger's length      |
| ENTRY_LOST          | unreadable                | no good copy of a confirmed entry is left                          |
| METADATA_UNREADABLE | unreadable, incomplete    | a znode of a ledger, topic or cursor cannot be understood          |
| ORPHAN_DATA         | warning, info             | a bookie holds entries that no metadata name                       |
| ORPHAN_METADATA     | unreadable, warning       | a topic or cursor names a ledger that is not there; or the reverse |
| STALE_ENSEMBLE      | under_replicated          | metadata name a bookie that left for good                          |
| BAD_PLACEMENT       | under_replicated, warning | two copies on one bookie, or on one rack without need              |
| OPEN_TOO_LONG       | warning                   | a ledger was not closed for longer than the limit                  |
| UNREADABLE_BOOKIE   | incomplete                | a bookie could not say what it holds                               |
| FALSE_MARK          | warning                   | marked as under-replicated, and every copy is there                |
| MISSING_MARK        | under_replicated          | under-replicated for longer than the delay, and not marked         |
| NOT_HEALED          | under_replicated          | its mark went since the last run, and it has not its write quorum  |
| TOPIC_INCONSISTENT  | corrupt, warning          | what a topic says of its ledgers is not what the ledgers say       |
| CURSOR_INCONSISTENT | warning                   | a position that its topic cannot have                              |

`info` and `warning` leave a run HEALTHY: no acknowledged entry lacks a copy.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum
from typing import Final


class Kind(StrEnum):
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
    """Ascending."""

    INFO = "info"
    WARNING = "warning"
    INCOMPLETE = "incomplete"
    UNDER_REPLICATED = "under_replicated"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


class Action(StrEnum):
    """What is to be done."""

    MARK = "mark"
    """`--apply` marks the ledger, and the auditor's workers heal it."""
    INSPECT = "inspect"
    """Somebody has to look: nothing that is automatic is safe."""


class Exit(IntEnum):
    HEALTHY = 0
    UNDER_REPLICATED = 1
    CORRUPT = 2
    INCOMPLETE = 3
    JOB_ERROR = 4


class Verdict(StrEnum):
    HEALTHY = "HEALTHY"
    UNDER_REPLICATED = "UNDER-REPLICATED"
    CORRUPT = "CORRUPT"
    INCOMPLETE = "INCOMPLETE"

    @property
    def exit_code(self) -> Exit:
        return Exit[self.name]


LACKS_COPIES: Final = (Kind.MISSING_REPLICA, Kind.DIGEST_MISMATCH, Kind.STALE_ENSEMBLE)
"""Kinds that say that an entry has fewer than its write quorum of good copies, and that copying heals."""

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
    """The worst decides. `is_complete`: every copy that was to be looked at was."""
    order = list(Severity)
    found = [Severity(each) for each in severities] + ([] if is_complete else [Severity.INCOMPLETE])
    return _VERDICTS[max(found, key=order.index, default=Severity.INFO)]


WHAT_TO_DO: Final[Mapping[Kind, str]] = {
    Kind.MISSING_REPLICA: "`bindery audit run --apply` marks the ledger, and the auditor's workers copy the entries",
    Kind.DIGEST_MISMATCH: "the bookie's scrub repairs it; `--apply` marks the ledger; look at that disk",
    Kind.REPLICA_DIVERGENCE: "compare with `bindery ledger compare`, find out who wrote twice, keep both copies",
    Kind.LENGTH_MISMATCH: "compare with `bindery ledger compare`; entries are readable, sizes are wrong",
    Kind.ENTRY_LOST: "bring back the bookies or disks that held it; only then is there something to copy from",
    Kind.METADATA_UNREADABLE: "restore the znode from a backup (`bindery cluster restore`)",
    Kind.ORPHAN_DATA: "the bookie's garbage collection removes it; if it stays, look whether that runs",
    Kind.ORPHAN_METADATA: "`bindery ledgers orphans` lists and deletes; one that is missing is in a backup or gone",
    Kind.STALE_ENSEMBLE: "`--apply` marks the ledger, and the auditor's workers give the copies to other bookies",
    Kind.BAD_PLACEMENT: "drain a bookie of the ensemble once there are bookies on more racks",
    Kind.OPEN_TOO_LONG: "find its writer; if there is none, open the ledger with recovery, which closes it",
    Kind.UNREADABLE_BOOKIE: "bring it up and audit again; `--no-orphans` where bookies have no HTTP that tells ledgers",
    Kind.FALSE_MARK: "workers remove it when they look; if it stays, are workers running and recovery enabled?",
    Kind.MISSING_MARK: "is an auditor running? `--apply` marks the ledger",
    Kind.NOT_HEALED: "`bindery recovery explain`; `--apply` marks it again",
    Kind.TOPIC_INCONSISTENT: "`bindery topics stats`; unload the topic so that its owner reads its ledgers anew",
    Kind.CURSOR_INCONSISTENT: "seek the subscription to a position that the topic has",
}
"""By kind, for people."""
assert WHAT_TO_DO.keys() == set(Kind)

"""Znode paths of the ledger tree. They are BookKeeper's, so that its tools and Bindery's can read the same tree.

All paths are below `root` (default `/ledgers`). <b>: a bookie id; <id>: a ledger id, `%010d`; <hex>: the ledger id as
four 16-bit groups in hex, one directory each; set(v), delete(v): with the version that was read; any: without a version
check; eph. seq.: creates an ephemeral sequential node; own only: `ephemerals.delete_own`.

| key                                      | value             | written by, how          | removed by, how           |
|------------------------------------------|-------------------|--------------------------|---------------------------|
| LAYOUT                                   | LAYOUT_TEXT       | cluster init: create     | never                     |
| INSTANCEID                               | UUID, 36 bytes    | cluster init: create     | never                     |
| available, available/readonly            | empty             | cluster init: create     | never                     |
| available/<b>                            | BookieServiceInfo | bookie b: ephemeral      | its session; b: delete(v) |
| available/readonly/<b>                   | BookieServiceInfo | bookie b: ephemeral      | its session; b: delete(v) |
| cookies/<b>                              | cookie text       | bookie b: create, set(v) | operator: delete(v)       |
| idgen/ID-<10 digits>                     | empty             | generator: eph. seq.     | the same, at once: any    |
| idgen-long                               | empty             | generator: create        | never: enables long ids   |
| idgen-long/HOB-<10 digits>               | empty             | generator: create        | generator: delete(0)      |
| idgen-long/HOB-<10>/ID-<10>              | empty             | generator: eph. seq.     | the same, at once: any    |
| XX/XXXX/LXXXX                            | ledger metadata   | client: create, set(v)   | client: any               |
| XXX/XXXX/XXXX/XXXX/LXXXX                 | ledger metadata   | client: create, set(v)   | client: any               |
| parents of these two                     | empty             | client: on demand        | last client in it: any    |
| underreplication/ledgers/<hex>/urL<id>   | text proto        | marker: create, set(v)   | worker: delete(v locked)  |
| underreplication/locks/urL<id>           | text proto        | worker: ephemeral        | its session; it: own only |
| underreplication/LAYOUT                  | text proto        | auditor, worker: create  | never                     |
| underreplication/disable                 | empty             | operator: create         | operator: any             |
| underreplication/lostBookieRecoveryDelay | ASCII seconds     | auditor, operator: any   | never                     |
| underreplication/<CheckKind>             | proto, ms         | auditor, operator: any   | never                     |
| underreplication/auditorelection         | text proto        | last winner: set(any)    | never                     |
| underreplication/auditorelection/V_<10>  | text proto        | candidate: eph. seq.     | its session; it: any      |

Ids below 2^31 - 1 are `%010d` split 2/4/4, others `%019d` split 3/4/4/4/4; the last part carries the prefix `L`.

| id         | path                           |
|-----------:|--------------------------------|
| 0          | `00/0000/L0000`                |
| 2147483646 | `21/4748/L3646`                |
| 2147483647 | `000/0000/0021/4748/L3647`     |
| 4294967301 | `000/0000/0042/9496/L7301`     |

Bindery's own nodes are under BINDERY_ROOT, never in the ledger tree. All but reader slots are JSON in UTF-8 with sorted
keys. <g>: the ledger id divided by 10000, decimal; <id19>: the id, `%019d`; guarded: with a check of the vote.

| key                             | value           | written by, how                   | removed by, how            |
|---------------------------------|-----------------|-----------------------------------|----------------------------|
| membership/<b>                  | Membership      | operator, bookie b: create, set(v)| operator, bookie b: any    |
| recovery/ledgers/<g>/<id19>     | RecoveryRecord  | auditor (guarded), worker: set(v) | remover of the mark: any   |
| recovery/closings/<g>/<id19>    | ClosingRecord   | closing client: create            | auditor (guarded),         |
|                                 |                 |                                   | deleting client: any       |
| recovery/history/E_<10 digits>  | HistoryEvent    | any process: create sequential    | appender: oldest, any      |
| recovery/cursors/<name>         | object          | auditor (guarded): any            | the same: any              |
| recovery/workers/<name>         | WorkerReport    | worker: ephemeral, any            | its session                |
| recovery/pause                  | Pause           | operator: any                     | operator: any              |
| collection/known                | KnownLedgers    | bookie, restore: create, set(v);  | never                      |
|                                 |                 | operator: set(v)                  |                            |
| audit/verified/<id / 1000>      | Verified, many  | audit: create, set(v)             | audit: delete(v)           |
| audit/last/<level>              | LastAudit       | audit: create, set(v)             | never                      |
| audit/readers/<b>/slot-<n>      | reader, text    | audit's reader: ephemeral         | its session; it: own only  |
| backup/last                     | LastBackup      | backup: create, set(v)            | never                      |

Pulsar's trees: `znode_layout`.
Source: BookKeeper 4.17, HierarchicalLedgerManagerFactory, ZkLedgerUnderreplicationManager.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX, BookieId, LedgerId, validate_bookie_id

from bindery_metadata.layout.znode_path import validate_path

LEDGERS_ROOT_DEFAULT: Final = "/ledgers"
"""Default root of the ledger tree."""
BINDERY_ROOT: Final = "/bindery"
"""Root of Bindery's own nodes."""

LAYOUT_TEXT: Final = b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
"""Content of the ledger tree's LAYOUT node."""

SHORT_ID_END: Final = 2**31 - 1
"""First ledger id with a long path."""

READONLY: Final = "readonly"
"""Name of the child of `available` that lists the read-only bookies."""
ID_PREFIX: Final = "ID-"
"""Prefix of the sequential nodes that generate ledger ids."""
HOB_PREFIX: Final = "HOB-"
"""Prefix of the directories of long ids, named by their upper 32 bits."""
MARK_PREFIX: Final = "urL"
"""Prefix of under-replication marks and of the locks on them."""
VOTE_PREFIX: Final = "V_"
"""Prefix of the votes in the auditor election."""
EVENT_PREFIX: Final = "E_"
"""Prefix of the events in the recovery history."""

RECORDS_PER_DIRECTORY: Final = 10_000
"""Number of consecutive ledger ids whose records share a directory."""

SHORT_DEPTH: Final = 2
"""Number of directories above the metadata node of a short id."""
LONG_DEPTH: Final = 4
"""Number of directories above the metadata node of a long id."""

_SHORT = re.compile(r"(\d{2})/(\d{4})/L(\d{4})")
_LONG = re.compile(r"(\d{3})/(\d{4})/(\d{4})/(\d{4})/L(\d{4})")
_SHORT_TOP = re.compile(r"\d{2}")
_LONG_TOP = re.compile(r"\d{3}")
_MARK = re.compile(r"urL(\d{10,19})")

_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9:._@-]{1,255}")

assert len(LAYOUT_TEXT) == 63
assert len(str(ID_MAX)) == 19
assert SHORT_ID_END < 10**10


class CheckKind(StrEnum):
    """The auditor's periodic checks. The value is the name of the node that stores the time of the last check."""

    LEDGERS = "checkallledgersctime"
    PLACEMENT = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


@dataclass(frozen=True, slots=True)
class LedgersLayout:
    """The paths of one ledger tree. `root`: absolute, not `/`."""

    root: str = LEDGERS_ROOT_DEFAULT

    def __post_init__(self) -> None:
        if validate_path(self.root) == "/":
            raise BadRequest("the ledgers root cannot be the root of the tree", root=self.root)

    @property
    def layout(self) -> str:
        return f"{self.root}/LAYOUT"

    @property
    def instance_id(self) -> str:
        return f"{self.root}/INSTANCEID"

    @property
    def available(self) -> str:
        """Parent of writable bookies; its child `readonly` is not a bookie."""
        return f"{self.root}/available"

    @property
    def available_readonly(self) -> str:
        return f"{self.root}/available/{READONLY}"

    @property
    def cookies(self) -> str:
        return f"{self.root}/cookies"

    @property
    def idgen(self) -> str:
        return f"{self.root}/idgen"

    @property
    def idgen_long(self) -> str:
        return f"{self.root}/idgen-long"

    @property
    def underreplication(self) -> str:
        return f"{self.root}/underreplication"

    @property
    def underreplication_layout(self) -> str:
        return f"{self.underreplication}/LAYOUT"

    @property
    def underreplication_ledgers(self) -> str:
        return f"{self.underreplication}/ledgers"

    @property
    def underreplication_locks(self) -> str:
        return f"{self.underreplication}/locks"

    @property
    def auditor_election(self) -> str:
        return f"{self.underreplication}/auditorelection"

    @property
    def replication_disabled(self) -> str:
        """If this node exists, automatic recovery is disabled."""
        return f"{self.underreplication}/disable"

    @property
    def lost_bookie_delay(self) -> str:
        return f"{self.underreplication}/lostBookieRecoveryDelay"

    def check_time(self, kind: CheckKind) -> str:
        return f"{self.underreplication}/{kind.value}"

    def bookie(self, bookie_id: BookieId, *, read_only: bool) -> str:
        return f"{self.available_readonly if read_only else self.available}/{validate_bookie_id(bookie_id)}"

    def cookie(self, bookie_id: BookieId) -> str:
        return f"{self.cookies}/{validate_bookie_id(bookie_id)}"

    def hob(self, high_bits: int) -> str:
        """Return the directory of the long ids whose upper 32 bits are `high_bits`."""
        return f"{self.idgen_long}/{HOB_PREFIX}{high_bits:010d}"

    def ledger(self, ledger_id: LedgerId) -> str:
        """Path of the ledger's metadata. Raises BadRequest for an id outside 0..2^63-1."""
        if not 0 <= ledger_id <= ID_MAX:
            raise BadRequest("not a ledger id", ledger_id=ledger_id)
        if ledger_id < SHORT_ID_END:
            digits = f"{ledger_id:010d}"
            return f"{self.root}/{digits[:2]}/{digits[2:6]}/L{digits[6:]}"
        digits = f"{ledger_id:019d}"
        return f"{self.root}/{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"

    def ledger_id(self, path: str) -> LedgerId | None:
        """Return the id whose metadata is at `path`; None for any other path of the tree."""
        tail = path.removeprefix(self.root + "/")
        match = _SHORT.fullmatch(tail) or _LONG.fullmatch(tail)
        if match is None or tail == path:
            return None
        value = int("".join(match.groups()))
        return LedgerId(value) if value <= ID_MAX and self.ledger(LedgerId(value)) == path else None

    def mark(self, ledger_id: LedgerId) -> str:
        """Return the path of the under-replication mark: four 16-bit groups in lower-case hex, then the decimal id."""
        groups = "/".join(f"{ledger_id >> shift & 0xFFFF:04x}" for shift in (48, 32, 16, 0))
        return f"{self.underreplication_ledgers}/{groups}/{MARK_PREFIX}{ledger_id:010d}"

    def mark_lock(self, ledger_id: LedgerId) -> str:
        return f"{self.underreplication_locks}/{MARK_PREFIX}{ledger_id:010d}"

    def mark_ledger_id(self, path: str) -> LedgerId | None:
        """Return the ledger of a mark or a lock at `path` (or with that name); None if it is neither."""
        match = _MARK.fullmatch(path.rsplit("/", 1)[-1])
        value = int(match.group(1)) if match else -1
        return LedgerId(value) if 0 <= value <= ID_MAX else None


@dataclass(frozen=True, slots=True)
class BinderyLayout:
    """The paths of Bindery's own nodes. `root`: absolute, not `/`."""

    root: str = BINDERY_ROOT

    def __post_init__(self) -> None:
        if validate_path(self.root) == "/":
            raise BadRequest("bindery's root cannot be the root of the tree", root=self.root)

    @property
    def memberships(self) -> str:
        return f"{self.root}/membership"

    @property
    def recovery_ledgers(self) -> str:
        return f"{self.root}/recovery/ledgers"

    @property
    def recovery_closings(self) -> str:
        return f"{self.root}/recovery/closings"

    @property
    def recovery_history(self) -> str:
        return f"{self.root}/recovery/history"

    @property
    def recovery_cursors(self) -> str:
        return f"{self.root}/recovery/cursors"

    @property
    def recovery_workers(self) -> str:
        return f"{self.root}/recovery/workers"

    @property
    def recovery_pause(self) -> str:
        return f"{self.root}/recovery/pause"

    @property
    def known_ledgers(self) -> str:
        """Node with the ledger ids that this metadata may have known (`known_ledgers`)."""
        return f"{self.root}/collection/known"

    def membership(self, bookie_id: BookieId) -> str:
        return f"{self.memberships}/{validate_bookie_id(bookie_id)}"

    def recovery_record(self, ledger_id: LedgerId) -> str:
        """Return the path of the recovery record. Raises BadRequest for an id outside 0..2^63-1."""
        return f"{self.recovery_ledgers}/{_grouped(ledger_id)}"

    def recovery_closing(self, ledger_id: LedgerId) -> str:
        """Return the path of the closing record. Raises BadRequest for an id outside 0..2^63-1."""
        return f"{self.recovery_closings}/{_grouped(ledger_id)}"

    @property
    def audit_readers(self) -> str:
        return f"{self.root}/audit/readers"

    def audit_reader_slot(self, bookie_id: BookieId, slot: int) -> str:
        """Return the path of a reader slot, numbered from 0. The holder of a slot may read from the bookie."""
        return f"{self.audit_readers}/{validate_bookie_id(bookie_id)}/slot-{slot}"

    def recovery_cursor(self, name: str) -> str:
        return f"{self.recovery_cursors}/{_validate_part(name)}"

    def recovery_worker(self, name: str) -> str:
        return f"{self.recovery_workers}/{_validate_part(name)}"


def _grouped(ledger_id: LedgerId) -> str:
    if not 0 <= ledger_id <= ID_MAX:
        raise BadRequest("not a ledger id", ledger_id=ledger_id)
    return f"{ledger_id // RECORDS_PER_DIRECTORY}/{ledger_id:019d}"


def _validate_part(name: str) -> str:
    if not _PART.fullmatch(name):
        raise BadRequest("not a name that a path can hold", name=name[:300])
    return name


def is_short_top(name: str) -> bool:
    """Return whether a child of the root is the top directory of short ids."""
    return _SHORT_TOP.fullmatch(name) is not None


def is_long_top(name: str) -> bool:
    """Return whether a child of the root is the top directory of long ids."""
    return _LONG_TOP.fullmatch(name) is not None

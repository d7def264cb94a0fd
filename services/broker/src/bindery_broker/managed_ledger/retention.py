"""Decide which ledgers of a topic are no longer needed, and name for each of the others what keeps it. Pure.

A ledger may be deleted if it is closed, every durable cursor has acknowledged all of it, and the retention does not
keep it. Ledgers are deleted from the oldest on; the first one that is kept keeps all later ones.

| code         | the ledger                                                                                   |
|--------------|----------------------------------------------------------------------------------------------|
| open         | is the one to which messages are added                                                       |
| last         | is closed, and the next message starts another one                                           |
| unsettled    | is kept because the position of a subscription is not known now                              |
| subscription | has entries that a subscription has not acknowledged                                         |
| compaction   | has entries that the compaction has not processed                                            |
| deduplication| has entries whose sequence ids are not in the snapshot of the deduplication                  |
| retention    | is kept for a time after its close, or until the topic takes more bytes than are kept        |
| older_kept   | could be deleted if no older ledger were kept                                                |
| deletable    | is deleted in the next round of maintenance                                                  |

Source of the rule: Pulsar's ManagedLedgerImpl.internalTrimLedgers.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from bindery_pulsar.message_id import Position

from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord

DEDUPLICATION_CURSOR: Final = "pulsar.dedup"
"""Cursor of the snapshots of sequence ids. Source: Pulsar's PersistentTopic.DEDUPLICATION_CURSOR_NAME."""
COMPACTION_CURSOR: Final = "__compaction"
"""Cursor of the compaction. Source: Pulsar's Compactor.COMPACTION_SUBSCRIPTION."""
SYSTEM_CURSORS: Final = frozenset({DEDUPLICATION_CURSOR, COMPACTION_CURSOR})
"""Cursors that belong to the broker. They keep ledgers that they need, and count as no subscription otherwise."""


class RetentionRule(NamedTuple):
    """How long ledgers are kept that every cursor has acknowledged. None: without limit, so that the other decides."""

    time_s: float | None
    """Seconds since the close of a ledger."""
    size_max: int | None
    """Payload bytes of the topic above which its oldest ledger is deleted."""


class LedgerVerdict(NamedTuple):
    """Whether a ledger is kept."""

    ledger_id: int
    entries: int
    size: int
    closed_ms: int
    """Milliseconds since 1970; 0: not closed."""
    code: str
    """See the table of the module."""
    detail: str
    """One sentence."""
    until_ms: int | None = None
    """When the retention ends, in milliseconds since 1970; None: nobody knows."""
    subscription: str | None = None
    """The subscription that needs the ledger."""


def trimmable(
    ledgers: LedgerList,
    mark_deletes: Mapping[str, Position],
    *,
    now_ms: int,
    retention: RetentionRule,
) -> int:
    """Return how many of the oldest ledgers may be deleted; never the last one.

    `mark_deletes`: the durable positions of all cursors by name.
    """
    left = ledgers.size
    slowest = _slowest(mark_deletes)
    for index, record in enumerate(list(ledgers)[:-1]):
        if _is_needed(record, slowest) or not _is_released(record, left, retention, now_ms=now_ms):
            return index
        left -= record.size
    return len(ledgers) - 1


def judge(
    ledgers: LedgerList,
    mark_deletes: Mapping[str, Position] | None,
    *,
    now_ms: int,
    retention: RetentionRule,
    unknown: str | None = None,
    is_open: bool = True,
) -> list[LedgerVerdict]:
    """Return the verdict on each ledger, the oldest first. `mark_deletes`: as in `trimmable`; None: not all are known.

    `unknown`: a subscription whose position is not known. `is_open`: whether messages are added to the last ledger.
    """
    count = 0 if mark_deletes is None else trimmable(ledgers, mark_deletes, now_ms=now_ms, retention=retention)
    found: list[LedgerVerdict] = []
    left = ledgers.size
    slowest = _slowest(mark_deletes or {})
    for index, record in enumerate(ledgers.stored):
        until_ms = name = None
        if index == len(ledgers) - 1 and is_open:
            code, detail = "open", "the ledger is open: messages are added to it"
        elif index == len(ledgers) - 1 and not record.entries:
            code, detail = "last", "the ledger is empty and closed; it is deleted when the next message starts another"
        elif mark_deletes is None:
            code, name = "unsettled", unknown
            detail = f"the position of {'a subscription' if unknown is None else f'subscription {unknown}'} is unknown"
        elif index < count:
            code, detail = "deletable", "the ledger is deleted in the next round of maintenance"
        elif slowest is not None and _is_needed(record, slowest):
            name = slowest[0]
            code, detail = _reason_of(name)
        elif not _is_released(record, left, retention, now_ms=now_ms):
            code, detail, until_ms = "retention", *_retained(record, retention)
        elif index == count:
            code, detail = (
                "deletable",
                "the ledger is deleted in the next rounds of maintenance, after another is started",
            )
        else:
            code, detail = "older_kept", "the ledger is deleted after the older ones, and one of them is kept"
        if index < count:
            left -= record.size
        facts = (record.ledger_id, record.entries, record.size, record.closed_ms)
        found.append(LedgerVerdict(*facts, code, detail, until_ms, None if name in SYSTEM_CURSORS else name))
    return found


def _slowest(mark_deletes: Mapping[str, Position]) -> tuple[str, Position] | None:
    """Return the cursor that has acknowledged least."""
    return min(mark_deletes.items(), key=lambda cursor: (cursor[1], cursor[0]), default=None)


def _is_needed(record: LedgerRecord, slowest: tuple[str, Position] | None) -> bool:
    """Return whether a cursor has not acknowledged all of a ledger."""
    return slowest is not None and slowest[1] < Position(record.ledger_id, record.entries - 1)


def _is_released(record: LedgerRecord, size: int, retention: RetentionRule, *, now_ms: int) -> bool:
    """Return whether the retention does not keep the oldest ledger of a topic of `size` bytes."""
    is_old = retention.time_s is not None and now_ms - record.closed_ms >= retention.time_s * 1_000
    return is_old or (retention.size_max is not None and size > retention.size_max)


def _reason_of(cursor: str) -> tuple[str, str]:
    if cursor == COMPACTION_CURSOR:
        return "compaction", "the compaction has not processed all of the ledger"
    if cursor == DEDUPLICATION_CURSOR:
        return "deduplication", "the snapshot of the deduplication does not include all of the ledger"
    return "subscription", f"subscription {cursor} has not acknowledged all of the ledger"


def _retained(record: LedgerRecord, retention: RetentionRule) -> tuple[str, int | None]:
    """Return until when the retention keeps a ledger."""
    size = "" if retention.size_max is None else f"until the topic takes more than {retention.size_max} bytes"
    if retention.time_s is None:
        return f"the retention keeps the ledger {size or 'without limit'}", None
    until_ms = record.closed_ms + round(retention.time_s * 1_000)
    time = f"until {retention.time_s:g} seconds after its close"
    return f"the retention keeps the ledger {time}{size and f', or {size}'}", until_ms

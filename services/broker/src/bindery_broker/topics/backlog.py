"""The backlog of a subscription in entries, bytes and messages.

Entries are known exactly. Their bytes are an estimate, because only the sizes of ledgers are known. The number of
messages in an entry is known only after it is read; reading a backlog to count it would cost as much as delivering it:

| entries that are not acknowledged                                     | messages                                   |
|-----------------------------------------------------------------------|--------------------------------------------|
| none                                                                  | 0, exact                                   |
| batches of which a part is acknowledged                               | those of them that are not, exact          |
| all published since the topic was loaded, each with a single message  | exact                                      |
| anything else, and something was published since the topic was loaded | estimate by the mean size of these batches |
| anything else                                                         | unknown                                    |

Pulsar's `msgBacklog` counts entries, too.
"""

from typing import NamedTuple

from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger
from bindery_broker.statistics.topic import TopicStatistics


class Backlog(NamedTuple):
    entries: int
    """Entries that are not completely acknowledged."""
    size: int
    """Their payload bytes; an estimate."""
    messages: int | None
    """Their messages; None: unknown."""
    is_exact: bool
    """Whether `messages` is exact."""


def backlog_of(cursor: ManagedCursor, ledger: ManagedLedger, statistics: TopicStatistics) -> Backlog:
    entries, size = cursor.backlog
    if not entries:
        return Backlog(0, 0, 0, True)
    partly, remaining = cursor.partly_acked()
    if partly == entries:
        return Backlog(entries, size, remaining, True)
    mean = statistics.messages_per_entry
    if mean is None:
        return Backlog(entries, size, None, False)
    behind = ledger.entries_between(after=cursor.mark_delete, upto=ledger.last_confirmed)
    is_exact = mean == 1 and behind <= statistics.entries
    return Backlog(entries, size, round((entries - partly) * mean) + remaining, is_exact)

"""Remember which messages of a request with an idempotency key are stored. Pure.

A request is known by the digest of its key and of what the key applies to (principal, method, path). A record says
which of its messages have which ids. It is complete once all have one; until then a repeated request stores the rest:
the ids that were given once do not change.

| repeated request                   | answer                                                          |
|------------------------------------|-----------------------------------------------------------------|
| the key is not known               | as the first one                                                |
| other content                      | 422                                                             |
| all of its messages are stored     | the same ids                                                    |
| some of its messages are stored    | their ids are the same; the others are stored now               |

A record is forgotten `window_ms` after its last entry was stored. The number of records of all topics is limited, too:
a new key is refused at the limit, because to forget one early could store messages twice.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_id import MessageId

from bindery_broker.errors import IdempotencyKeyReused

DIGEST_SIZE: Final = 16
"""Bytes of a digest. Two of 2**32 keys have the same with a probability of 2**-64."""
RUNS_PER_UNIT: Final = 4
"""Number of runs of a record that count as much as a further record."""


class RequestKey(NamedTuple):
    """The idempotency key of a request."""

    key: bytes
    """Digest of the key and of what it applies to."""
    content: bytes
    """Digest of the content of the request."""


class Run(NamedTuple):
    """Consecutive entries of one ledger with the same number of messages of a request."""

    first: int
    """Index in the request of the first message."""
    ledger_id: int
    entry_id: int
    """The first entry."""
    entries: int
    per_entry: int
    """Number of messages of each entry; 1: they are no batches."""


class KeyRecord:
    __slots__ = ("content", "count", "runs", "stored", "stored_ms")

    def __init__(self, content: bytes, count: int, stored_ms: int) -> None:
        self.content = content
        self.count = count
        """Number of messages of the request."""
        self.stored = 0
        """Number of messages that are stored."""
        self.stored_ms = stored_ms
        """When the last of its entries was stored; ms since 1970."""
        self.runs: list[Run] = []

    @property
    def units(self) -> int:
        return 1 + len(self.runs) // RUNS_PER_UNIT

    def ids(self, partition: int) -> dict[int, MessageId]:
        """Return the ids of the stored messages, by their index in the request."""
        found: dict[int, MessageId] = {}
        for first, ledger_id, entry_id, entries, per_entry in self.runs:
            for number in range(entries * per_entry):
                in_batch = number % per_entry if per_entry > 1 else -1
                found[first + number] = MessageId(ledger_id, entry_id + number // per_entry, in_batch, partition)
        return found

    def has(self, index: int) -> bool:
        if not self.runs or index >= self.runs[-1].first + self.runs[-1].entries * self.runs[-1].per_entry:
            return False  # as nearly always: entries are stored in the order of the request
        return any(first <= index < first + entries * size for first, _, _, entries, size in self.runs)

    def add(self, run: Run) -> None:
        self.stored += run.per_entry * run.entries
        if self.runs:
            last = self.runs[-1]
            if (
                last.per_entry == run.per_entry
                and last.ledger_id == run.ledger_id
                and last.entry_id + last.entries == run.entry_id
                and last.first + last.entries * last.per_entry == run.first
            ):
                self.runs[-1] = last._replace(entries=last.entries + run.entries)
                return
        self.runs.append(run)
        self.runs.sort()


class KeyBudget:
    """The number of records of all topics of a broker."""

    def __init__(self, units_max: int) -> None:
        self.units_max = units_max
        self.units = 0


class KeyTable:
    """The records of one topic."""

    def __init__(self, budget: KeyBudget, *, window_ms: int) -> None:
        self.window_ms = window_ms
        self._budget = budget
        self._records: dict[bytes, KeyRecord] = {}
        """In the order of `stored_ms`."""

    def __len__(self) -> int:
        return len(self._records)

    def find(self, request: RequestKey, *, now_ms: int) -> KeyRecord | None:
        """Return the record of a request. Raises IdempotencyKeyReused if its content was another one."""
        self.expire(now_ms)
        record = self._records.get(request.key)
        if record is not None and record.content != request.content:
            raise IdempotencyKeyReused("another request with other content has used this idempotency key")
        return record

    def check_room(self, *, now_ms: int) -> None:
        """Raise TooManyRequests if there is no room for another record."""
        self.expire(now_ms)
        if self._budget.units >= self._budget.units_max:
            raise TooManyRequests(
                "the broker remembers the maximum number of idempotency keys; retry later, or use a producer name with "
                "sequence ids",
                keys=self._budget.units,
                window_s=self.window_ms // 1000,
            )

    def stored(self, request: RequestKey, run: Run, *, count: int, now_ms: int) -> None:
        """Entries are durable. They may be given twice."""
        record = self._records.pop(request.key, None)
        if record is not None:
            self._budget.units -= record.units
        if record is None or record.content != request.content:
            record = KeyRecord(request.content, count, now_ms)
        if not record.has(run.first):
            record.add(run)
        record.stored_ms = max(record.stored_ms, now_ms)
        self._records[request.key] = record
        self._budget.units += record.units

    def expire(self, now_ms: int) -> int:
        """Forget the records whose time is over. Returns how many."""
        count = 0
        while self._records:
            key, record = next(iter(self._records.items()))
            if now_ms - record.stored_ms < self.window_ms:
                break
            self._budget.units -= record.units
            del self._records[key]
            count += 1
        return count

    def records(self) -> Iterator[tuple[bytes, KeyRecord]]:
        """Iterate over keys and records, the oldest first."""
        return iter(self._records.items())

    def put(self, key: bytes, record: KeyRecord) -> None:
        """Add a record of a snapshot. Records are given in the order of their times."""
        former = self._records.pop(key, None)
        if former is not None:
            self._budget.units -= former.units
        self._records[key] = record
        self._budget.units += record.units

    def close(self) -> None:
        """Give the room back. The table must not be used after it."""
        for record in self._records.values():
            self._budget.units -= record.units
        self._records.clear()

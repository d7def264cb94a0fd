"""Acknowledge the expired messages of a subscription. Which these are is the decision of `limits.expiry`.

The entries are read from the oldest unacknowledged one on, because whether one is delayed is known only from its
metadata, and a delayed message must not expire before it is due. A run reads a bounded number of bytes.

An entry that is lost, or damaged at all bookies, makes each read that includes it fail. The reads then become smaller
until one of that entry alone fails. It counts as unreadable, and the run goes on with the entry after it. Of a ledger
that is lost as a whole, all entries count as unreadable at once.
"""

from typing import Final

import structlog
from bindery_core.errors import BinderyError, Corrupt, NoSuchLedger, NotThere
from bindery_core.sources import MonotonicClock
from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.item import MessageRef
from bindery_broker.dispatch.portions import State
from bindery_broker.limits.expiry import Expirable, ExpiryScan
from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger
from bindery_broker.statistics.delivery import SubscriptionStatistics
from bindery_broker.subscriptions.acknowledging import Acknowledger
from bindery_broker.subscriptions.decoding import EntryDecoder
from bindery_broker.subscriptions.dispatch_loop import DispatchLoop

READ_ENTRIES_MAX: Final = 1_000
"""Maximum number of entries of one read."""
READ_SIZE_MAX: Final = 2**20
"""Maximum bytes of one read, unless the first entry is larger."""

log = structlog.get_logger()


class Expiring:
    """Expires the messages of one durable subscription."""

    def __init__(
        self,
        cursor: ManagedCursor,
        ledger: ManagedLedger,
        loop: DispatchLoop,
        acknowledger: Acknowledger,
        *,
        decoder: EntryDecoder,
        statistics: SubscriptionStatistics,
        now: MonotonicClock,
    ) -> None:
        self._cursor = cursor
        self._ledger = ledger
        self._loop = loop
        self._acknowledger = acknowledger
        self._decoder = decoder
        self._statistics = statistics
        self._now = now
        self._scan = ExpiryScan()
        self._counts: dict[Position, int] = {}
        """Unacknowledged messages of the entries of the last read."""

    async def run(self, *, ttl_ms: int, now_ms: int, reads_max: int) -> int:
        """Acknowledge what has expired by `now_ms` (ms since 1970). Returns the number of reads, at most `reads_max`.

        Errors are those of reading and acknowledging; a later call continues.
        """
        cursor, ledger, scan = self._cursor, self._ledger, self._scan
        reads, entries_max = 0, READ_ENTRIES_MAX
        seeks = self._loop.resets
        start = scan.begin(ttl_ms=ttl_ms, mark_delete=cursor.mark_delete, seeks=seeks, now_ms=now_ms)
        while start is not None and reads < reads_max:
            start = ledger.clamp(cursor.next_unacked(start))
            if not ledger.contains(start):
                scan.take([], start, now_ms=now_ms)
                break
            reads += 1
            try:
                found = await ledger.read(start, entries_max=entries_max, size_max=READ_SIZE_MAX)
            except (NotThere, Corrupt) as error:
                if entries_max > 1 and not isinstance(error, NoSuchLedger):
                    entries_max //= 2
                    continue
                entries, following = self._lost(start, is_ledger_lost=isinstance(error, NoSuchLedger))
                log.warning(
                    "expiry_cannot_read",
                    cursor=cursor.name,
                    position=str(start),
                    entries=len(entries),
                    error=str(error),
                )
            else:
                entries = [self._look(at, payload) for at, payload in found if not cursor.is_acked(at)]
                following = ledger.next_position(found[-1][0]) if found else start
            entries_max = min(2 * entries_max, READ_ENTRIES_MAX)
            async with self._loop.read_lock:  # a seek waits
                if self._loop.resets != seeks:
                    self._counts.clear()
                    break
                expired, goes_on = scan.take(entries, following, now_ms=now_ms)
                await self._acknowledge(expired.upto, expired.others)
            start = following if goes_on else None
        return reads

    def next_in_s(self, now_ms: int) -> float:
        """Return the seconds until the next unacknowledged message may expire, as far as it is known; 0: now."""
        return max(0, self._scan.next_due_ms - now_ms) / 1_000

    def _look(self, position: Position, payload: bytes) -> Expirable:
        try:
            entry = self._decoder.open(payload)
        except BinderyError:
            return self._unreadable(position)
        remaining = self._cursor.remaining(position)
        self._counts[position] = entry.count if remaining is None else remaining.bit_count()
        return Expirable(position, entry.publish_time_ms, entry.deliver_at_ms, self._is_in_use(position))

    def _lost(self, start: Position, *, is_ledger_lost: bool) -> tuple[list[Expirable], Position]:
        """Return the entry, or the unacknowledged ones of its ledger from it on, and the position after them."""
        positions = [start]
        following = self._ledger.next_position(start)
        while is_ledger_lost and following.ledger_id == start.ledger_id and self._ledger.contains(following):
            if not self._cursor.is_acked(following):
                positions.append(following)
            following = self._ledger.next_position(following)
        return [self._unreadable(position) for position in positions], following

    def _unreadable(self, position: Position) -> Expirable:
        """Return an entry with an unknown publish time. It counts as one message."""
        self._counts[position] = 1
        record = self._ledger.record(position.ledger_id)
        closed_ms = 0 if record is None else record.closed_ms
        return Expirable(position, None, 0, self._is_in_use(position), closed_ms)

    def _is_in_use(self, position: Position) -> bool:
        """Return whether a consumer has messages of the entry: an acknowledgement of it alone would release their keys.

        Messages that are only read ahead are not in use. They may stay so for long if no consumer is connected.
        """
        dispatcher = self._loop.dispatcher
        bits = dispatcher.known_bits(position)
        while bits:
            portion = dispatcher.find(MessageRef(position, bits))
            if portion is None:
                return False
            if portion.state in (State.LEASED, State.ACKING):
                return True
            bits &= ~portion.bits
        return False

    async def _acknowledge(self, upto: Position | None, others: list[Position]) -> None:
        cursor = self._cursor
        count = 0
        try:
            if upto is not None:
                count += sum(number for at, number in self._counts.items() if at <= upto and not cursor.is_acked(at))
                await cursor.ack_upto_entry_before(self._ledger.next_position(upto))
                self._acknowledger.passed()
            left = [position for position in others if not cursor.is_acked(position)]
            if left:
                await self._acknowledger.ack(left, [])
                count += sum(self._counts.get(position, 1) for position in left)
        finally:
            self._counts.clear()
        self._statistics.expire(count, now=self._now())

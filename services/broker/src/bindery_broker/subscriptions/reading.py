"""Read messages of a subscription: decode entries, apply its tags, and resolve message ids to what a cursor takes.

Batch sizes are remembered from the first decoding of an entry until all of it is acknowledged.
"""

from collections.abc import Iterable, Sequence

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import Message, decode_entry
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.item import NOT_IN_BATCH, Item, MessageKey
from bindery_broker.errors import UnknownMessages
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger

MESSAGE_OVERHEAD = 200
"""Bytes that a message counts in addition to its payload."""
READ_BYTES_MAX = 4 * 2**20
"""Maximum bytes of one read from the managed ledger."""
UNKNOWN_SHOWN_MAX = 20
"""Maximum number of unknown message ids listed in an error."""
TAG_VERSION = "1"
"""Value of the subscription properties whose keys are tags (the convention of TDMQ's clients)."""


class MessageReader:
    """Of one subscription."""

    def __init__(self, cursor: ManagedCursor, ledger: ManagedLedger, *, partition: int) -> None:
        self.tags = frozenset(name for name, value in cursor.properties.items() if value == TAG_VERSION)
        """Empty, or with `*` among them: no message is filtered."""
        self.stuck: str | None = None
        """Why the entry at the read position cannot be decoded; None: it can."""
        self.batch_sizes: dict[Position, int] = {}
        self._cursor = cursor
        self._ledger = ledger
        self._partition = partition
        self._wanted = self.tags if "*" not in self.tags else frozenset()

    async def load(self, keys: Iterable[MessageKey]) -> list[Item[Message]]:
        """Read again those of `keys` that still exist and are unacknowledged, in order."""
        wanted: dict[Position, list[int]] = {}
        for ledger_id, entry_id, batch_index in sorted(keys):
            wanted.setdefault(Position(ledger_id, entry_id), []).append(batch_index)
        items: list[Item[Message]] = []
        for first, count in _runs(list(wanted)):
            entries = await self._read_run(first, count)
            for position, payload in entries:
                if self._cursor.is_acked(position):
                    continue
                decoded = self.decode(position, payload, self._cursor.remaining(position), stop=False)
                indexes = set(wanted[position])
                items += [item for item in decoded or () if item.key[2] in indexes]
        return items

    async def _read_run(self, first: Position, count: int) -> list[tuple[Position, bytes]]:
        found: list[tuple[Position, bytes]] = []
        position, end = first, Position(first.ledger_id, first.entry_id + count)
        while position < end:
            entries = await self._ledger.read(
                position, entries_max=end.entry_id - position.entry_id, size_max=READ_BYTES_MAX
            )
            entries = [entry for entry in entries if position <= entry[0] < end]
            if not entries:  # trimmed away
                break
            found += entries
            last = entries[-1][0]
            position = Position(last.ledger_id, last.entry_id + 1)
        return found

    def decode(
        self, position: Position, payload: bytes, remaining: int | None, *, stop: bool
    ) -> list[Item[Message]] | None:
        """Return the unacknowledged messages of an entry. If it cannot be decoded: None if `stop`, else raise."""
        try:
            messages = decode_entry(payload)
        except BinderyError as error:
            if stop:
                return None
            message_id = MessageId.of(position, partition=self._partition)
            self.stuck = f"message {message_id} cannot be decoded: {error}"
            error.facts.setdefault("message_id", str(message_id))
            error.facts.setdefault("hint", "acknowledge this message id to go past it")
            raise
        self.stuck = None
        ledger_id, entry_id = position
        if messages and messages[0].batch_index != NOT_IN_BATCH:
            self.batch_sizes[position] = messages[0].batch_size
            if remaining is not None:
                messages = [message for message in messages if remaining >> message.batch_index & 1]
        return [
            Item((ledger_id, entry_id, message.batch_index), len(message.payload) + MESSAGE_OVERHEAD, message)
            for message in messages
        ]

    def passed(self, items: list[Item[Message]]) -> list[Item[Message]]:
        """Return the items that match the tags of the subscription. A message without tags always matches."""
        wanted = self._wanted
        if not wanted:
            return items
        return [item for item in items if not (tags := item.message.tags) or not tags.isdisjoint(wanted)]

    async def resolve(self, ids: Sequence[MessageId]) -> tuple[list[Position], list[BatchAck]]:
        """Return `ids` as a cursor takes them. Raises UnknownMessages with those that name no message of this topic."""
        unknown = [message_id for message_id in ids if not self._may_exist(message_id)]
        indexed: dict[Position, set[int]] = {}
        positions: dict[Position, None] = {}
        for message_id in ids:
            if message_id.batch_index == NOT_IN_BATCH:
                positions[message_id.position] = None
            else:
                indexed.setdefault(message_id.position, set()).add(message_id.batch_index)
        sizes: dict[Position, int | None] = {}
        """Kept here: `batch_sizes` may be cleared while the next one is read."""
        if not unknown:
            for position, indexes in indexed.items():
                size = sizes[position] = await self._batch_size(position)
                bad = [index for index in indexes if size is not None and index >= size]
                unknown += [MessageId.of(position, batch_index=index, partition=self._partition) for index in bad]
        if unknown:
            raise UnknownMessages(
                f"{len(unknown)} of {len(ids)} message ids name no message of this topic; nothing was done",
                message_ids=[str(message_id) for message_id in unknown[:UNKNOWN_SHOWN_MAX]],
            )
        batches = []
        for position, indexes in indexed.items():
            size = sizes[position]
            if size is not None and position not in positions:
                batches.append(BatchAck(position, size, sorted(indexes)))
        return list(positions), batches

    def _may_exist(self, message_id: MessageId) -> bool:
        if message_id.partition not in (-1, self._partition):
            return False
        position = message_id.position
        if self._ledger.contains(position):
            return True
        # Trimmed entries were acknowledged once: a late repetition is no error.
        return position < self._ledger.first_position

    async def _batch_size(self, position: Position) -> int | None:
        """Messages in the batch at `position`, 0 when it is no batch; None when it is gone."""
        size = self.batch_sizes.get(position)
        if size is not None:
            return size
        entries = await self._ledger.read(position, entries_max=1, size_max=1)
        if not entries or entries[0][0] != position:
            return None
        messages = decode_entry(entries[0][1])
        if not messages or messages[0].batch_index == NOT_IN_BATCH:
            return 0
        self.batch_sizes[position] = messages[0].batch_size
        return messages[0].batch_size

    def forget_acked(self) -> None:
        """Forget the sizes of batches that are wholly acknowledged."""
        for position in [position for position in self.batch_sizes if self._cursor.is_acked(position)]:
            del self.batch_sizes[position]


def key_of(message_id: MessageId) -> MessageKey:
    return (message_id.ledger_id, message_id.entry_id, message_id.batch_index)


def _runs(positions: Sequence[Position]) -> list[tuple[Position, int]]:
    """(first, count) of neighbours in `positions` (ascending)."""
    runs: list[tuple[Position, int]] = []
    for position in positions:
        if runs:
            first, count = runs[-1]
            if position == (first.ledger_id, first.entry_id + count):
                runs[-1] = (first, count + 1)
                continue
        runs.append((position, 1))
    return runs

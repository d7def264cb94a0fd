"""Read the messages of a subscription: decode entries, apply the tag filter, and offer the result to a dispatcher.

The sizes of batches are remembered from the first decoding of an entry until the entry is completely acknowledged.
"""

from collections.abc import Iterable, Sequence

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import Message, decode_entry
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.item import NOT_IN_BATCH, Item, MessageKey
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger
from bindery_broker.subscriptions.consumer import TagFilter

MESSAGE_OVERHEAD = 200
"""Bytes that are counted for each message in addition to its payload."""
READ_BYTES_MAX = 4 * 2**20
"""Maximum bytes of one read from the managed ledger."""
READ_ENTRIES_MAX = 100
"""Maximum number of entries of one read from the managed ledger."""


class BatchSizes:
    """The number of messages in each batch that is not completely acknowledged."""

    def __init__(self, cursor: ManagedCursor, ledger: ManagedLedger) -> None:
        self._cursor = cursor
        self._ledger = ledger
        self._sizes: dict[Position, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, position: Position) -> int:
        return self._sizes[position]

    def remember(self, position: Position, messages: Sequence[Message]) -> int:
        """Remember the size of the batch at `position`. Returns its number of messages; 0: the entry is no batch."""
        if not messages or messages[0].batch_index == NOT_IN_BATCH:
            return 0
        self._sizes[position] = messages[0].batch_size
        return messages[0].batch_size

    async def look_up(self, position: Position) -> int | None:
        """Return the number of messages in the batch at `position`; 0: it is no batch; None: it does not exist."""
        size = self._sizes.get(position)
        if size is not None:
            return size
        entries = await self._ledger.read(position, entries_max=1, size_max=1)
        if not entries or entries[0][0] != position:
            return None
        return self.remember(position, decode_entry(entries[0][1]))

    def forget(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self._sizes.pop(position, None)

    def forget_acked(self) -> None:
        """Forget the sizes of batches that are completely acknowledged."""
        self.forget([position for position in self._sizes if self._cursor.is_acked(position)])

    def clear(self) -> None:
        self._sizes.clear()


class MessageReader:
    """Reads for one subscription. At most one of its reads is in progress; the dispatch loop ensures that."""

    def __init__(self, cursor: ManagedCursor, ledger: ManagedLedger, *, partition: int) -> None:
        self.filter = TagFilter(cursor.properties)
        self.batch_sizes = BatchSizes(cursor, ledger)
        self.stuck: str | None = None
        """Reason why the entry at the read position cannot be decoded; None: it can be decoded."""
        self._cursor = cursor
        self._ledger = ledger
        self._partition = partition
        self._position = cursor.mark_delete
        self.rewind()

    @property
    def position(self) -> Position:
        """The next entry to read for the first time."""
        return self._position

    def rewind(self) -> None:
        """Continue with the entry after the cursor's mark-delete position."""
        self._position = self._ledger.next_position(self._cursor.mark_delete)

    def step_back(self, key: MessageKey) -> None:
        """Continue with the entry of `key` at the latest."""
        self._position = min(self._position, Position(key[0], key[1]))

    async def read_on(self, dispatcher: Dispatcher[Message], room: int, *, size_max: int) -> bool:
        """Offer the next messages. Returns whether anything was read.

        Messages that do not match the filter are acknowledged. If the dispatcher is reset meanwhile, the result is
        dropped. If an entry cannot be decoded, the read stops before it; a read that begins with such an entry raises
        the error.
        """
        if self._position > self._ledger.last_confirmed:
            return False
        generation = dispatcher.generation
        read = await self._cursor.read_unacked(
            self._position, entries_max=min(room, READ_ENTRIES_MAX), size_max=size_max
        )
        if generation != dispatcher.generation:
            return True
        consumed: list[Position] = []
        parts: list[BatchAck] = []
        start, end = self._position, read.next_position
        for index, (position, payload, remaining) in enumerate(read.entries):
            items = self._decode(position, payload, remaining, stop=index > 0)
            if items is None:
                end = position
                break
            matching = self.filter.matching(items)
            if matching:
                dispatcher.offer(matching, generation=generation)
            if not matching:  # completely filtered, or a marker without messages
                consumed.append(position)
            elif len(matching) < len(items):
                offered = {item.key for item in matching}
                indexes = [item.key[2] for item in items if item.key not in offered]
                parts.append(BatchAck(position, self.batch_sizes[position], indexes))
        self._position = end
        if consumed or parts:
            self.batch_sizes.forget(await self._cursor.ack_many(consumed, batches=parts))
        return bool(read.entries) or start != end

    async def read_again(self, dispatcher: Dispatcher[Message], keys: Sequence[MessageKey]) -> None:
        """Offer the messages that the dispatcher's `replay` returned."""
        generation = dispatcher.generation
        try:
            items = await self.load(keys)
        except BaseException:
            dispatcher.give_back(keys)
            raise
        dispatcher.offer_again(items, generation=generation)
        missing = set(keys).difference(item.key for item in items)
        if missing and generation == dispatcher.generation:  # acknowledged or trimmed since
            dispatcher.finish_ack(dispatcher.begin_ack(missing))

    async def load(self, keys: Iterable[MessageKey]) -> list[Item[Message]]:
        """Return the messages of those `keys` that still exist and are not acknowledged, in order."""
        indexes_of: dict[Position, set[int]] = {}
        for ledger_id, entry_id, batch_index in sorted(keys):
            indexes_of.setdefault(Position(ledger_id, entry_id), set()).add(batch_index)
        items: list[Item[Message]] = []
        for first, count in _runs(list(indexes_of)):
            for position, payload in await self._read_run(first, count):
                if self._cursor.is_acked(position):
                    continue
                decoded = self._decode(position, payload, self._cursor.remaining(position), stop=False)
                items += [item for item in decoded or () if item.key[2] in indexes_of[position]]
        return items

    async def _read_run(self, first: Position, count: int) -> list[tuple[Position, bytes]]:
        found: list[tuple[Position, bytes]] = []
        position, end = first, Position(first.ledger_id, first.entry_id + count)
        while position < end:
            entries = await self._ledger.read(
                position, entries_max=end.entry_id - position.entry_id, size_max=READ_BYTES_MAX
            )
            entries = [entry for entry in entries if position <= entry[0] < end]
            if not entries:  # trimmed
                break
            found += entries
            last = entries[-1][0]
            position = Position(last.ledger_id, last.entry_id + 1)
        return found

    def _decode(
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
        if self.batch_sizes.remember(position, messages) and remaining is not None:
            messages = [message for message in messages if remaining >> message.batch_index & 1]
        return [
            Item((ledger_id, entry_id, message.batch_index), len(message.payload) + MESSAGE_OVERHEAD, message)
            for message in messages
        ]


def _runs(positions: Sequence[Position]) -> list[tuple[Position, int]]:
    """Return (first, count) of each run of consecutive entries in `positions` (ascending)."""
    runs: list[tuple[Position, int]] = []
    for position in positions:
        if runs:
            first, count = runs[-1]
            if position == (first.ledger_id, first.entry_id + count):
                runs[-1] = (first, count + 1)
                continue
        runs.append((position, 1))
    return runs

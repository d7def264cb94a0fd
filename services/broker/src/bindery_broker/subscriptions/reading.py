"""Read the messages of a subscription: decode entries, apply the tag filter, and offer the result to a dispatcher.

The sizes of batches are remembered from the first decoding of an entry until the entry is completely acknowledged.
"""

from collections.abc import Iterable, Sequence

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import BATCH_COUNT_MAX, CorruptMessage, Message, PackedEntry, read_head
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.item import NOT_IN_BATCH, Item, MessageKey
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger
from bindery_broker.subscriptions.consumer import TagFilter
from bindery_broker.subscriptions.decoding import DECODED_BYTES_MAX, EntryDecoder, RoomNeeded

MESSAGE_OVERHEAD = 400
"""Bytes that are counted for each message in addition to its payload and metadata: what its objects take in memory."""
READ_BYTES_MAX = 4 * 2**20
"""Maximum bytes of one read from the managed ledger, and of its messages once decoded. The first entry is read
whatever its size; a read that reaches the limit leaves the rest to the next one."""
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
        head = read_head(entries[0][1])
        if not head.is_batch:
            return 0
        if not 0 < head.messages_count <= BATCH_COUNT_MAX:
            raise CorruptMessage("impossible number of messages in a batch", count=head.messages_count)
        self._sizes[position] = head.messages_count
        return head.messages_count

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

    def __init__(self, cursor: ManagedCursor, ledger: ManagedLedger, *, partition: int, decoder: EntryDecoder) -> None:
        self.filter = TagFilter(cursor.properties)
        self.batch_sizes = BatchSizes(cursor, ledger)
        self.stuck: str | None = None
        """Reason why the entry at the read position cannot be decoded; None: it can be decoded."""
        self._cursor = cursor
        self._ledger = ledger
        self._partition = partition
        self._decoder = decoder
        self._position = cursor.mark_delete
        self.rewind()

    @property
    def position(self) -> Position:
        """The next entry to read for the first time."""
        return self._position

    @property
    def has_next(self) -> bool:
        """Whether there is an entry to read for the first time."""
        return self._position <= self._ledger.last_confirmed

    def rewind(self) -> None:
        """Continue with the entry after the cursor's mark-delete position."""
        self._position = self._ledger.next_position(self._cursor.mark_delete)

    def step_back(self, key: MessageKey) -> None:
        """Continue with the entry of `key` at the latest."""
        self._position = min(self._position, Position(key[0], key[1]))

    async def read_on(
        self, dispatcher: Dispatcher[Message], room: int, *, size_max: int, decoded_max: int = DECODED_BYTES_MAX
    ) -> bool:
        """Offer the next messages. Returns whether anything was read.

        `room`: maximum number of entries. `decoded_max`: the bytes for which the caller has room, at least
        READ_BYTES_MAX. Messages that do not match the filter are acknowledged. If the dispatcher is reset meanwhile,
        the result is dropped. If an entry cannot be decoded, or not in the room that is left, the read stops before it;
        a read that begins with such an entry raises the error, or RoomNeeded.
        """
        if not self.has_next:
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
        decoded_size = 0
        has_waited = False
        for index, (position, payload, _) in enumerate(read.entries):
            if decoded_size >= READ_BYTES_MAX:
                end = position
                break
            items = self._decode(position, payload, stop=index > 0)
            if isinstance(items, PackedEntry):
                items = await self._decode_large(position, items, stop=index > 0, room=decoded_max - decoded_size)
                has_waited = True
                if generation != dispatcher.generation:
                    return True
            if items is None:
                end = position
                break
            for item in items:
                decoded_size += item.size
            if has_waited and self._cursor.is_acked(position):  # meanwhile
                continue
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

    async def read_again(
        self,
        dispatcher: Dispatcher[Message],
        keys: Sequence[MessageKey],
        *,
        size_max: int,
        decoded_max: int = DECODED_BYTES_MAX,
    ) -> None:
        """Offer the messages that the dispatcher's `replay` returned, at least one and about `size_max` bytes.

        The others are given back to the dispatcher; all of them if an error is raised. `decoded_max`: as in `load`.
        """
        generation = dispatcher.generation
        try:
            items, rest = await self.load(keys, size_max=size_max, decoded_max=decoded_max)
        except BaseException:
            dispatcher.give_back(keys)
            raise
        dispatcher.offer_again(items, generation=generation)
        if rest and generation == dispatcher.generation:
            dispatcher.give_back(rest)
        missing = set(keys).difference(rest, (item.key for item in items))
        if missing and generation == dispatcher.generation:  # acknowledged or trimmed since
            dispatcher.finish_ack(dispatcher.begin_ack(missing))

    async def load(
        self, keys: Iterable[MessageKey], *, size_max: int, decoded_max: int = DECODED_BYTES_MAX
    ) -> tuple[list[Item[Message]], list[MessageKey]]:
        """Return the messages of those `keys` that still exist and are not acknowledged, in order.

        Reads at least one entry, and no further one once the result has `size_max` bytes; the keys of entries that were
        not read are the second part of the result. Raises RoomNeeded if an entry takes more than `decoded_max` bytes.
        """
        indexes_of: dict[Position, set[int]] = {}
        for ledger_id, entry_id, batch_index in sorted(keys):
            indexes_of.setdefault(Position(ledger_id, entry_id), set()).add(batch_index)
        items: list[Item[Message]] = []
        room = size_max
        for first, count in _runs(list(indexes_of)):
            position, end = first, Position(first.ledger_id, first.entry_id + count)
            while position < end:
                if room <= 0:
                    rest = [(*at, index) for at, indexes in indexes_of.items() if at >= position for index in indexes]
                    return items, rest
                entries = await self._ledger.read(position, entries_max=end.entry_id - position.entry_id, size_max=room)
                entries = [entry for entry in entries if position <= entry[0] < end]
                if not entries:  # trimmed
                    break
                for at, payload in entries:
                    if room <= 0:
                        break
                    position = Position(at.ledger_id, at.entry_id + 1)
                    if self._cursor.is_acked(at):
                        continue
                    decoded = self._decode(at, payload, stop=False)
                    if isinstance(decoded, PackedEntry):
                        decoded = await self._decode_large(at, decoded, stop=False, room=decoded_max)
                    wanted = [item for item in decoded or () if item.key[2] in indexes_of[at]]
                    room -= sum(item.size for item in wanted)
                    items += wanted
        return items, []

    def _decode(self, position: Position, payload: bytes, *, stop: bool) -> list[Item[Message]] | PackedEntry | None:
        """Return the unacknowledged messages of an entry, or the entry for `_decode_large`.

        If it cannot be decoded: None if `stop`, else raise.
        """
        try:
            messages = self._decoder.decode_small(payload)
        except BinderyError as error:
            if not stop:
                self._explain(position, error)
                raise
            return None
        return messages if isinstance(messages, PackedEntry) else self._items(position, messages)

    async def _decode_large(
        self, position: Position, entry: PackedEntry, *, stop: bool, room: int
    ) -> list[Item[Message]] | None:
        """Return what `_decode` returns for a small entry. Raises RoomNeeded, unless `stop`."""
        try:
            messages = await self._decoder.decode_large(entry, room=room)
        except RoomNeeded:
            if not stop:
                raise
            return None
        except BinderyError as error:
            if not stop:
                self._explain(position, error)
                raise
            return None
        return self._items(position, messages)

    def _explain(self, position: Position, error: BinderyError) -> None:
        """Record why the subscription does not continue, and tell the client how to go on."""
        message_id = MessageId.of(position, partition=self._partition)
        self.stuck = f"message {message_id} cannot be decoded: {error}"
        error.facts.setdefault("message_id", str(message_id))
        error.facts.setdefault("hint", "acknowledge this message id to go past it")

    def _items(self, position: Position, messages: list[Message]) -> list[Item[Message]]:
        """Return the messages that are not acknowledged now."""
        self.stuck = None
        ledger_id, entry_id = position
        if (
            self.batch_sizes.remember(position, messages)
            and (remaining := self._cursor.remaining(position)) is not None
        ):
            messages = [message for message in messages if remaining >> message.batch_index & 1]
        return [
            Item((ledger_id, entry_id, message.batch_index), message.size + MESSAGE_OVERHEAD, message)
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

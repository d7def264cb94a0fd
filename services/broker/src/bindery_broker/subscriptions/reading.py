"""Read the messages of a subscription: decode entries, apply the filter, and offer the result to a dispatcher.

The read position is a message: a batch of very many messages is read in parts, and a dispatcher that puts messages
down (`step_back`) gets exactly those again. The sizes of batches are remembered from the first decoding of an entry
until the entry is completely acknowledged.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import structlog
from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import BATCH_COUNT_MAX, CorruptMessage, Message, PackedEntry, read_head
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.delays import DelayIndex
from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.item import NOT_IN_BATCH, SINGLE, Delivery, Item, MessageRef, bits_of, indexes_of, lowest
from bindery_broker.errors import NoSuchMessage
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger
from bindery_broker.subscriptions.consumer import MessageFilter
from bindery_broker.subscriptions.decoding import EntryDecoder, RoomNeeded

log = structlog.get_logger()

MESSAGE_OVERHEAD = 400
"""Bytes that are counted for each message in addition to its payload and metadata: what its objects take in memory."""
READ_BYTES_MAX = 4 * 2**20
"""Maximum bytes that the messages of one read take once they are decoded. The first entry is decoded whatever its size;
a read that reaches the limit leaves the rest to the next one."""
STORED_BYTES_MAX = 2**20
"""Maximum bytes of the entries of one read from the managed ledger, unless the first one is larger. Entries that arrive
from bookies take a multiple of their size until they are decoded, and many readers may read at the same time."""
READ_ENTRIES_MAX = 100
"""Maximum number of entries of one read from the managed ledger that reads on."""
REPLAY_ENTRIES_MAX = 500
"""Maximum number of entries that are read again at a time, which takes about 10 ms of processor time. Those of delayed
messages may be anywhere in the topic; bookies get one request for all of them."""
READ_MESSAGES_MAX = 2_000
"""Maximum number of messages of one read: twice the usual size of batches. A larger batch is read in parts; before
each, its messages up to that part are skipped, which takes a microsecond each."""


SKIP_WINDOW: Final = 10_000
"""Maximum number of entries that are looked up in the index of delayed messages at a time. Each may take a few
microseconds."""
SKIP_WINDOW_MIN: Final = 128
"""Number of entries that are looked up first: most reads need no more."""
Messages = Sequence[Message]
"""Decoded messages of one entry: the body of an item."""
ONE: Final = range(1)
"""The part of an entry that is not a batch."""


class BatchSizes:
    """The number of messages in each batch that is not completely acknowledged."""

    def __init__(self, cursor: ManagedCursor, ledger: ManagedLedger) -> None:
        self._cursor = cursor
        self._ledger = ledger
        self._sizes: dict[Position, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, position: object) -> bool:
        return position in self._sizes

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
        if not self._cursor.is_acked(position):  # nothing would forget the size
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

    def __init__(
        self,
        cursor: ManagedCursor,
        ledger: ManagedLedger,
        *,
        partition: int,
        decoder: EntryDecoder,
        message_filter: MessageFilter | None = None,
    ) -> None:
        """`message_filter`: what is delivered; None: the messages with the tags of the subscription."""
        self.filter = MessageFilter(cursor.properties) if message_filter is None else message_filter
        self.batch_sizes = BatchSizes(cursor, ledger)
        self.stuck: str | None = None
        """Reason why the entry at the read position cannot be decoded; None: it can be decoded."""
        self.delays = DelayIndex()
        """Messages that are read and not due."""
        self._delays_to_restore = sorted(cursor.blobs)
        self._cursor = cursor
        self._ledger = ledger
        self._partition = partition
        self._decoder = decoder
        self._position = cursor.mark_delete
        self._index = 0
        """Index in the batch at `_position` of the next message to read. Those before it were offered."""
        self.rewind()

    @property
    def cursor_name(self) -> str:
        return self._cursor.name

    @property
    def position(self) -> Position:
        """The next entry to read, or of which a part was not read yet."""
        return self._position

    @property
    def place(self) -> tuple[Position, int]:
        """`position`, and the index in its batch of the next message to read."""
        return self._position, self._index

    @property
    def has_next(self) -> bool:
        """Whether there is an entry to read for the first time."""
        return self._position <= self._ledger.last_confirmed

    def rewind(self) -> None:
        """Continue with the entry after the cursor's mark-delete position."""
        self._position, self._index = self._ledger.next_position(self._cursor.mark_delete), 0

    def step_back(self, first: MessageRef) -> None:
        """Continue with the lowest message of `first` at the latest. No read may be in progress."""
        to = (first.position, lowest(first.bits))
        self._position, self._index = min((self._position, self._index), to)

    def ids_of(self, ref: MessageRef) -> list[MessageId]:
        """Return the ids of messages that were delivered."""
        indexes = indexes_of(ref.bits) if ref.position in self.batch_sizes else (NOT_IN_BATCH,)
        return [MessageId.of(ref.position, batch_index=index, partition=self._partition) for index in indexes]

    @property
    def has_stored_delays(self) -> bool:
        return bool(self._cursor.blobs)

    @property
    def has_delays_to_restore(self) -> bool:
        """Whether stored delays are not loaded yet: nothing was read since the topic was loaded."""
        return bool(self._delays_to_restore)

    async def restore_delays(self) -> None:
        """Load the index of delayed messages from the cursor, once; other tasks run after each blob (10 ms)."""
        while self._delays_to_restore:
            name = self._delays_to_restore.pop()
            blob = self._cursor.blobs.get(name)
            if blob is None:
                continue
            found = self.delays.restore({name: blob}, self._cursor.is_acked, self._cursor.has_acked)
            for damaged, error in found.items():
                log.error("delayed_index_damaged", cursor=self._cursor.name, blob=damaged, error=str(error))
            await asyncio.sleep(0)

    def clear_delays(self) -> None:
        """The cursor was moved, or may have been: forget the index of delayed messages."""
        self.delays.clear(self._cursor.blobs)
        self._delays_to_restore.clear()

    async def store_delays(self) -> None:
        """Store what has changed in the index of delayed messages. Errors as `ManagedCursor.put_blobs`."""
        changes = self.delays.changes(self._cursor.blobs)
        if changes.put or changes.remove:
            await self._cursor.put_blobs(changes.put, changes.remove)

    async def read_on(
        self,
        dispatcher: Dispatcher[Messages],
        room: int,
        *,
        size_max: int,
        decoded_max: int,
        messages_max: int,
        now_ms: int,
    ) -> bool:
        """Offer the next messages. Returns whether anything was read.

        `room`: maximum number of entries. `decoded_max`: the bytes for which the caller has room, at least
        READ_BYTES_MAX. `messages_max`: maximum number of messages to decode. `now_ms`: ms since 1970; entries to be
        delivered later are added to `delays`, if the dispatcher keeps delays. Messages that do not match the filter are
        acknowledged, except for foreign ones that nothing else keeps. If the dispatcher is reset meanwhile, the result
        is dropped. If an entry cannot be decoded, or not in the room that is left, the read stops before it; a read
        that begins with such an entry raises the error, or RoomNeeded.
        """
        generation = dispatcher.generation
        if dispatcher.keeps_delays and self._position <= self.delays.covered_upto:
            room = min(room, await self._skip_delayed(dispatcher))
            if generation != dispatcher.generation:
                return True
        if not self.has_next:
            return False
        start = (self._position, self._index)
        read = await self._cursor.read_unacked(
            self._position, entries_max=min(room, READ_ENTRIES_MAX), size_max=size_max
        )
        if generation != dispatcher.generation:
            return True
        consumed: list[Position] = []
        parts: list[BatchAck] = []
        end = (read.next_position, 0)
        decoded_size = 0
        has_waited = False
        for number, (position, payload, _) in enumerate(read.entries):
            first = start[1] if position == start[0] else 0
            if number > 0:
                self._position, self._index = position, first  # the others were offered, even if this is cancelled
            entry = self._open(position, payload, stop=number > 0) if decoded_size < READ_BYTES_MAX else None
            if entry is None or (number > 0 and entry.count > messages_max):
                end = (position, first)
                break
            if has_waited and self._cursor.is_acked(position):  # meanwhile
                continue
            is_delayed = dispatcher.keeps_delays and entry.deliver_at_ms > now_ms
            if is_delayed and not self.filter.is_active:  # its body is not needed before its time
                if not self.delays.add(position, entry.deliver_at_ms):
                    end = (position, first)
                    break
                continue
            if entry.is_batch:
                first = self._next_unacked(position, first)
                if first >= entry.count > 0:
                    continue
            part = range(first, min(first + messages_max, entry.count)) if entry.count > 1 else ONE
            if entry.is_small:
                messages = self._decode_small(position, entry, part, stop=number > 0)
            else:
                messages = await self._decode(position, entry, part, stop=number > 0, room=decoded_max - decoded_size)
                has_waited = True
                if generation != dispatcher.generation:
                    return True
            if messages is None:
                end = (position, first)
                break
            messages_max -= len(part)
            for message in messages:
                decoded_size += message.size + MESSAGE_OVERHEAD
            waits = False
            if not (has_waited and self._cursor.is_acked(position)):
                matching, others = self.filter.split(messages)
                if matching and is_delayed:
                    if not self.delays.add(position, entry.deliver_at_ms):
                        end = (position, first)
                        break
                    waits = True
                elif matching:
                    dispatcher.offer([_item(dispatcher, position, entry, matching)], generation=generation)
                if len(matching) + len(others) < len(messages):  # some stay as they are
                    if others:
                        parts.append(BatchAck(position, entry.count, [one.batch_index for one in others]))
                elif not matching and len(part) == entry.count:  # completely filtered, or a marker without messages
                    consumed.append(position)
                elif not matching:
                    parts.append(BatchAck(position, entry.count, part))
                elif others:
                    parts.append(BatchAck(position, entry.count, [one.batch_index for one in others]))
            if part.stop < entry.count and not waits:
                end = (position, part.stop)
                break
        self._position, self._index = end
        self._cursor.reading_from(self._position)
        if consumed or parts:
            self.batch_sizes.forget(await self._cursor.ack_many(consumed, batches=parts))
        return start != end

    async def _skip_delayed(self, dispatcher: Dispatcher[Messages]) -> int:
        """Move the read position over the messages in `delays`. Returns how many entries can be read from there.

        Other tasks run after each window of entries. 0: the dispatcher was reset meanwhile.
        """
        generation = dispatcher.generation
        window = SKIP_WINDOW_MIN
        while self._position <= self.delays.covered_upto and self.has_next:
            ledger_id, entry_id = self._position
            ranges = self.delays.delayed_in(ledger_id, entry_id, entry_id + window - 1)
            if not ranges:
                break
            for first, last in ranges:
                if self._position.ledger_id != ledger_id:
                    break
                if first > self._position.entry_id:
                    return first - self._position.entry_id
                if last >= self._position.entry_id:
                    following = self._ledger.next_position(Position(ledger_id, last))
                    self._position, self._index = self._cursor.next_unacked(following), 0
            window = min(2 * window, SKIP_WINDOW)
            await asyncio.sleep(0)
            if generation != dispatcher.generation:
                return 0
        return READ_ENTRIES_MAX

    def _next_unacked(self, position: Position, index: int) -> int:
        """Return the first index from `index` on that is not acknowledged, or one after the last index of the batch."""
        remaining = self._cursor.remaining(position)
        if remaining is None:
            return index
        rest = remaining >> index
        return index + (rest & -rest).bit_length() - 1 if rest else BATCH_COUNT_MAX

    async def read_again(
        self,
        dispatcher: Dispatcher[Messages],
        refs: Sequence[MessageRef],
        *,
        size_max: int,
        decoded_max: int,
    ) -> None:
        """Offer the messages that the dispatcher's `replay` returned: those of one entry, and about `size_max` bytes.

        The others are given back to the dispatcher; all of them if an error is raised. `decoded_max`: as in `load`.
        """
        generation = dispatcher.generation
        try:
            found, rest = await self.load(refs, size_max=size_max, decoded_max=decoded_max)
        except BaseException:
            dispatcher.give_back(refs)
            raise
        if generation != dispatcher.generation:
            return
        items: list[Item[Messages]] = []
        consumed: list[Position] = []
        parts: list[BatchAck] = []
        present: dict[Position, int] = {}
        for position, bits in rest:
            present[position] = present.get(position, 0) | bits
        singles: set[Position] = set()
        for position, entry, messages in found:
            matching, others = self.filter.split(messages)
            if others and others[0].batch_index == NOT_IN_BATCH:
                consumed.append(position)
            elif others:  # a part of a delayed batch that was not read before
                parts.append(BatchAck(position, entry.count, [one.batch_index for one in others]))
            if matching:
                items.append(item := _item(dispatcher, position, entry, matching))
                if item.sizes is None:  # `offer_again` forgets whatever else the entry was thought to have
                    singles.add(position)
                    continue
                present[position] = present.get(position, 0) | item.bits
        dispatcher.offer_again(items, generation=generation)
        dispatcher.give_back(rest)
        missing = [
            MessageRef(position, bits & ~present.get(position, 0)) for position, bits in refs if position not in singles
        ]
        dispatcher.forget_missing([ref for ref in missing if ref.bits])  # acknowledged or trimmed since
        if consumed or parts:
            self.batch_sizes.forget(await self._cursor.ack_many(consumed, batches=parts))

    async def peek(self, position: Position, index: int) -> tuple[PackedEntry, Message | None]:
        """Return an entry, and one of its messages unless the entry is large or has no such message."""
        entries = await self._ledger.read(position, entries_max=1, size_max=1)
        if not entries or entries[0][0] != position:
            raise NoSuchMessage("the topic holds no such message", position=str(position))
        entry = self._decoder.open(entries[0][1])
        messages = self._decoder.decode_small(entry, first=index, count_max=1) if entry.is_small else []
        return entry, messages[0] if messages else None

    async def load(
        self, refs: Iterable[MessageRef], *, size_max: int, decoded_max: int
    ) -> tuple[list[tuple[Position, PackedEntry, Messages]], list[MessageRef]]:
        """Return the messages of those `refs` that still exist and are not acknowledged, in order, by entry.

        Reads at least one entry, and no further one once the result has `size_max` bytes; of an entry at most
        READ_MESSAGES_MAX messages, counted from the first. The messages that were not read are the second part of the
        result. The result ends before an entry that cannot be decoded, or not in `decoded_max` bytes; if that is the
        first one, its error is raised, or RoomNeeded.
        """
        wanted: dict[Position, int] = {}
        for position, bits in sorted(refs):
            wanted[position] = wanted.get(position, 0) | bits
        found: list[tuple[Position, PackedEntry, Messages]] = []
        rest: list[MessageRef] = []
        room = size_max
        positions: Sequence[Position] = list(wanted)
        while positions:
            entries, others = await self._ledger.read_some(positions, size_max=room)
            for at, payload in entries:
                entry = decoded = None
                if room > 0:
                    if self._cursor.is_acked(at):
                        continue
                    entry = self._open(at, payload, stop=bool(found))
                if entry is not None:
                    bits, part, later = wanted[at], ONE, 0
                    if entry.is_batch:
                        part, bits, later = _part(bits, entry.count)
                    if entry.is_small:
                        decoded = self._decode_small(at, entry, part, stop=bool(found))
                    else:
                        decoded = await self._decode(at, entry, part, stop=bool(found), room=decoded_max)
                if entry is None or decoded is None:
                    return found, rest + [MessageRef(other, wanted[other]) for other in positions if other >= at]
                if later:
                    rest.append(MessageRef(at, later))
                messages: Messages = decoded
                if entry.is_batch:
                    indexes = set(indexes_of(bits))
                    messages = [one for one in decoded if one.batch_index in indexes]
                elif not bits & SINGLE:
                    continue
                if messages:
                    for message in messages:
                        room -= message.size + MESSAGE_OVERHEAD
                    found.append((at, entry, messages))
            positions = others
            if room <= 0:
                return found, rest + [MessageRef(other, wanted[other]) for other in positions]
        return found, rest

    def _open(self, position: Position, payload: bytes, *, stop: bool) -> PackedEntry | None:
        """Return an entry for `_decode`. If it cannot be read: None if `stop`, else raise."""
        try:
            return self._decoder.open(payload)
        except BinderyError as error:
            if not stop:
                self._explain(position, error)
                raise
            return None

    def _decode_small(self, position: Position, entry: PackedEntry, part: range, *, stop: bool) -> list[Message] | None:
        """Return what `_decode` returns for a small entry."""
        try:
            messages = self._decoder.decode_small(entry, first=part.start, count_max=len(part))
        except BinderyError as error:
            if not stop:
                self._explain(position, error)
                raise
            return None
        return self._unacked(position, messages)

    async def _decode(
        self, position: Position, entry: PackedEntry, part: range, *, stop: bool, room: int
    ) -> list[Message] | None:
        """Return the unacknowledged messages of a part of an entry. Other tasks run meanwhile only if it is large.

        If it cannot be decoded, or not in `room` bytes: None if `stop`, else raise.
        """
        try:
            messages = await self._decoder.decode(entry, room=room, first=part.start, count_max=len(part))
        except RoomNeeded:
            if not stop:
                raise
            return None
        except BinderyError as error:
            if not stop:
                self._explain(position, error)
                raise
            return None
        return self._unacked(position, messages)

    def _explain(self, position: Position, error: BinderyError) -> None:
        """Record why the subscription does not continue, and tell the client how to go on."""
        message_id = MessageId.of(position, partition=self._partition)
        self.stuck = f"message {message_id} cannot be decoded: {error}"
        error.facts.setdefault("message_id", str(message_id))
        error.facts.setdefault("hint", "acknowledge this message id to go past it")

    def _unacked(self, position: Position, messages: list[Message]) -> list[Message]:
        """Return the messages that are not acknowledged now."""
        self.stuck = None
        if (
            self.batch_sizes.remember(position, messages)
            and (remaining := self._cursor.remaining(position)) is not None
        ):
            return [message for message in messages if remaining >> message.batch_index & 1]
        return messages


def _item(
    dispatcher: Dispatcher[Messages], position: Position, entry: PackedEntry, messages: Messages
) -> Item[Messages]:
    """Return an item of at least one message."""
    hash_of = dispatcher.hash_of
    key_hash = 0 if hash_of is None else hash_of(entry.key_bytes)
    first = messages[0]
    if first.batch_index == NOT_IN_BATCH:
        size = first.size + MESSAGE_OVERHEAD
        return Item(position, size=size, body=messages, key_hash=key_hash, deliver_at_ms=first.deliver_at_ms or 0)
    sizes = [message.size + MESSAGE_OVERHEAD for message in messages]
    return Item(
        position,
        size=sum(sizes),
        body=messages,
        bits=bits_of_messages(messages),
        sizes=sizes,
        key_hash=key_hash,
        deliver_at_ms=entry.deliver_at_ms,
    )


def messages_of(delivery: Delivery[Messages]) -> Messages:
    """Return the messages that were delivered: an item of which a part is delivered shares its body with the rest."""
    body = delivery.body
    if len(body) == delivery.bits.bit_count():
        return body
    indexes = set(indexes_of(delivery.bits))
    return [message for message in body if message.batch_index in indexes]


def bits_of_messages(messages: Messages) -> int:
    """Return the bits of the messages of one entry, at least one."""
    first = messages[0].batch_index
    return SINGLE if first == NOT_IN_BATCH else bits_of([message.batch_index for message in messages])


def _part(bits: int, count: int) -> tuple[range, int, int]:
    """Return the part of an entry to read for `bits`, the bits in this part, and the bits after it.

    `count`: number of messages in the entry. The part has at most READ_MESSAGES_MAX messages.
    """
    if bits < 0:
        bits &= (1 << min(count, BATCH_COUNT_MAX)) - 1
    if not bits:
        return range(0), 0, 0
    first = lowest(bits)
    stop = min(bits.bit_length(), first + READ_MESSAGES_MAX)
    later = bits >> stop << stop
    return range(first, stop), bits ^ later, later

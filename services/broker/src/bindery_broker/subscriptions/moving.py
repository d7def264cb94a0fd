"""Move messages of a subscription to its retry and dead-letter topics. The steps of a move are those of `Mover`.

A message whose redelivery count exceeds the limit is taken out of the answer to the call that would have got it. So
counts 0 to the limit are delivered. The call goes on with what is left of it, or waits for other messages.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bindery_core.errors import BadRequest, BinderyError, TooLarge, TryAgain
from bindery_core.sources import MonotonicClock
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import Message, OpaqueMessage, check_size
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch.item import NOT_IN_BATCH, WHOLE, MessageRef, lowest
from bindery_broker.dispatch.portions import Portion, State
from bindery_broker.errors import RESPONSES_FULL, NotSupported, ResponsesFull
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, WallClock
from bindery_broker.retries import copies as copying
from bindery_broker.retries.copies import Copy, copy_of, reconsume_times
from bindery_broker.retries.intents import MESSAGES_MAX
from bindery_broker.retries.mover import Mover, Outcome
from bindery_broker.retries.names import check_target, is_retry_topic, origin_topic
from bindery_broker.retries.targets import Destination, Targets
from bindery_broker.subscriptions.acknowledging import Acknowledger
from bindery_broker.subscriptions.consumer import DeadLetters
from bindery_broker.subscriptions.decoding import RoomNeeded
from bindery_broker.subscriptions.dispatch_loop import Deliveries, DispatchLoop
from bindery_broker.subscriptions.reading import MESSAGE_OVERHEAD, MessageReader, messages_of
from bindery_broker.subscriptions.response_budget import Charge

MoveTask = asyncio.Task[list[Outcome]]
MOVE_SIZE_MAX: Final = 2**20
"""Maximum bytes of the messages that are moved at a time, unless the first one is larger."""
RESERVED: Final = frozenset(
    {
        copying.REAL_TOPIC,
        copying.REAL_SUBSCRIPTION,
        copying.ORIGIN_MESSAGE_ID,
        copying.ORIGIN_MESSAGE_IDY_TIME,
        copying.RECONSUMETIMES,
        copying.DELAY_TIME,
        copying.REDRIVEN_FROM,
    }
)
"""Properties that only the broker sets."""


class RetryTo(NamedTuple):
    """Where the messages of a retry go."""

    retry: Destination
    dead_letters: Destination
    max_redeliver: int
    """Largest RECONSUMETIMES of a copy in the retry topic. What would exceed it goes to the dead-letter topic."""
    delay_ms: int = 0
    properties: Mapping[str, str] = {}
    """Properties to add to the copies, or to replace."""


class MovedMessage(NamedTuple):
    message_id: MessageId
    """Id of the original, which is acknowledged."""
    topic: TopicName
    """Topic of the copy."""
    copy_id: MessageId
    reconsume_times: int


class MoveResult(NamedTuple):
    moved: list[MovedMessage]
    acknowledged: list[MessageId]
    """Messages that were acknowledged before, and have no copy."""
    failed: list[tuple[MessageId, BinderyError]]


class _Hold:
    """`retries.mover.Hold` over the present dispatcher."""

    def __init__(self, loop: DispatchLoop, reader: MessageReader, refs: Sequence[MessageRef], now: MonotonicClock):
        self._loop = loop
        self._reader = reader
        self._now = now
        self._dispatcher = loop.dispatcher
        self._resets = loop.resets
        self._refs = _merged(refs)
        self._portions: dict[Position, list[Portion[Any]]] = {}
        self._unread: set[Portion[Any]] = set()
        """Portions that the dispatcher did not know before."""
        self._hold()

    def _hold(self) -> None:
        known, added = self._dispatcher.hold(self._refs)
        for portion in [*known, *added]:
            self._portions.setdefault(portion.position, []).append(portion)
        self._unread.update(added)

    def renew(self) -> bool:
        if self._resets != self._loop.resets:
            return False
        if self._dispatcher is not self._loop.dispatcher:
            self._dispatcher = self._loop.dispatcher
            self._portions.clear()
            self._unread.clear()
        self._hold()
        return True

    def finish(self, refs: Sequence[MessageRef]) -> None:
        self._dispatcher.finish_ack(self._take(refs))

    def release(self, refs: Sequence[MessageRef], *, delay_s: float = 0.0) -> None:
        read: list[Portion[Any]] = []
        unread: list[Portion[Any]] = []
        for portion in self._take(refs):
            # What was not read yet, or is in the index of delayed messages, will be read in its turn.
            first = (portion.position, lowest(portion.bits))
            is_later = portion in self._unread and first >= self._reader.place
            is_later = is_later or self._reader.delays.deliver_at(portion.position) is not None
            (unread if is_later else read).append(portion)
        self._dispatcher.finish_ack(unread)
        self._dispatcher.return_held(read, delay_s=delay_s, now=self._now())
        self._loop.wake()

    def _take(self, refs: Sequence[MessageRef]) -> list[Portion[Any]]:
        """Return the messages that are held, and no longer hold them."""
        taken: list[Portion[Any]] = []
        for position, bits in _merged(refs):
            kept: list[Portion[Any]] = []
            for portion in self._portions.pop(position, ()):
                if portion.state is not State.ACKING:
                    continue
                common = portion.bits & bits
                if common == portion.bits:
                    taken.append(portion)
                    continue
                kept.append(portion)
                if common:
                    part = self._dispatcher.part_of(portion, common)
                    taken.append(part)
                    if portion in self._unread:
                        self._unread.add(part)
            if kept:
                self._portions[position] = kept
        return taken


class Moving:
    """Moves messages of one subscription; the `Source` of its `Mover`."""

    def __init__(
        self,
        cursor: ManagedCursor,
        loop: DispatchLoop,
        reader: MessageReader,
        acknowledger: Acknowledger,
        *,
        topic: TopicName,
        targets: Targets,
        now: MonotonicClock,
        clock: WallClock,
    ) -> None:
        self.cursor = cursor
        self._loop = loop
        self._reader = reader
        self._acknowledger = acknowledger
        self._topic = topic
        self._now = now
        self._clock = clock
        self.mover = Mover(self, targets)
        loop.before_read = self.mover.before_read

    # -- the source of the mover ---------------------------------------------------------------------------------

    @property
    def full_name(self) -> str:
        return f"{self._topic.full}/{self.cursor.name}"

    def check_open(self) -> None:
        self._loop.check_open()

    def hold(self, refs: Sequence[MessageRef]) -> _Hold:
        return _Hold(self._loop, self._reader, refs, self._now)

    def acked(self, positions: Sequence[Position], batches: Sequence[BatchAck], completed: Sequence[Position]) -> None:
        self._acknowledger.acknowledged(positions, batches, completed)

    # -- retries -------------------------------------------------------------------------------------------------

    async def retry(self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge) -> MoveResult:
        """Move messages to the retry topic, or to the dead-letter topic, in the order of `ids`. See `Subscription`."""
        for name in to.properties:
            if name in RESERVED:
                raise BadRequest("the property is set by the broker", property=name)
        check_target(to.dead_letters.topic, self._topic, what="dead-letter")
        if not is_retry_topic(self._topic, self.cursor.name):  # else it is its own retry topic
            check_target(to.retry.topic, self._topic, what="retry")
        now_ms = self._clock()

        def copy(message: Message, position: Position) -> tuple[Copy, Destination]:
            times = reconsume_times(message.properties) + 1
            is_dead = times > to.max_redeliver
            options = {"times": times, "delay_ms": 0 if is_dead else to.delay_ms, "now_ms": now_ms}
            made = self.copy(message, position, properties=to.properties, **options)
            if to.properties:
                _check_added(made, self.copy(message, position, **options))
            return made, to.dead_letters if is_dead else to.retry

        return await self.move_ids(ids, copy, charge=charge)

    def copy(self, message: Message, position: Position, **options: Any) -> Copy:
        """Return the copy of a message of this subscription. `options`: those of `copies.copy_of`."""
        options = {
            "partition": self._topic.partition,
            "topic": origin_topic(self._topic, self.cursor.name),
            "subscription": self.cursor.name,
            **options,
        }
        return copy_of(message, position, **options)

    async def move_ids(
        self,
        ids: Sequence[MessageId],
        copy: Callable[[Message, Position], tuple[Copy, Destination]],
        *,
        charge: Charge,
    ) -> MoveResult:
        """Move the messages that `ids` name, in this order and each once. An id without a batch index names all.

        `copy` returns the copy of a message and where it goes. A message whose copy no entry can hold fails, and stays
        with its consumer. `charge` holds the bytes of the messages; the caller releases it. Raises UnknownMessages if
        an id names no message: nothing is done then. If one part of the messages cannot be read or moved now, the
        following ones are not moved either.
        """
        self._loop.check_open()
        await self._acknowledger.resolve(ids)
        result = MoveResult([], [], [])
        left = list(dict.fromkeys(ids))
        count_max = MESSAGES_MAX
        rest: list[MessageRef] = []
        """What is left of the batch that the first id of `left` names."""
        while left:
            part = left[:1] if rest else left[:count_max]
            refs = rest or [_ref(one) for one in part]
            try:
                found, rest = await self._load(refs, charge)
            except TryAgain as error:
                result.failed.extend((one, error) for one in left)
                break
            except BinderyError as error:  # an entry cannot be decoded
                rest = []
                if len(part) == 1:
                    result.failed.append((part[0], error))
                    left = left[1:]
                else:
                    count_max = len(part) // 2
                continue
            if rest and len(part) > 1:
                count_max, rest = len(part) // 2, []
                continue
            count_max = min(2 * count_max, MESSAGES_MAX)
            chosen: list[tuple[Copy, Destination]] = []
            for one in part:
                here = found.get(one.position, {})
                indexes = list(here) if one.batch_index == NOT_IN_BATCH else [one.batch_index]
                wanted = [here.pop(index) for index in indexes if index in here]
                if not wanted and not rest:
                    result.acknowledged.append(one)
                for message in wanted:
                    try:
                        if _is_opaque(message):
                            raise _cannot_move()
                        made, to = copy(message, one.position)
                        check_size(made.message)
                    except BadRequest as error:
                        result.failed.append((self._id(one.position, message.batch_index), error))
                    else:
                        chosen.append((made, to))
            if not rest:
                left = left[len(part) :]
            stop = await self._move_chosen(chosen, result)
            if stop is not None:
                result.failed.extend((one, stop) for one in left)
                break
        return result

    async def _load(
        self, refs: Sequence[MessageRef], charge: Charge
    ) -> tuple[dict[Position, dict[int, Message]], list[MessageRef]]:
        """Return the unacknowledged messages by position and batch index, and what was not read because of its size."""
        decoded_max = ENTRY_SIZE_MAX
        while True:
            size = MOVE_SIZE_MAX + decoded_max
            if not charge.take(least=size, most=size):
                raise ResponsesFull(RESPONSES_FULL)
            try:
                loaded, rest = await self._reader.load(refs, size_max=MOVE_SIZE_MAX, decoded_max=decoded_max)
                break
            except RoomNeeded as needed:
                decoded_max = needed.size
        found: dict[Position, dict[int, Message]] = {}
        for position, _, messages in loaded:
            for message in messages:
                if not self._is_acked(position, message.batch_index):  # meanwhile
                    found.setdefault(position, {})[message.batch_index] = message
        charge.keep(_size(message for some in found.values() for message in some.values()))
        return found, rest

    async def _move_chosen(self, chosen: Sequence[tuple[Copy, Destination]], result: MoveResult) -> BinderyError | None:
        """Move messages by destination, and add their outcomes to `result`.

        Returns the error that prevented a whole part from being moved; what follows it is not moved either.
        """
        stop: BinderyError | None = None
        for to in dict.fromkeys(to for _, to in chosen):
            copies = [made for made, other in chosen if other == to]
            for first in range(0, len(copies), MESSAGES_MAX):
                some = copies[first : first + MESSAGES_MAX]
                outcomes: Sequence[Outcome]
                if stop is not None:
                    outcomes = [stop] * len(some)
                else:
                    try:
                        outcomes = await self.mover.move(some, to)
                    except BinderyError as error:
                        outcomes, stop = [error] * len(some), error
                self._report(some, to, outcomes, result)
        return stop

    def _report(self, copies: Sequence[Copy], to: Destination, outcomes: Sequence[Outcome], result: MoveResult) -> None:
        for made, outcome in zip(copies, outcomes, strict=True):
            message_id = self._id(made.position, made.batch_index)
            if outcome is None:
                result.acknowledged.append(message_id)
            elif isinstance(outcome, BinderyError):
                result.failed.append((message_id, outcome))
            else:
                times = reconsume_times(made.message.properties)
                result.moved.append(MovedMessage(message_id, to.topic, outcome, times))

    def _is_acked(self, position: Position, index: int) -> bool:
        if self.cursor.is_acked(position):
            return True
        remaining = self.cursor.remaining(position)
        return index != NOT_IN_BATCH and remaining is not None and not remaining >> index & 1

    def _id(self, position: Position, index: int) -> MessageId:
        return MessageId.of(position, batch_index=index, partition=self._topic.partition)

    # -- dead letters --------------------------------------------------------------------------------------------

    def split_dead(
        self, deliveries: Deliveries, limit: DeadLetters, *, charge: Charge
    ) -> tuple[Deliveries, list[MoveTask]]:
        """Take out of `deliveries` what exceeds the limit, hold it, and begin to move it.

        Returns what is left of `deliveries`, and the moves in progress. What cannot be moved is delivered again later,
        and moved then. `charge`: that of the call; each move has one of the same client until its end.
        """
        kept: Deliveries = []
        dead: list[tuple[Copy, Message]] = []
        for delivery in deliveries:
            messages = messages_of(delivery)
            if delivery.redelivery_count <= limit.max_redeliver or any(map(_is_opaque, messages)):
                kept.append(delivery)
            else:
                dead += [(self.copy(message, delivery.position), message) for message in messages]
        moves: list[MoveTask] = []
        for first in range(0, len(dead), MESSAGES_MAX):
            part = dead[first : first + MESSAGES_MAX]
            held = charge.another()
            held.keep(_size(message for _, message in part))
            move = self.mover.begin([made for made, _ in part], limit.to)
            move.add_done_callback(functools.partial(_moved, held))
            moves.append(move)
        return kept, moves


def _merged(refs: Iterable[MessageRef]) -> list[MessageRef]:
    """Return one reference for each entry."""
    merged: dict[Position, int] = {}
    for position, bits in refs:
        merged[position] = merged.get(position, 0) | bits
    return [MessageRef(position, bits) for position, bits in merged.items()]


def _size(messages: Iterable[Message]) -> int:
    """Return the bytes that messages take in memory."""
    return sum(message.size + MESSAGE_OVERHEAD for message in messages)


def _moved(held: Charge, _move: MoveTask) -> None:
    held.release()


def _is_opaque(message: Message) -> bool:
    return isinstance(message, OpaqueMessage)


def _ref(message_id: MessageId) -> MessageRef:
    index = message_id.batch_index
    return MessageRef(message_id.position, WHOLE if index == NOT_IN_BATCH else 1 << index)


def _check_added(made: Copy, plain: Copy) -> None:
    """Raise TooLarge if no entry can hold a copy because of the properties that were added to it.

    `plain`: the copy without them.
    """
    try:
        check_size(made.message)
    except TooLarge as error:
        check_size(plain.message)
        raise TooLarge(
            "with the properties of the request the copy of the message would be too large, so it was not moved; "
            "shorten properties",
            **error.facts,
        ) from error


def _cannot_move() -> NotSupported:
    return NotSupported("the broker cannot copy a message that it cannot decode: it is encrypted, or a part of one")

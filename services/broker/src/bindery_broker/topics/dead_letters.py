"""The dead letters of a subscription: list them, move them back to it, or discard them.

They are the messages of the dead-letter topic that its subscription (the keeper, `dead-letters` by default) has not
acknowledged. Which of them count, by their properties REAL_SUBSCRIPTION and REAL_TOPIC:

| dead-letter topic     | a message counts if                                                                       |
|-----------------------|-------------------------------------------------------------------------------------------|
| with the default name | neither names another subscription or topic; clients may have sent it without them        |
| another one           | both name this subscription and its topic                                                 |

So subscriptions may share a topic: by a policy, or because `a` with `b-c` and `a-b` with `c` have one default name.

Without a keeper every stored message of the topic with the default name counts. Moving and discarding create the keeper
there, from the first message on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import CorruptMessage, Message
from bindery_pulsar.message_id import EARLIEST, MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch.item import NOT_IN_BATCH
from bindery_broker.errors import UnknownMessages
from bindery_broker.retries.copies import DELAY_TIME, REAL_SUBSCRIPTION, REAL_TOPIC, RECONSUMETIMES, Copy, names_other
from bindery_broker.retries.names import DEAD_LETTERS
from bindery_broker.retries.targets import Destination
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import ReadMessage, Topic

LOOKED_AT_MAX: Final = 10_000
"""Maximum number of messages that one page looks at. It may be empty, although more follow."""
READ_COUNT_MAX: Final = 100
READ_BYTES_MAX: Final = 2**20
PURGED_SIZE: Final = 2**24
"""Approximate maximum bytes of the heads of the dead letters that one call discards."""
HEAD_SIZE: Final = 300
"""Approximate bytes of a dead letter in a list, without its key and properties."""


class Letter(NamedTuple):
    id: MessageId
    publish_time_ms: int
    """When the message became a dead letter."""
    event_time_ms: int
    """0: none."""
    key: str | bytes | None
    properties: dict[str, str]
    size: int
    """Bytes of the payload."""
    redelivery_count: int
    """How often consumers of the dead-letter topic returned it."""


class Page(NamedTuple):
    letters: list[Letter]
    last: MessageId | None
    """Where the next page begins: after this message. None: no message follows."""
    damaged: list[MessageId]
    """Entries that cannot be decoded, and that are not acknowledged. Nobody knows whose they are."""


class Redriven(NamedTuple):
    moved: int
    skipped: int
    """Messages that were acknowledged before."""
    failed: list[tuple[MessageId, BinderyError]]
    last: MessageId | None


class DeadLetterTopic:
    def __init__(
        self, topic: Topic, *, of: str, source: TopicName, is_default: bool, keeper: str = DEAD_LETTERS
    ) -> None:
        """`topic`: the dead-letter topic. `of`, `source`: the subscription whose messages count, and its topic, without
        the partition. `is_default`: whether `topic` has the default name."""
        self.topic = topic
        self._of = of
        self._source = source
        self._is_default = is_default
        self._keeper_name = keeper

    @property
    def keeper(self) -> Subscription | None:
        """The subscription that keeps the messages."""
        return self.topic.subscriptions.get(self._keeper_name)

    async def page(
        self,
        after: MessageId | None,
        *,
        charge: Charge,
        count_max: int,
        size_max: int,
        before_ms: int | None = None,
    ) -> Page:
        """Return the dead letters that follow `after`, at least one if there is one among LOOKED_AT_MAX messages.

        `size_max`: approximate maximum bytes of their heads. `before_ms`: only those published before, in ms since
        1970. `charge` has the bytes of what was read; the caller releases it. Raises ResponsesFull.
        """
        letters: list[Letter] = []
        damaged: list[MessageId] = []
        looked_at = size = 0
        last = after
        read_max = READ_COUNT_MAX
        start: MessageId | Position = EARLIEST if after is None else _following(after)
        while looked_at < LOOKED_AT_MAX:
            start = self._skip_acked(start)
            try:
                found, start = await self.topic.read(start, charge=charge, count_max=read_max, bytes_max=READ_BYTES_MAX)
            except CorruptMessage:
                if read_max == 1:  # the entry at the start is the damaged one
                    position = self.topic.ledger.clamp(start.position if isinstance(start, MessageId) else start)
                    last = MessageId.of(position, partition=self.topic.name.partition)
                    if not self._is_acked(last):
                        damaged.append(last)
                    start = self.topic.ledger.next_position(position)
                    looked_at += 1
                read_max = READ_COUNT_MAX if read_max == 1 else 1
                continue
            if not found:
                return Page(letters, None, damaged)
            looked_at += len(found)
            for one in found:
                last = one.id
                if self._is_acked(one.id) or not self._counts(one.message, before_ms):
                    continue
                letter = self._letter(one)
                letters.append(letter)
                size += HEAD_SIZE + sum(len(name) + len(value) for name, value in letter.properties.items())
                if len(letters) >= count_max or size >= size_max:
                    return Page(letters, last, damaged)
        return Page(letters, last, damaged)

    async def redrive(
        self,
        to: Destination,
        *,
        charge: Charge,
        count_max: int,
        ids: Sequence[MessageId] | None,
        after: MessageId | None,
        dry_run: bool,
    ) -> Redriven:
        """Move dead letters to the retry topic of their subscription, where they are due at once: each exactly once.

        `ids`: only these; `after`: only those that follow this one. Their RECONSUMETIMES are removed, so that they are
        retried as often as a new message. Raises UnknownMessages, with nothing done, if an id names no dead letter of
        the subscription.
        """
        last: MessageId | None = None
        if ids is None:
            page = await self.page(after, charge=charge, count_max=count_max, size_max=2**20)
            ids, last = [letter.id for letter in page.letters], page.last
        else:
            await self._check_ids(ids, charge)
        charge.release()
        if dry_run or not ids:
            acked = sum(map(self._is_acked, ids))
            return Redriven(len(ids) - acked, acked, [], last)
        keeper = await self._keep()
        moving = keeper.moving

        def copy(message: Message, position: Position) -> tuple[Copy, Destination]:
            kept = {name: value for name, value in message.properties.items() if name not in _REMOVED}
            made = moving.copy(
                dataclasses.replace(message, properties=kept),
                position,
                topic=self._source,
                subscription=self._of,
                redriven_by=keeper.name,
            )
            return made, to

        result = await moving.move_ids(ids, copy, charge=charge)
        return Redriven(len(result.moved), len(result.acknowledged), result.failed, last)

    async def purge(
        self, *, charge: Charge, ids: Sequence[MessageId] | None, before_ms: int | None, after: MessageId | None
    ) -> tuple[int, MessageId | None]:
        """Acknowledge dead letters: those with `ids`, those published before a time (ms since 1970), or all of them.

        Returns how many that were, and where to continue if not all of them were looked at. An id of an entry counts as
        one message. Raises UnknownMessages, with nothing done, if an id names no dead letter of the subscription.
        """
        if ids is not None:
            await self._check_ids(ids, charge)
            charge.release()
            keeper = await self._keep()
            count = len({one for one in ids if not self._is_acked(one)})
            await keeper.ack(ids)
            return count, None
        keeper = await self._keep()
        page = await self.page(after, charge=charge, count_max=LOOKED_AT_MAX, size_max=PURGED_SIZE, before_ms=before_ms)
        charge.release()
        purged = [letter.id for letter in page.letters]
        if self._is_default and before_ms is None:
            purged += page.damaged
        if purged:
            await keeper.ack(purged)
        return len(purged), page.last

    async def _check_ids(self, ids: Sequence[MessageId], charge: Charge) -> None:
        """Raise UnknownMessages if an id names no message, or one that does not count and is not acknowledged."""
        keeper, ledger = self.keeper, self.topic.ledger
        if keeper is None:
            wrong = [one for one in ids if not ledger.contains(one.position)]
        else:
            wrong = await keeper.unknown(ids)
        if not wrong:
            counting: dict[Position, dict[int, bool]] = {}
            for one in ids:
                if self._is_acked(one):
                    continue
                here = counting.get(one.position)
                if here is None:
                    here = counting[one.position] = await self._read_entry(one.position, charge)
                index = one.batch_index
                if not (all(here.values()) if index == NOT_IN_BATCH else here.get(index, True)):
                    wrong.append(one)
        if wrong:
            raise UnknownMessages.of(wrong, count=len(ids), what="dead letter of this subscription")

    async def _read_entry(self, position: Position, charge: Charge) -> dict[int, bool]:
        """Return whether each message of an entry counts, by its batch index; nothing of an entry that was trimmed.

        A damaged entry is a message that has no properties.
        """
        here: dict[int, bool] = {}
        start: MessageId | Position = position
        count_max = 1  # most entries are no batches: nothing that follows is read
        while True:
            try:
                found, start = await self.topic.read(
                    start, charge=charge, count_max=count_max, bytes_max=READ_BYTES_MAX
                )
            except CorruptMessage:
                return here or {NOT_IN_BATCH: self._is_default}
            here |= {one.id.batch_index: self._counts(one.message) for one in found if one.id.position == position}
            if start.position != position or (not found and start.batch_index == NOT_IN_BATCH):
                return here
            count_max = LOOKED_AT_MAX

    async def _keep(self) -> Subscription:
        if not self._is_default:  # no other topic gets subscriptions by that
            return self.topic.subscription(self._keeper_name)
        keeper, _ = await self.topic.subscribe(self._keeper_name, initial=EARLIEST)
        return keeper

    def _skip_acked(self, start: MessageId | Position) -> MessageId | Position:
        position = start.position if isinstance(start, MessageId) else start
        keeper = self.keeper
        if keeper is None or not (position == EARLIEST or keeper.cursor.is_acked(position)):
            return start
        return keeper.cursor.next_unacked(position)

    def _is_acked(self, message_id: MessageId) -> bool:
        keeper = self.keeper
        if keeper is None:
            return False
        if keeper.cursor.is_acked(message_id.position):
            return True
        remaining = keeper.cursor.remaining(message_id.position)
        index = message_id.batch_index
        return index != NOT_IN_BATCH and remaining is not None and not remaining >> index & 1

    def _counts(self, message: Message, before_ms: int | None = None) -> bool:
        if before_ms is not None and message.publish_time_ms >= before_ms:
            return False
        properties = message.properties
        is_marked = REAL_SUBSCRIPTION in properties and REAL_TOPIC in properties
        return (is_marked or self._is_default) and not names_other(
            properties, topic=self._source, subscription=self._of
        )

    def _letter(self, one: ReadMessage) -> Letter:
        message, keeper = one.message, self.keeper
        count = 0 if keeper is None else keeper.cursor.redelivery_count(one.id.position, max(one.id.batch_index, 0))
        return Letter(
            one.id,
            message.publish_time_ms,
            message.event_time_ms,
            message.key,
            message.properties,
            len(message.payload),
            count,
        )


_REMOVED: Final = frozenset({RECONSUMETIMES, DELAY_TIME})


def _following(message_id: MessageId) -> MessageId | Position:
    position, index = message_id.position, message_id.batch_index
    if index == NOT_IN_BATCH:
        return Position(position.ledger_id, position.entry_id + 1)
    return message_id._replace(batch_index=index + 1)

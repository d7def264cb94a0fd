"""The dead letters of a subscription: list them, move them back to it, or discard them.

They are the messages of the dead-letter topic that its subscription (the keeper, `dead-letters` by default) has not
acknowledged. A dead-letter topic with the default name has those of one subscription. One that a policy named may have
those of several: only the messages whose property REAL_SUBSCRIPTION names the subscription, or that have no such
property, count then.

Without a keeper every stored message counts. Moving and discarding create the keeper, from the first message on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final, NamedTuple

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import Message
from bindery_pulsar.message_id import EARLIEST, MessageId, Position

from bindery_broker.dispatch.item import NOT_IN_BATCH
from bindery_broker.errors import UnknownMessages
from bindery_broker.retries.copies import DELAY_TIME, REAL_SUBSCRIPTION, RECONSUMETIMES, Copy
from bindery_broker.retries.names import DEAD_LETTERS
from bindery_broker.retries.targets import Destination
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import ReadMessage, Topic

LOOKED_AT_MAX: Final = 10_000
"""Maximum number of messages that one page looks at. It may be empty, although more follow."""
READ_COUNT_MAX: Final = 100
READ_BYTES_MAX: Final = 2**20
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


class Redriven(NamedTuple):
    moved: int
    skipped: int
    """Messages that were acknowledged before."""
    failed: list[tuple[MessageId, BinderyError]]
    last: MessageId | None


class DeadLetterTopic:
    def __init__(self, topic: Topic, *, of: str | None, keeper: str = DEAD_LETTERS) -> None:
        """`topic`: the dead-letter topic. `of`: the subscription whose messages count; None: all count."""
        self.topic = topic
        self._of = of
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
        looked_at = size = 0
        last = after
        start: MessageId | Position = EARLIEST if after is None else _following(after)
        while looked_at < LOOKED_AT_MAX:
            found, start = await self.topic.read(
                self._skip_acked(start), charge=charge, count_max=READ_COUNT_MAX, bytes_max=READ_BYTES_MAX
            )
            if not found:
                return Page(letters, None)
            looked_at += len(found)
            for one in found:
                last = one.id
                if self._is_acked(one.id) or not self._counts(one.message, before_ms):
                    continue
                letter = self._letter(one)
                letters.append(letter)
                size += HEAD_SIZE + sum(len(name) + len(value) for name, value in letter.properties.items())
                if len(letters) >= count_max or size >= size_max:
                    return Page(letters, last)
        return Page(letters, last)

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
        retried as often as a new message. Raises UnknownMessages, with nothing done, if an id names no message.
        """
        last: MessageId | None = None
        if ids is None:
            page = await self.page(after, charge=charge, count_max=count_max, size_max=2**20)
            ids, last = [letter.id for letter in page.letters], page.last
        charge.release()
        if dry_run or not ids:
            keeper = self.keeper
            ledger = self.topic.ledger
            unknown = (
                [one for one in ids if not ledger.contains(one.position)]
                if keeper is None
                else await keeper.unknown(ids)
            )
            if unknown:
                raise UnknownMessages.of(unknown, count=len(ids))
            acked = sum(map(self._is_acked, ids))
            return Redriven(len(ids) - acked, acked, [], last)
        keeper = await self._keep()
        moving = keeper.moving

        def copy(message: Message, position: Position) -> tuple[Copy, Destination]:
            kept = {name: value for name, value in message.properties.items() if name not in _REMOVED}
            return moving.copy(dataclasses.replace(message, properties=kept), position), to

        result = await moving.move_ids(ids, copy, charge=charge)
        return Redriven(len(result.moved), len(result.acknowledged), result.failed, last)

    async def purge(
        self, *, charge: Charge, ids: Sequence[MessageId] | None, before_ms: int | None, after: MessageId | None
    ) -> tuple[int, MessageId | None]:
        """Acknowledge dead letters: those with `ids`, those published before a time (ms since 1970), or all of them.

        Returns how many that were, and where to continue if not all of them were looked at. An entry counts as one
        message. Raises UnknownMessages, with nothing done, if an id names no message.
        """
        keeper = await self._keep()
        if ids is None and self._of is not None:
            page = await self.page(after, charge=charge, count_max=LOOKED_AT_MAX, size_max=2**30, before_ms=before_ms)
            charge.release()
            if page.letters:
                await keeper.ack([letter.id for letter in page.letters])
            return len(page.letters), page.last
        if ids is not None:
            if unknown := await keeper.unknown(ids):
                raise UnknownMessages.of(unknown, count=len(ids))
            count = len({one for one in ids if not self._is_acked(one)})
            await keeper.ack(ids)
            return count, None
        backlog_before = keeper.cursor.backlog_entries
        if before_ms is None:
            await keeper.clear()
        else:
            await keeper.expire(before_ms)
        return max(0, backlog_before - keeper.cursor.backlog_entries), None

    async def _keep(self) -> Subscription:
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

    def _counts(self, message: Message, before_ms: int | None) -> bool:
        if before_ms is not None and message.publish_time_ms >= before_ms:
            return False
        return self._of is None or message.properties.get(REAL_SUBSCRIPTION, self._of) == self._of

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

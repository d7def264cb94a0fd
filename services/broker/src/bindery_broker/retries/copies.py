"""Copies of messages for retry and dead-letter topics. Pure.

A copy keeps payload, key, ordering key, event time and properties. These properties are added:

| property                | value                                                              | if present already  |
|-------------------------|--------------------------------------------------------------------|---------------------|
| REAL_TOPIC              | full name of the subscription's topic, without the partition       | replaced            |
| REAL_SUBSCRIPTION       | subscription from which the message was moved                      | replaced            |
| ORIGIN_MESSAGE_ID       | `ledger:entry:partition`, and `:index` of a message in a batch     | kept                |
| ORIGIN_MESSAGE_IDY_TIME | the same as ORIGIN_MESSAGE_ID                                      | kept                |
| RECONSUMETIMES          | number of retries, this one included, in decimal; retries only     | replaced            |
| DELAY_TIME              | requested delay in milliseconds, in decimal; retries only          | replaced            |
| REDRIVEN_FROM           | a dead letter that was moved back: its id as above, `/`, and the   | replaced, or        |
|                         | subscription that kept it                                          | removed by others   |

So the origin survives any number of moves. REAL_SUBSCRIPTION, REDRIVEN_FROM or else ORIGIN_MESSAGE_ID, and
RECONSUMETIMES together are the identity of a copy: after a crash it tells whether the copy was stored. REDRIVEN_FROM is
needed because letters with one origin may be moved back by two keepers, or from two dead-letter topics, at a time.
The topic of a subscription that consumes its retry topic is the original one, so REAL_TOPIC survives retries.
Source: Pulsar's clients (RetryMessageUtil, ConsumerImpl); the names and the misspelling are theirs. REDRIVEN_FROM is
Bindery's own. The clients keep a REAL_TOPIC that is present; here it is replaced, because any producer can set it, and
dead letters are told apart by it.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final, NamedTuple

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import Message, OutgoingMessage
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch.item import NOT_IN_BATCH, MessageRef

REAL_TOPIC: Final = "REAL_TOPIC"
REAL_SUBSCRIPTION: Final = "REAL_SUBSCRIPTION"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
ORIGIN_MESSAGE_IDY_TIME: Final = "ORIGIN_MESSAGE_IDY_TIME"
RECONSUMETIMES: Final = "RECONSUMETIMES"
DELAY_TIME: Final = "DELAY_TIME"
REDRIVEN_FROM: Final = "REDRIVEN_FROM"
RECONSUMETIMES_MAX: Final = 2**31 - 1
TEXT_MAX: Final = 96
"""Maximum characters of each text of an identity."""


class Identity(NamedTuple):
    """What tells a copy from all others."""

    subscription: str
    origin: str
    reconsume_times: str


class Copy(NamedTuple):
    """A message to be moved, and its copy."""

    position: Position
    """Entry of the original in the source topic."""
    batch_index: int
    """Index of the original in its entry; NOT_IN_BATCH: the entry is no batch."""
    batch_size: int
    """Number of messages in the entry."""
    message: OutgoingMessage

    @property
    def ref(self) -> MessageRef:
        return MessageRef(self.position, 1 if self.batch_index == NOT_IN_BATCH else 1 << self.batch_index)

    @property
    def identity(self) -> Identity:
        return identity_of(self.message.properties)


def identity_of(properties: Mapping[str, str]) -> Identity:
    """Return the identity of a copy; all of its texts are empty if the message is no copy. See `_short`."""
    subscription, origin, times = map(properties.get, (REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID, RECONSUMETIMES))
    return Identity(_short(subscription), _short(properties.get(REDRIVEN_FROM, origin)), _short(times))


def _short(text: str | None) -> str:
    """Return a text that any producer may have set as at most TEXT_MAX printable ASCII characters: others as a digest.

    So the size of an intent is limited.
    """
    if not text or (len(text) <= TEXT_MAX and text.isascii() and text.isprintable()):
        return text or ""
    return f"sha256:{sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def names_other(properties: Mapping[str, str], *, topic: TopicName, subscription: str) -> bool:
    """Return whether REAL_TOPIC or REAL_SUBSCRIPTION names another topic than `topic`, or another subscription.

    `topic`: without the partition. A property that is missing names nothing; clients may name a partition of the topic.
    """
    named = properties.get(REAL_SUBSCRIPTION)
    if named is not None and named != subscription:
        return True
    text = properties.get(REAL_TOPIC)
    if text is None or text == topic.full:
        return False
    try:
        return TopicName.parse(text).partitioned_topic != topic
    except BinderyError:
        return True


def reconsume_times(properties: Mapping[str, str]) -> int:
    """Return how often a message was retried; 0 if the property is missing or is no number from 0 to 2^31 - 1."""
    text = properties.get(RECONSUMETIMES, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return 0
    return min(int(text), RECONSUMETIMES_MAX)


def copy_of(
    message: Message,
    position: Position,
    *,
    partition: int,
    topic: TopicName,
    subscription: str,
    properties: Mapping[str, str] | None = None,
    times: int | None = None,
    delay_ms: int = 0,
    now_ms: int = 0,
    redriven_by: str | None = None,
) -> Copy:
    """Return the copy of a message.

    `topic`, `subscription`: those of REAL_TOPIC and REAL_SUBSCRIPTION. `properties`: those to add or replace by wish of
    the caller. `times`: RECONSUMETIMES of a retry; None: the property stays as it is, and DELAY_TIME too. `delay_ms`:
    delay of the delivery, counted from `now_ms` (since 1970); 0: none. `redriven_by`: the subscription that kept a dead
    letter which is moved back.
    """
    origin = f"{position.ledger_id}:{position.entry_id}:{partition}"
    if message.batch_index != NOT_IN_BATCH:
        origin += f":{message.batch_index}"
    kept = {**message.properties, **(properties or {})}
    kept[REAL_TOPIC] = topic.partitioned_topic.full
    kept.setdefault(ORIGIN_MESSAGE_ID, origin)
    kept.setdefault(ORIGIN_MESSAGE_IDY_TIME, kept[ORIGIN_MESSAGE_ID])
    kept[REAL_SUBSCRIPTION] = subscription
    kept.pop(REDRIVEN_FROM, None)
    if redriven_by is not None:
        kept[REDRIVEN_FROM] = f"{origin}/{redriven_by}"
    if times is not None:
        kept[RECONSUMETIMES] = str(times)
        kept[DELAY_TIME] = str(delay_ms)
    outgoing = OutgoingMessage(
        payload=message.payload,
        key=message.key,
        ordering_key=message.ordering_key,
        properties=kept,
        event_time_ms=message.event_time_ms,
        deliver_at_ms=now_ms + delay_ms if delay_ms else None,
        null_value=message.null_value,
    )
    return Copy(position, message.batch_index, message.batch_size, outgoing)


def id_of(copy: Copy, *, partition: int) -> MessageId:
    """Return the id of the original."""
    return MessageId.of(copy.position, batch_index=copy.batch_index, partition=partition)

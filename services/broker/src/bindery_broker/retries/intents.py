"""Intents: what a move is about to do, stored in the cursor of the source before the first copy is written. Pure.

JSON without spaces, one array:

| index | field        | meaning                                                                               |
|------:|--------------|---------------------------------------------------------------------------------------|
|     0 | version      | 1                                                                                     |
|     1 | topic        | full name of the target topic                                                         |
|     2 | subscription | subscription of the target that keeps the copies                                      |
|     3 | ledger       | last entry of the target before the write: ledger id                                  |
|     4 | entry        | the same: entry id, -1 if the ledger has none                                         |
|     5 | messages     | one array per message, in the order of the copies                                     |

A message is `[ledger, entry, batch index or -1, batch size, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID, RECONSUMETIMES]`; the
last three are the identity of its copy (`copies`): REDRIVEN_FROM takes the place of ORIGIN_MESSAGE_ID if the copy has
it, and what it has not is "". The name of the blob is `move-<serial>`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
from bindery_core.errors import BinderyError, Corrupt
from bindery_pulsar.message_id import Position
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch.item import NOT_IN_BATCH, MessageRef
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.retries.copies import Copy, Identity
from bindery_broker.retries.targets import Destination

VERSION: Final = 1
MESSAGES_MAX: Final = 1_000
"""Maximum number of messages of one intent."""
_NAME: Final = re.compile(r"move-([1-9][0-9]{0,17})", re.ASCII)
_Row = tuple[int, int, int, int, str, str, str]
_Table = tuple[int, str, str, int, int, list[_Row]]


class Planned(NamedTuple):
    """One message of an intent."""

    position: Position
    batch_index: int
    batch_size: int
    identity: Identity

    @property
    def ref(self) -> MessageRef:
        return MessageRef(self.position, 1 if self.batch_index == NOT_IN_BATCH else 1 << self.batch_index)


class Intent(NamedTuple):
    to: Destination
    after: Position
    """Last entry of the target before the copies."""
    messages: tuple[Planned, ...]


def plan(copies: Iterable[Copy]) -> tuple[Planned, ...]:
    return tuple(Planned(copy.position, copy.batch_index, copy.batch_size, copy.identity) for copy in copies)


def encode_intent(intent: Intent) -> bytes:
    rows: list[_Row] = [
        (*message.position, message.batch_index, message.batch_size, *message.identity) for message in intent.messages
    ]
    table: _Table = (VERSION, intent.to.topic.full, intent.to.subscription, *intent.after, rows)
    return msgspec.json.encode(table)


def decode_intent(blob: bytes) -> Intent:
    """Raises Corrupt if the blob is no intent of this version."""
    try:
        version, topic, subscription, ledger_id, entry_id, rows = msgspec.json.decode(blob, type=_Table)
        if version != VERSION:
            raise Corrupt("the version of a stored move is unknown", version=version)
        to = Destination(TopicName.parse(topic), subscription)
    except (msgspec.MsgspecError, BinderyError) as error:
        raise Corrupt(
            "a stored move cannot be read; a seek of the subscription discards it", why=str(error)[:200]
        ) from error
    planned = tuple(
        Planned(Position(ledger, entry), index, size, Identity(*identity))
        for ledger, entry, index, size, *identity in rows
    )
    return Intent(to, Position(ledger_id, entry_id), planned)


def names_of_intents(blobs: Iterable[str]) -> list[str]:
    """Return the names of blobs that hold intents, in the order in which they were stored."""
    return sorted((name for name in blobs if _NAME.fullmatch(name)), key=_serial)


def next_name(blobs: Iterable[str]) -> str:
    """Return a name that none of `blobs` has, above those of all intents."""
    return f"move-{max(map(_serial, names_of_intents(blobs)), default=0) + 1}"


def acks_of(messages: Sequence[Planned | Copy]) -> tuple[list[Position], list[BatchAck]]:
    """Return messages as what a cursor acknowledges: whole entries, and parts of batches."""
    positions: dict[Position, None] = {}
    indexes: dict[Position, set[int]] = {}
    sizes: dict[Position, int] = {}
    for message in messages:
        if message.batch_index == NOT_IN_BATCH:
            positions[message.position] = None
        else:
            indexes.setdefault(message.position, set()).add(message.batch_index)
            sizes[message.position] = message.batch_size
    return list(positions), [BatchAck(at, sizes[at], sorted(found)) for at, found in indexes.items()]


def _serial(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0

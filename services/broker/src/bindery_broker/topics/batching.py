"""Group the messages of a request into entries, and encode the entries.

Consecutive messages share an entry if they have the same key, ordering key and tags. Dispatch by key or tag can then
treat an entry as a whole. A message that is alone in its entry is not stored as a batch. A delayed message always is,
because a delivery time belongs to an entry: Pulsar's clients never put delayed messages into batches.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

from bindery_core.errors import BadRequest, TooLarge
from bindery_pulsar.message_codec import OutgoingMessage, check_size, encode_batch, encode_message, metadata_size
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.pulsar_messages_pb2 import RequestMark

BATCH_MESSAGES_MAX: Final = 1_000
"""Maximum number of messages in one entry. Source: the default of Pulsar's Java client."""
BATCH_SIZE_MAX: Final = 128 * 2**10
"""Approximate maximum bytes of one batch; a larger message gets an entry of its own. Source: Pulsar's Java client."""
ADD_CALL_SIZE_MAX: Final = 4 * 2**20
"""Maximum bytes of one call to the managed ledger. A larger request becomes several calls with separate outcomes."""
_SINGLE_OVERHEAD: Final = 32
"""Maximum bytes that a message needs in a batch in addition to key, properties and payload."""


class EntryPlan(NamedTuple):
    """One entry to be written."""

    indexes: tuple[int, ...]
    """Indexes of its messages in the request, ascending. One index: a single message; more: a batch."""


def plan_entries(
    messages: Sequence[OutgoingMessage],
    *,
    batch: bool = True,
    messages_max: int = BATCH_MESSAGES_MAX,
    size_max: int = BATCH_SIZE_MAX,
) -> list[EntryPlan]:
    """Split messages into entries of at most `messages_max` messages and about `size_max` bytes.

    Entries keep the order of the request, so a change of key ends a batch. `batch=False`: one entry per message.
    Raises TooLarge with the `index` of the message.
    """
    for index, message in enumerate(messages):
        try:
            check_size(message)
        except TooLarge as error:
            raise TooLarge(error.message, index=index, **error.facts) from error
    if not batch:
        return [EntryPlan((index,)) for index in range(len(messages))]
    plans: list[EntryPlan] = []
    for run in _runs(messages):
        plans.extend(_cut(messages, run, messages_max=messages_max, size_max=size_max))
    return plans


def encode_entries(
    messages: Sequence[OutgoingMessage],
    plan: Sequence[EntryPlan],
    *,
    producer_name: str,
    publish_time_ms: int,
    sequence_id: int,
    marks: Sequence[RequestMark] | None = None,
) -> list[bytes]:
    """Return the bytes of the entries, for `ManagedLedger.add_many`.

    A message without a sequence id gets `sequence_id` plus its index in the request. `marks`: one per entry. Raises
    BadRequest, with the `index` of the message, for invalid Unicode (a lone surrogate) and for numbers out of range.
    """
    entries: list[bytes] = []
    for place, (indexes,) in enumerate(plan):
        mark = None if marks is None else marks[place]
        chosen = [messages[index] for index in indexes]
        numbers = [
            sequence_id + index if message.sequence_id is None else message.sequence_id
            for index, message in zip(indexes, chosen, strict=True)
        ]
        try:
            if len(chosen) == 1:
                entry = encode_message(
                    chosen[0],
                    producer_name=producer_name,
                    publish_time_ms=publish_time_ms,
                    sequence_id=numbers[0],
                    mark=mark,
                )
            else:
                entry = encode_batch(
                    chosen,
                    producer_name=producer_name,
                    publish_time_ms=publish_time_ms,
                    sequence_ids=numbers,
                    mark=mark,
                )
        except ValueError as error:
            culprit = _first_that_fails(chosen, numbers)
            raise BadRequest("message cannot be encoded", index=indexes[culprit], why=str(error)[:200]) from error
        entries.append(entry)
    return entries


def _first_that_fails(messages: Sequence[OutgoingMessage], sequence_ids: Sequence[int]) -> int:
    """Return the index of the message that cannot be encoded; 0 if the cause is common to all."""
    for place, (message, sequence_id) in enumerate(zip(messages, sequence_ids, strict=True)):
        try:
            encode_message(message, producer_name="p", publish_time_ms=0, sequence_id=sequence_id)
        except ValueError:
            return place
    return 0


def message_ids(plan: Sequence[EntryPlan], positions: Sequence[Position], *, partition: int = -1) -> list[MessageId]:
    """Return the message ids in the order of the request. `positions`: one per entry, in the order of the plan."""
    ids: dict[int, MessageId] = {}
    for (indexes,), (ledger_id, entry_id) in zip(plan, positions, strict=True):
        if len(indexes) == 1:
            ids[indexes[0]] = MessageId(ledger_id, entry_id, -1, partition)
        else:
            for batch_index, index in enumerate(indexes):
                ids[index] = MessageId(ledger_id, entry_id, batch_index, partition)
    return [ids[index] for index in range(len(ids))]


def _dispatch_key(message: OutgoingMessage) -> Hashable:
    """Return the attributes that all messages of one entry have in common."""
    return message.key, message.ordering_key, message.tags if message.properties else frozenset()


def _runs(messages: Sequence[OutgoingMessage]) -> Iterator[list[int]]:
    """Yield the indexes of consecutive messages with the same dispatch key; a delayed message is alone."""
    run: list[int] = []
    last: Hashable = None
    is_delayed = False
    for index, message in enumerate(messages):
        key = _dispatch_key(message)
        was_delayed, is_delayed = is_delayed, message.deliver_at_ms is not None
        if run and (is_delayed or was_delayed or key != last):
            yield run
            run = []
        last = key
        run.append(index)
    if run:
        yield run


def _cut(
    messages: Sequence[OutgoingMessage], run: list[int], *, messages_max: int, size_max: int
) -> Iterator[EntryPlan]:
    """Cut a run into entries within the limits. A message above `size_max` gets an entry of its own."""
    first = size = 0
    for place, index in enumerate(run):
        message = messages[index]
        message_size = len(message.payload) + _SINGLE_OVERHEAD
        if message.properties or message.key:
            message_size += metadata_size(message)
        if place > first and (size + message_size > size_max or place - first >= messages_max):
            yield EntryPlan(tuple(run[first:place]))
            first, size = place, 0
        size += message_size
    yield EntryPlan(tuple(run[first:]))


def parts_of(entries: Sequence[bytes], size_max: int = ADD_CALL_SIZE_MAX) -> list[tuple[int, int]]:
    """Return (start, end) of runs of entries within `size_max` bytes; each run has at least one entry."""
    parts: list[tuple[int, int]] = []
    start = size = 0
    for index, entry in enumerate(entries):
        if index > start and size + len(entry) > size_max:
            parts.append((start, index))
            start, size = index, 0
        size += len(entry)
    parts.append((start, len(entries)))
    return parts

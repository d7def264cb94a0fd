"""Publish requests that a client may repeat, so that none of their messages is stored twice.

A request is recognized by its idempotency key, its messages by producer and sequence id (`bindery_broker.producers`).
Requests with the same key wait for each other, and so do those of one producer: while a message is being stored,
neither its success nor its failure may be assumed. A write continues if the client disconnects, so that its outcome is
recorded.

The policies of the topic are applied only to messages that are not stored yet, so that a repeated request gets its
answer whatever has changed since. Other requests with the same key, or of the same producer, wait meanwhile: else one
of them could be refused although the first one is being stored.

| outcome of an entry                | a repeated request                                                              |
|------------------------------------|---------------------------------------------------------------------------------|
| stored                             | gets the same id                                                                |
| refused: nothing was stored        | stores it                                                                       |
| unknown                            | waits until it is decided, then one of both                                     |
| the topic was lost to another      | is passed to the next owner, which reads what was stored. The first request is, |
| broker                             | too: it is not answered with an unknown outcome                                 |
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from bindery_core.errors import BadRequest, BinderyError, Conflict, NotThere, TopicFenced, TryAgain
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.pulsar_messages_pb2 import RequestMark

from bindery_broker.errors import IdempotencyKeyInUse
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.managed_ledger import ManagedLedger, WallClock
from bindery_broker.producers.deduplication import Deduplication
from bindery_broker.producers.keys import RequestKey
from bindery_broker.producers.sequences import Place, Verdict
from bindery_broker.topics.batching import EntryPlan, encode_entries, parts_of, plan_entries

WAIT_S_MAX: Final = 10.0
"""Maximum seconds that a request waits for another one with the same key, or of the same producer."""
Admit = Callable[[Sequence[OutgoingMessage]], Awaitable[None]]
"""Returns once the messages may be stored, or raises the error with which they are refused."""
Check = Callable[[], None]
"""Raises the error with which messages are refused that are about to be stored."""
UNKNOWN_ID: Final = MessageId(-1, -1)
"""Id in the answer for a message that was stored before, and whose id is not remembered. Source: Pulsar's brokers."""
_REFUSALS: Final = (TryAgain, BadRequest, Conflict, NotThere)
"""Errors of a write that stored nothing."""


class OncePublisher:
    """Publishes to one loaded topic."""

    def __init__(
        self,
        ledger: ManagedLedger,
        deduplication: Deduplication,
        *,
        topic: str,
        partition: int,
        clock: WallClock,
        default_producer: str,
        on_stored: Callable[[int, int, int], None],
    ) -> None:
        """`on_stored`: takes the number of messages, of entries, and of their bytes, once they are stored."""
        self.deduplication = deduplication
        self._ledger = ledger
        self._topic = topic
        self._partition = partition
        self._clock = clock
        self._default_producer = default_producer
        self._on_stored = on_stored
        self._keys: KeyedLocks[bytes] = KeyedLocks()
        self._producers: KeyedLocks[str] = KeyedLocks()
        self._tasks: dict[asyncio.Task[list[MessageId | BinderyError]], None] = {}

    async def publish(
        self,
        messages: Sequence[OutgoingMessage],
        *,
        producer: str | None,
        request: RequestKey | None,
        sequenced: bool,
        sequence_id: int,
        batch: bool,
        admit: Admit | None = None,
        check: Check | None = None,
    ) -> list[MessageId | BinderyError]:
        """Store the messages that are not stored yet. Returns the id or the error of each.

        `sequenced`: whether the sequence ids of the producer count; messages without one get the next ones then, and
        else those from `sequence_id` on. `admit` is asked about those that are not stored yet; `check` is called before
        they are submitted, in the same turn.

        Raises an error that applies to all messages: IdempotencyKeyReused,
        IdempotencyKeyInUse, TooManyRequests, BadRequest for sequence ids that do not ascend, TopicFenced (repeat it at
        the next owner, also if something was stored), OutcomeUnknown (repeat it later), other TryAgain, and those of
        `admit`, after which nothing was stored by this call.
        """
        if sequenced:
            _check_order(messages)
        work = self._publish(messages, producer, request, sequenced, sequence_id, batch, admit, check)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: "asyncio.Task[list[MessageId | BinderyError]]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()  # reported to the caller, unless it was cancelled

    async def _publish(
        self,
        messages: Sequence[OutgoingMessage],
        producer: str | None,
        request: RequestKey | None,
        sequenced: bool,
        sequence_id: int,
        batch: bool,
        admit: Admit | None,
        check: Check | None,
    ) -> list[MessageId | BinderyError]:
        deduplication = self.deduplication
        async with AsyncExitStack() as stack:
            began = stack.enter_context(deduplication.write())
            try:
                async with asyncio.timeout(WAIT_S_MAX):
                    if request is not None:
                        await stack.enter_async_context(self._keys.hold(request.key))
                    if sequenced:
                        assert producer is not None
                        await stack.enter_async_context(self._producers.hold(producer))
            except TimeoutError:
                raise IdempotencyKeyInUse(
                    "another request with this idempotency key, or of this producer, is in progress; retry",
                    topic=self._topic,
                ) from None
            await deduplication.ready()
            now_ms = self._clock()
            known: list[MessageId | BinderyError | None] = [None] * len(messages)
            if request is not None:
                record = deduplication.keys.find(request, now_ms=now_ms)
                if record is None:
                    deduplication.keys.check_room(now_ms=now_ms)
                else:
                    for index, message_id in record.ids(self._partition).items():
                        known[index] = message_id
            if sequenced:
                assert producer is not None
                sequence_id = self._find_stored(messages, known, producer)
            missing = [index for index, message_id in enumerate(known) if message_id is None]
            if missing and admit is not None:
                await admit([messages[index] for index in missing])
                now_ms = self._clock()
            if missing:
                plan = _plan(messages, missing, batch=batch)
                marks = _marks(plan, request, sequenced=sequenced, count=len(messages))
                entries = encode_entries(
                    messages,
                    plan,
                    producer_name=producer or self._default_producer,
                    publish_time_ms=now_ms,
                    sequence_id=sequence_id,
                    marks=marks,
                )
                numbers = [
                    sequence_id + index if message.sequence_id is None else message.sequence_id
                    for index, message in enumerate(messages)
                ]
                counted = producer if sequenced else None
                if counted is not None:
                    deduplication.sequences.push(counted, numbers[missing[-1]], now_ms=now_ms)
                outcomes = await self._store(plan, entries, check)
                is_known = True
                for (indexes,), outcome in zip(plan, outcomes, strict=True):
                    if not isinstance(outcome, Position):
                        is_known = is_known and isinstance(outcome, _REFUSALS)
                        for index in indexes:
                            known[index] = outcome
                        continue
                    place = Place(numbers[indexes[0]], numbers[indexes[-1]], outcome, len(indexes))
                    deduplication.stored(
                        place, producer=counted, request=request, first=indexes[0], count=len(messages), now_ms=now_ms
                    )
                    for in_batch, index in enumerate(indexes):
                        in_batch = in_batch if len(indexes) > 1 else -1
                        known[index] = MessageId.of(outcome, batch_index=in_batch, partition=self._partition)
                if not is_known:
                    deduplication.unknown_since(began)
                elif counted is not None:
                    deduplication.sequences.reset(counted)
        return self._answer(known)

    def _find_stored(
        self, messages: Sequence[OutgoingMessage], known: list[MessageId | BinderyError | None], producer: str
    ) -> int:
        """Put the ids of messages that are stored already into `known`. Returns the sequence id of the first message if
        the messages have none."""
        sequences = self.deduplication.sequences
        sequences.reset(producer)  # no write is in progress
        for index, message in enumerate(messages):
            number = message.sequence_id
            if number is None or known[index] is not None:
                continue
            if sequences.verdict(producer, number) is Verdict.DUPLICATE:
                known[index] = sequences.message_id(producer, number, partition=self._partition) or UNKNOWN_ID
        return sequences.last_pushed(producer) + 1

    async def _store(
        self, plan: Sequence[EntryPlan], entries: Sequence[bytes], check: Check | None
    ) -> list[Position | BinderyError]:
        """Return the position or the error of each entry.

        Parts of a large request are stored one after another: if a later part were stored and an earlier one were not,
        the sequence ids of the earlier one would count as stored.
        """
        outcomes: list[Position | BinderyError] = []
        for start, end in parts_of(entries):
            part = entries[start:end]
            try:
                if check is not None:
                    check()
                outcomes += await self._ledger.submit_many(part)
            except BinderyError as error:
                outcomes += [error] * len(part)
                if end < len(entries):
                    rest = TryAgain("not stored, because an earlier part of the request was not", topic=self._topic)
                    outcomes += [rest] * (len(entries) - end)
                break
            messages_count = sum(len(entry.indexes) for entry in plan[start:end])
            self._on_stored(messages_count, len(part), sum(map(len, part)))
        return outcomes

    def _answer(self, known: Sequence[MessageId | BinderyError | None]) -> list[MessageId | BinderyError]:
        results = [result for result in known if result is not None]
        assert len(results) == len(known)
        errors = [result for result in results if isinstance(result, BinderyError)]
        for error in errors:
            if isinstance(error, TopicFenced):
                raise TopicFenced(error.message, **error.facts)
        if len(errors) == len(results):
            unknown = [error for error in errors if not isinstance(error, _REFUSALS)]
            raise (unknown or errors)[0]
        return results


def _check_order(messages: Sequence[OutgoingMessage]) -> None:
    last = -1
    given = 0
    for index, message in enumerate(messages):
        if message.sequence_id is None:
            continue
        given += 1
        if message.sequence_id <= last:
            raise BadRequest(
                "the sequence ids of a producer must ascend within a request",
                index=index,
                sequence_id=message.sequence_id,
            )
        last = message.sequence_id
    if given not in (0, len(messages)):
        raise BadRequest("give all messages of a producer's request a sequence id, or none", given=given)


def _plan(messages: Sequence[OutgoingMessage], missing: Sequence[int], *, batch: bool) -> list[EntryPlan]:
    """Plan entries for the missing messages. The messages of an entry are consecutive in the request."""
    if len(missing) == len(messages):
        return plan_entries(messages, batch=batch)
    plans: list[EntryPlan] = []
    start = 0
    for place, index in enumerate(missing):
        if place + 1 == len(missing) or missing[place + 1] != index + 1:
            first = missing[start]
            for (indexes,) in plan_entries(messages[first : index + 1], batch=batch):
                plans.append(EntryPlan(tuple(first + one for one in indexes)))
            start = place + 1
    return plans


def _marks(plan: Sequence[EntryPlan], request: RequestKey | None, *, sequenced: bool, count: int) -> list[RequestMark]:
    key, content = (None, None) if request is None else request
    return [
        RequestMark(sequenced=sequenced, key=key, content=content, first=indexes[0], count=count) for (indexes,) in plan
    ]

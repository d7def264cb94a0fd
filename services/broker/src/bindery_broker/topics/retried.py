"""A subscription together with the subscription of the same name of its retry topic, as one for its consumers.

| operation          | with a retry topic                                                                      |
|--------------------|-----------------------------------------------------------------------------------------|
| receive            | what is due in the retry topic, then the topic; a call that waits, waits for both       |
| ack, nack, retry   | by the ledger of each id: those of ledgers of the retry topic go to its subscription    |
| explain            | the same                                                                                |
| leave              | both                                                                                    |

A call that waits for both is ended as soon as one of them has messages. What the other one granted meanwhile goes into
the same answer if that leaves it within its limits, else it is handed back, which does not count as a redelivery. No
message stays leased by a call that did not return it: also not after an error, a cancellation or a disconnection.

The retry topic may belong to another broker (`retry_sides`): then a call is one here and one there.

An error of the retry topic never keeps messages of the topic back: it is raised by calls that found no message. Without
a retry topic, and with types other than shared and key_shared, a call is one call of the subscription.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NamedTuple

import msgspec.structs
from bindery_core.errors import BadRequest, BinderyError
from bindery_kit.observability.logs import get_logger
from bindery_pulsar.message_id import MessageId

from bindery_broker.dispatch.sessions import Session
from bindery_broker.errors import RetryTopicAway, UnknownMessages
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.dispatch_loop import Deliveries
from bindery_broker.subscriptions.explaining import Reason
from bindery_broker.subscriptions.moving import MoveResult, RetryTo
from bindery_broker.subscriptions.reading import messages_of
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.retry_sides import RetrySide
from bindery_broker.topics.retry_topics import Found, RetryLink, RetryTopics, State, check_receives_retries
from bindery_broker.topics.topic import Topic

NO_WAIT: Final = 0.0
EARLY_S: Final = 0.25
"""A call that waits for the retry topic ends early if more than this is left of its seconds."""
LOOK_AGAIN_S: Final = 1.0
"""Seconds after which a waiting call uses a retry topic again that failed."""

log = get_logger(__name__)


class Part(NamedTuple):
    """Messages of one topic in an answer."""

    partition: int
    deliveries: Deliveries


class _EndedEarly(RetryTopicAway):
    """The call that waited for the retry topic has ended without a message: its broker is stopping, or lets calls wait
    for a shorter time."""


class _Outcome(NamedTuple):
    parts: list[Part]
    """Empty: the topic was not asked."""
    must_continue: bool = False
    """Whether the call continues if it got nothing: the retry topic has appeared, or cannot be used any more."""
    failure: BinderyError | None = None
    """Why nothing came from the retry topic."""


class RetriedSubscription:
    """Made for one call; what is known of the retry topic is kept by `RetryTopics`."""

    __slots__ = ("_link", "_main", "_retry_topics", "_topic")

    def __init__(self, topic: Topic, main: Subscription, retry_topics: RetryTopics, *, is_alone: bool = False) -> None:
        """`is_alone`: without the retry topic, because the caller uses that itself."""
        self._topic = topic
        self._main = main
        self._retry_topics = retry_topics
        self._link = RetryLink(None, None, main.name) if is_alone else retry_topics.link(topic, main)

    @property
    def loaded(self) -> Found | None:
        """The retry topic and its subscription, if there is one and it is loaded here."""
        return self._retry_topics.loaded(self._link)

    @property
    def dead_letters(self) -> Topic | None:
        """The dead-letter topic with the default name, if it is loaded."""
        return self._retry_topics.dead_letters(self._link)

    async def find_dead_letters(self) -> Topic | None:
        """Return the dead-letter topic with the default name, also if it is not loaded; None: there is none here."""
        return await self._retry_topics.find_dead_letters(self._link)

    async def retry_backlog(self) -> int:
        """Return the number of entries that the subscription of the retry topic has not acknowledged; 0: there is none.

        Errors as `RetryTopics.find`, and TryAgain if the owner of the retry topic does not answer.
        """
        retry = await self._retry_topics.find(self._link)
        return 0 if retry is None else await retry.backlog_entries()

    # -- consuming -----------------------------------------------------------------------------------------------

    async def receive(
        self,
        request: ReceiveRequest,
        *,
        kind: SubscriptionType,
        charge: Charge,
        client: ClientWatch | None = None,
    ) -> list[Part]:
        """Return messages as `Subscription.receive` does, those of the retry topic first. Raises its errors."""
        link = self._link
        is_absent = request.wait_s <= 0 and request.request_id is None and self._retry_topics.is_absent(link)
        if is_absent or link.name is None or kind not in ("shared", "key_shared"):
            deliveries, _ = await self._main.receive(request, kind=kind, charge=charge, client=client)
            return [Part(self._topic.partition, deliveries)]
        if request.request_id is None:
            return await self._receive(request, kind=kind, charge=charge, client=client)
        return await self._receive_once(request, request.request_id, kind=kind, charge=charge, client=client)

    async def _receive_once(
        self,
        request: ReceiveRequest,
        request_id: str,
        *,
        kind: SubscriptionType,
        charge: Charge,
        client: ClientWatch | None,
    ) -> list[Part]:
        """Wait for an earlier call with the same request id, then repeat its answer, or receive."""
        in_progress = self._link.in_progress
        key = (self._topic.name, request.consumer, request_id)
        deadline = self._retry_topics.now() + request.wait_s
        while (running := in_progress.get(key)) is not None:
            left_s = deadline - self._retry_topics.now()
            if client is not None:
                client.look()
            if left_s <= 0 or (client is not None and client.is_gone):
                return []
            await asyncio.wait({running}, timeout=left_s)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        in_progress[key] = done
        try:
            retry = await self._holding(request.consumer, request_id)
            main_holds = self._main.still_holds(request.consumer, request_id)
            retry_holds = retry is not None
            if not main_holds and not retry_holds:
                return await self._receive(request, kind=kind, charge=charge, client=client)
            at_once = msgspec.structs.replace(request, wait_s=NO_WAIT)
            parts: list[Part] = []
            if retry is not None:
                try:
                    deliveries = await retry.receive(at_once, kind=kind, charge=charge)
                    parts.append(Part(retry.partition, deliveries))
                except BinderyError:
                    if not main_holds:
                        raise
            if main_holds:
                extra = charge.another()
                try:
                    parts.append(await self._receive_main(at_once, kind=kind, charge=extra, client=client))
                    _merge(charge, extra)
                finally:
                    extra.release()
            return parts
        finally:
            del in_progress[key]
            done.set_result(None)

    async def _holding(self, consumer: str, request_id: str) -> RetrySide | None:
        """Return the retry topic if the consumer holds messages there of an earlier answer to the request id.

        A retry topic that fails holds none: its messages come again later.
        """
        try:
            retry = await self._retry_topics.find(self._link)
            return retry if retry is not None and await retry.still_holds(consumer, request_id) else None
        except BinderyError:
            return None

    async def _receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None
    ) -> list[Part]:
        deadline = self._retry_topics.now() + request.wait_s
        failure: BinderyError | None = None
        while True:
            found: RetrySide | None = None
            if failure is None:
                try:
                    found = await self._retry_topics.find(self._link)
                except BinderyError as error:
                    failure = error
            if found is None and failure is None:
                outcome = await self._receive_alone(request, kind=kind, charge=charge, client=client)
            elif found is None:  # look again soon: another broker may own the retry topic then
                short = msgspec.structs.replace(request, wait_s=min(request.wait_s, LOOK_AGAIN_S))
                outcome = await self._receive_alone(short, kind=kind, charge=charge, client=client)
                outcome = outcome._replace(must_continue=True)
            else:
                with found.in_use():
                    outcome = await self._receive_both(request, found, kind=kind, charge=charge, client=client)
                failure = outcome.failure
            if any(part.deliveries for part in outcome.parts) or (client is not None and client.is_gone):
                return outcome.parts
            has_asked = bool(outcome.parts)
            left_s = 0.0 if self._main.is_draining else max(0.0, deadline - self._retry_topics.now())
            if not outcome.must_continue or (has_asked and not left_s):
                if failure is not None and not isinstance(failure, _EndedEarly):
                    raise failure
                return outcome.parts
            if found is None:
                failure = None  # look for the retry topic
            request = msgspec.structs.replace(request, wait_s=left_s, redeliver=request.redeliver and not has_asked)

    async def _receive_main(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None
    ) -> Part:
        deliveries, _ = await self._main.receive(request, kind=kind, charge=charge, client=client)
        return Part(self._topic.partition, deliveries)

    async def _receive_alone(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None
    ) -> _Outcome:
        """Receive from the topic until a retry topic appears."""
        if request.wait_s <= 0:
            return _Outcome([await self._receive_main(request, kind=kind, charge=charge, client=client)])
        watch = client or ClientWatch()
        has_appeared = False

        def end_wait() -> None:
            nonlocal has_appeared
            has_appeared = True
            watch.end_wait()

        self._link.waiting[end_wait] = None
        try:
            part = await self._receive_main(request, kind=kind, charge=charge, client=watch)
        finally:
            del self._link.waiting[end_wait]
        return _Outcome([part], must_continue=has_appeared)

    async def _receive_both(
        self,
        request: ReceiveRequest,
        retry: RetrySide,
        *,
        kind: SubscriptionType,
        charge: Charge,
        client: ClientWatch | None,
    ) -> _Outcome:
        self._main.attend(request, kind=kind)  # a consumer that the topic refuses gets nothing from the retry topic
        extra = charge.another()
        try:
            retry_request = request
            if retry.may_have_messages(request.consumer) or request.redeliver:
                at_once = msgspec.structs.replace(request, wait_s=NO_WAIT)
                try:
                    due = await retry.receive(at_once, kind=kind, charge=extra)
                except BinderyError as error:
                    return _Outcome([], must_continue=True, failure=error)
                if due and client is not None and client.is_gone:
                    retry.hand_back(request.consumer, due)
                    return _Outcome([Part(retry.partition, [])])
                if due:
                    return _Outcome(await self._fill(at_once, retry, due, extra, kind=kind, charge=charge))
                retry_request = msgspec.structs.replace(request, redeliver=False)
            if request.wait_s <= 0 or self._main.dispatcher.ready_count:
                at_once = msgspec.structs.replace(request, wait_s=NO_WAIT)
                part = await self._receive_main(at_once, kind=kind, charge=charge, client=client)
                if part.deliveries or request.wait_s <= 0:
                    return _Outcome([part])
                request = msgspec.structs.replace(request, redeliver=False)
            return await self._race(request, retry_request, retry, extra, kind=kind, charge=charge, client=client)
        finally:
            extra.release()

    async def _fill(
        self,
        request: ReceiveRequest,
        retry: RetrySide,
        due: Deliveries,
        extra: Charge,
        *,
        kind: SubscriptionType,
        charge: Charge,
    ) -> list[Part]:
        """Add messages of the topic to those of the retry topic, as many as fit into the answer."""
        room, size = request.count_max - _count(due), request.bytes_max - extra.size
        more: Deliveries = []
        try:
            if room > 0 and size > 0:
                wanted = msgspec.structs.replace(request, count_max=room, bytes_max=size)
                more = (await self._receive_main(wanted, kind=kind, charge=charge, client=None)).deliveries
            else:
                self._main.count_call(request.consumer)
        except BinderyError:
            charge.release()  # the next call gets the error, if it finds nothing else
        except BaseException:
            retry.hand_back(request.consumer, due)
            raise
        return self._join(request, retry, due, extra, more, charge)

    async def _race(
        self,
        request: ReceiveRequest,
        retry_request: ReceiveRequest,
        side: RetrySide,
        extra: Charge,
        *,
        kind: SubscriptionType,
        charge: Charge,
        client: ClientWatch | None,
    ) -> _Outcome:
        """Wait for both until one of them has messages."""
        main_watch, retry_watch = ClientWatch(), ClientWatch()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        main = loop.create_task(self._main.receive(request, kind=kind, charge=charge, client=main_watch))
        retry = loop.create_task(side.receive(retry_request, kind=kind, charge=extra, client=retry_watch))

        def end_both() -> None:
            main_watch.set_gone()
            retry_watch.set_gone()

        if client is not None:
            client.begin_wait(end_both)
        try:
            await asyncio.wait((main, retry), return_when=asyncio.FIRST_COMPLETED)
            left_s = began_s + request.wait_s - loop.time()
            has_ended_early = (
                retry.done()
                and left_s > EARLY_S
                and retry.exception() is None
                and not retry.result()
                and not self._main.is_draining
                and self._main.sessions.get(request.consumer) is not None  # it has not left
            )
            if has_ended_early:
                main_watch.end_wait()
            # For the one that still waits it is as if its client were gone: what it gets now, it hands back itself.
            if not retry.done():
                retry_watch.set_gone()
            elif retry.exception() is None:
                main_watch.set_gone()
            else:
                main_watch.end_wait()
            await asyncio.wait((main, retry))
        except BaseException:
            main.cancel()
            retry.cancel()
            await asyncio.gather(main, retry, return_exceptions=True)
            self._hand_back(request, side, _result(retry), _result_of_main(main))
            raise
        finally:
            if client is not None:
                client.waited()
        due, more = _result(retry), _result_of_main(main)
        error, failure = main.exception(), retry.exception()
        is_gone = client is not None and client.is_gone
        if error is not None or is_gone or not isinstance(failure, BinderyError | None):
            self._hand_back(request, side, due, more)
            due, more = [], []
            charge.release()
            extra.release()
            if not is_gone and (raised := error or failure) is not None:
                raise raised
        parts = self._join(request, side, due, extra, more, charge)
        if has_ended_early and not more:
            return _Outcome(parts, must_continue=True, failure=_EndedEarly())
        if isinstance(failure, BinderyError):
            return _Outcome(parts, must_continue=True, failure=failure)
        return _Outcome(parts)

    def _join(
        self,
        request: ReceiveRequest,
        retry: RetrySide,
        due: Deliveries,
        extra: Charge,
        more: Deliveries,
        charge: Charge,
    ) -> list[Part]:
        """Return what both topics granted as one answer, whose bytes `charge` then holds.

        What the topic granted is handed back if both together exceed the limits of the request.
        """
        if due and more:
            is_too_much = extra.size + charge.size > request.bytes_max
            if is_too_much or _count(due) + _count(more) > request.count_max:
                self._main.hand_back(request.consumer, more)
                more = []
                charge.release()
        _merge(charge, extra)
        parts = [Part(retry.partition, due)] if due else []
        return [*parts, Part(self._topic.partition, more)] if more or not parts else parts

    def _hand_back(self, request: ReceiveRequest, retry: RetrySide, due: Deliveries, more: Deliveries) -> None:
        retry.hand_back(request.consumer, due)
        self._main.hand_back(request.consumer, more)

    async def leave(self, consumer: str) -> bool:
        """End a consumer's session in both. Returns False if there was none.

        Of another broker that does not answer, the session ends as if the consumer had died.
        """
        found = self.loaded
        has_left = self._main.leave(consumer)
        if found is not None:
            return found.subscription.leave(consumer) or has_left
        if self._link.state in (State.ELSEWHERE, State.UNKNOWN):
            try:
                retry = await self._retry_topics.find(self._link)
                has_left = (retry is not None and await retry.leave(consumer)) or has_left
            except BinderyError as error:
                log.warning("consumer_stays_in_retry_topic", topic=str(self._link.name), error=str(error))
        return has_left

    # -- messages by id ------------------------------------------------------------------------------------------

    def ack(self, ids: Sequence[MessageId], *, consumer: str | None = None) -> Coroutine[Any, Any, None]:
        """Acknowledge messages; durable on return.

        Raises UnknownMessages, and acknowledges none, if an id names no message of either topic. After another error
        those of one topic may be acknowledged.
        """
        if self._link.state is State.ABSENT:  # most calls
            return self._main.ack(ids, consumer=consumer)
        return self._ack_in_both(ids, consumer)

    async def _ack_in_both(self, ids: Sequence[MessageId], consumer: str | None) -> None:
        main_ids, retry_ids, retry = await self._route(ids)
        if retry is None or not retry_ids:
            await self._main.ack(ids, consumer=consumer)
            return
        with retry.in_use():
            unknown = [*await self._main.unknown(main_ids), *await retry.unknown(retry_ids)]
            if unknown:
                raise UnknownMessages.of(unknown, count=len(ids))
            if main_ids:
                await self._main.ack(main_ids, consumer=consumer)
            elif consumer is not None:
                self._main.touch(consumer)
            await retry.ack(retry_ids, consumer=consumer)

    async def ack_cumulative(self, last: MessageId, *, consumer: str | None = None) -> None:
        """As `Subscription.ack_cumulative`. Raises BadRequest for a message of the retry topic."""
        _, retry_ids, _ = await self._route([last])
        if retry_ids:
            raise BadRequest(
                "messages of the retry topic are acknowledged singly, not cumulatively", message_id=str(last)
            )
        await self._main.ack_cumulative(last, consumer=consumer)

    async def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None = None) -> list[MessageId]:
        """As `Subscription.nack`; those of the topic come first."""
        main_ids, retry_ids, retry = await self._route(ids)
        returned = self._main.nack(main_ids, delay_s=delay_s, consumer=consumer)
        if retry is not None and retry_ids:
            returned += await retry.nack(retry_ids, delay_s=delay_s, consumer=consumer)
        return returned

    async def retry(
        self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None = None
    ) -> MoveResult:
        """As `Subscription.retry`. Messages of the retry topic go to its end again; the order of `ids` is kept.

        If one part of the messages cannot be moved, the following ones are not moved either. Raises BadRequest, with
        nothing done, if no consumer would receive the copies (`check_receives_retries`).
        """
        check_receives_retries(self._topic.name, self._main)
        main_ids, retry_ids, retry = await self._route(ids)
        if retry is None or not retry_ids:
            return await self._main.retry(ids, to, charge=charge, consumer=consumer)
        result = MoveResult([], [], [])
        with retry.in_use():
            unknown = [*await self._main.unknown(main_ids), *await retry.unknown(retry_ids)]
            if unknown:
                raise UnknownMessages.of(unknown, count=len(ids))
            of_retry = frozenset(retry_ids)
            failure: BinderyError | None = None
            for is_retry, some in itertools.groupby(ids, of_retry.__contains__):
                part = list(some)
                if failure is not None:
                    result.failed.extend((one, failure) for one in part)
                    continue
                try:
                    done = await (retry if is_retry else self._main).retry(part, to, charge=charge, consumer=consumer)
                except BinderyError as raised:
                    if not result.moved and not result.acknowledged and not result.failed:
                        raise
                    result.failed.extend((one, raised) for one in part)
                    failure = raised
                    continue
                charge.release()
                result.moved.extend(done.moved)
                result.acknowledged.extend(done.acknowledged)
                result.failed.extend(done.failed)
                if done.failed and done.failed[-1][0].position == part[-1].position:
                    error = done.failed[-1][1]
                    failure = None if isinstance(error, BadRequest) else error  # that is of this message alone
        return result

    async def explain(self, message_id: MessageId, *, consumer: str | None = None) -> Reason:
        """As `Subscription.explain`."""
        _, retry_ids, retry = await self._route([message_id])
        side = retry if retry is not None and retry_ids else self._main
        return await side.explain(message_id, consumer=consumer)

    def blocked(self, consumer: str) -> Reason | None:
        """As `Subscription.blocked`, for the messages that are not retried."""
        return self._main.blocked(consumer)

    async def _route(self, ids: Sequence[MessageId]) -> tuple[Sequence[MessageId], list[MessageId], RetrySide | None]:
        """Return the ids of the topic, and those of its retry topic, which is opened if there may be any.

        An id that belongs to neither of them is one of the topic, unless it may belong to a ledger that the retry topic
        has trimmed.
        """
        if self._link.name is None or self._link.state is State.ABSENT:
            return ids, [], None
        main = self._topic.ledger
        foreign = {ledger_id for ledger_id in {one.ledger_id for one in ids} if not main.has_ledger(ledger_id)}
        retry = await self._retry_topics.find(self._link) if foreign else None
        if retry is None:
            return ids, [], None
        of_retry = await retry.claimed(foreign, main_first=main.first_position.ledger_id)
        return (
            [one for one in ids if one.ledger_id not in of_retry],
            [one for one in ids if one.ledger_id in of_retry],
            retry,
        )


def _result(task: "asyncio.Task[Deliveries]") -> Deliveries:
    """Return the messages that a call has got, if any."""
    return [] if not task.done() or task.cancelled() or task.exception() is not None else task.result()


def _result_of_main(task: "asyncio.Task[tuple[Deliveries, Session]]") -> Deliveries:
    return [] if not task.done() or task.cancelled() or task.exception() is not None else task.result()[0]


def _count(deliveries: Deliveries) -> int:
    return sum(len(messages_of(delivery)) for delivery in deliveries)


def _merge(charge: Charge, extra: Charge) -> None:
    """Move the bytes of `extra` to `charge`."""
    size = charge.size + extra.size
    extra.release()
    charge.keep(size)

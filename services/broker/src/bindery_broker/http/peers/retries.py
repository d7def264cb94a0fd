"""Subscriptions of retry topics that other brokers own: the calls of `Subscription`, by requests to their owner.

The owner handles the calls as those of any client, so that leases, redelivery counts and statistics are there. Each
receive has a request id, by which its messages are handed back if this broker cannot deliver them: what a call has got
that another topic has outrun, or whose client has gone.

A waiting call gets one message, because it holds no room for more in the budget of responses while it waits. The next
call, which does not wait, gets the others.
"""

import asyncio
import bisect
import itertools
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from bindery_core.backoff import Backoff
from bindery_core.errors import (
    BadRequest,
    BinderyError,
    NoSuchSubscription,
    NoSuchTopic,
    OutcomeUnknown,
    TooManyRequests,
    TryAgain,
)
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import get_logger
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName

from bindery_broker.dispatch.item import NOT_IN_BATCH, SINGLE, Delivery, bits_of
from bindery_broker.errors import NotOwner, ResponsesFull, RetryTopicAway
from bindery_broker.http.exchange import PARTITION_HEADER
from bindery_broker.http.paths import path_of
from bindery_broker.http.peers.messages import RemoteMessage, decode_messages
from bindery_broker.http.peers.problems import remote_error
from bindery_broker.http.proxy import Proxy
from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.dispatch_loop import Deliveries
from bindery_broker.subscriptions.explaining import Reason
from bindery_broker.subscriptions.moving import MovedMessage, MoveResult, RetryTo
from bindery_broker.subscriptions.reading import MESSAGE_OVERHEAD
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.topics.retry_sides import LedgerIds

QUIET_S: Final = 0.1
"""Seconds for which an owner that had no message is not asked again by calls that do not wait."""
ANSWER_S: Final = 10.0
"""Maximum seconds to wait for an answer, in addition to the time for which a call waits for messages."""
AT_ONCE_S: Final = 2.0
"""The same for a receive that does not wait: messages of the topic wait for it."""
RETRY_S: Final = 45.0
"""The same for a retry, which may move messages to a third broker."""
SILENT_S: Final = Backoff(1.0, 10.0)
"""How long an owner that did not answer is not asked by receives that do not wait, by the number of failures."""
WAITING_MAX: Final = 400
"""Maximum number of calls that wait in other brokers. Others wait here, and ask the next time."""
CONSUMERS_MAX: Final = 10_000
"""Maximum number of consumers of which it is remembered when the owner had no messages for them."""
BYTES_MAX: Final = 2**20
"""Maximum bytes of messages of one call, unless the first is larger. While their JSON is decoded, they can take several
times as much."""
LEDGERS_S: Final = 1.0
"""Minimum seconds between two reads of the list of ledgers, for ids that are not in it."""
_NDJSON: Final = b"application/x-ndjson"
T = TypeVar("T")

log = get_logger(__name__)


class _Error(msgspec.Struct):
    code: str
    status: int
    detail: str


class _Moved(msgspec.Struct):
    message_id: str
    topic: str
    copy_id: str
    reconsume_times: int


class _NotMoved(msgspec.Struct):
    message_id: str
    error: _Error


class _Retried(msgspec.Struct):
    """`Retried` of the API."""

    moved: list[_Moved]
    acknowledged: list[str]
    failed: list[_NotMoved]


class _Returned(msgspec.Struct):
    """`Returned` of the API."""

    returned: list[str]


class _Unknown(msgspec.Struct):
    """`UnknownIds` of the API."""

    unknown: list[str]


class _Held(msgspec.Struct):
    """`Held` of the API."""

    held: bool


class _Why(msgspec.Struct):
    """`MessageExplanation` of the API."""

    code: str
    detail: str
    ends_in_ms: int | None = None
    consumer: str | None = None
    policy: str | None = None


class _Explanation(msgspec.Struct):
    message: _Why


class _Subscription(msgspec.Struct):
    backlog_entries: int


class _About(msgspec.Struct):
    subscription: _Subscription


class _Got(list[Delivery[Sequence[Any]]]):
    """Messages of one receive, and the id with which they are handed back."""

    request_id: str


class RemoteRetries:
    """`topics.retry_sides.Peers` over the HTTP ports of the other brokers. `prefix`: begins the ids of its requests,
    and of no other process."""

    def __init__(self, proxy: Proxy, *, prefix: str, now: MonotonicClock) -> None:
        self._proxy = proxy
        self._prefix = prefix
        self._now = now
        self._serials = itertools.count(1)
        self.waiting = 0
        """Number of calls that wait in other brokers."""
        self._handing_back: dict[tuple[str, str], asyncio.Task[None]] = {}
        """What is being handed back, by consumer and request id."""

    def retry_side(
        self,
        url: str,
        topic: TopicName,
        subscription: str,
        *,
        ledger_ids: LedgerIds,
        on_lost: Callable[[], None],
        is_partition: bool = False,
    ) -> "RemoteRetrySide":
        return RemoteRetrySide(
            self,
            self._proxy,
            url,
            topic,
            subscription,
            ledger_ids=ledger_ids,
            on_lost=on_lost,
            now=self._now,
            is_partition=is_partition,
        )

    async def close(self) -> None:
        """Hand back what is being handed back."""
        await asyncio.gather(*self._handing_back.values(), return_exceptions=True)

    def begin_hand_back(self, consumer: str, request_id: str, call: Coroutine[Any, Any, None]) -> None:
        key = consumer, request_id
        task = asyncio.get_running_loop().create_task(call)
        self._handing_back[key] = task

        def done(ended: asyncio.Task[None]) -> None:
            if self._handing_back.get(key) is ended:
                del self._handing_back[key]

        task.add_done_callback(done)

    async def handed_back(self, consumer: str, request_id: str) -> None:
        """Return once what an earlier call with this request id has got is handed back."""
        task = self._handing_back.get((consumer, request_id))
        if task is not None:
            await asyncio.wait({task})

    def next_id(self) -> str:
        return f"{self._prefix}-{next(self._serials)}"


class RemoteRetrySide:
    """`topics.retry_sides.RetrySide` of a topic that the broker at `url` owns."""

    def __init__(
        self,
        owner: RemoteRetries,
        proxy: Proxy,
        url: str,
        topic: TopicName,
        subscription: str,
        *,
        ledger_ids: LedgerIds,
        on_lost: Callable[[], None],
        now: MonotonicClock,
        is_partition: bool = False,
    ) -> None:
        self._what = "partition" if is_partition else "retry topic"
        self._headers = ((PARTITION_HEADER, b"1"),) if is_partition else ()
        self._owner = owner
        self._proxy = proxy
        self._url = url
        self._topic = topic
        self._path = f"{path_of(topic)}/subscriptions/{quote(subscription, safe='')}"
        self._read_ledger_ids = ledger_ids
        self._on_lost = on_lost
        self._now = now
        self._quiet_until: dict[str, float] = {}
        """By consumer: until when the owner is not asked without a wait."""
        self._silent_until = 0.0
        """The same for all of them, after it did not answer."""
        self._failures = 0
        self._ledger_ids: list[int] = []
        self._ledgers_read_at = float("-inf")

    @property
    def partition(self) -> int:
        return self._topic.partition

    async def receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None = None
    ) -> Deliveries:
        """See `Subscription.receive`. Only a call that waits may have a `client`."""
        if client is not None and client.is_gone:
            return []
        request_id = request.request_id or self._owner.next_id()
        await self._owner.handed_back(request.consumer, request_id)
        if request.wait_s > 0 and self._owner.waiting >= WAITING_MAX:
            await self._wait_here(request.wait_s, client)
            return []
        body = _receive_body(request, kind, request_id)
        if request.wait_s > 0:
            body |= {"max": 1, "max_bytes": 1}
        else:
            if not charge.take(least=ENTRY_SIZE_MAX, most=ENTRY_SIZE_MAX):
                return []
            body["max_bytes"] = min(request.bytes_max, BYTES_MAX)
        try:
            answer = await self._unless_gone(body, request.wait_s, client)
            if answer is None:
                self._hand_back_soon(request.consumer, request_id)
                charge.release()
                return []
            messages = _read(lambda: decode_messages(answer))
        except BaseException as error:
            charge.release()
            if not isinstance(error, BinderyError) or isinstance(error, OutcomeUnknown):
                self._hand_back_soon(request.consumer, request_id)
            if isinstance(error, OutcomeUnknown):
                raise self._no_answer() from error
            raise
        self._failures = 0
        if not messages and request.wait_s <= 0:
            self._quiet(request.consumer, QUIET_S)
        for one in messages:
            if one.id.ledger_id not in self._ledger_ids:
                bisect.insort(self._ledger_ids, one.id.ledger_id)
        charge.keep(sum(one.message.size + MESSAGE_OVERHEAD for one in messages))
        got = _Got(map(_delivery, messages))
        got.request_id = request_id
        return got

    async def _unless_gone(self, body: dict[str, Any], wait_s: float, client: ClientWatch | None) -> bytes | None:
        """Return the answer; None if the client goes before."""
        answer_s = ANSWER_S if wait_s > 0 else AT_ONCE_S
        call = self._call("POST", "/receive?create=false", body, timeout_s=wait_s + answer_s, is_waiting=wait_s > 0)
        if wait_s <= 0 or client is None:
            return await call
        self._owner.waiting += 1
        task = asyncio.get_running_loop().create_task(call)

        def stop() -> None:
            task.cancel()

        client.begin_wait(stop)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                raise
            return None
        finally:
            self._owner.waiting -= 1
            client.waited()

    async def _wait_here(self, wait_s: float, client: ClientWatch | None) -> None:
        """Wait without a request, because too many wait already. The next call asks."""
        over = asyncio.Event()
        if client is not None:
            client.begin_wait(over.set)
        try:
            async with asyncio.timeout(wait_s):
                await over.wait()
        except TimeoutError:
            pass
        finally:
            if client is not None:
                client.waited()

    def may_have_messages(self, consumer: str) -> bool:
        return self._now() >= self._quiet_until.get(consumer, 0.0) and self._now() >= self._silent_until

    def _quiet(self, consumer: str, seconds: float) -> None:
        if len(self._quiet_until) >= CONSUMERS_MAX:
            self._quiet_until.clear()
        self._quiet_until[consumer] = self._now() + seconds

    async def still_holds(self, consumer: str, request_id: str) -> bool:
        await self._owner.handed_back(consumer, request_id)
        answer = await self._call("POST", "/held", {"consumer": consumer, "request_id": request_id})
        return _read(lambda: msgspec.json.decode(answer, type=_Held)).held

    def hand_back(self, consumer: str, deliveries: Deliveries) -> None:
        if deliveries and isinstance(deliveries, _Got):
            self._hand_back_soon(consumer, deliveries.request_id)

    def _hand_back_soon(self, consumer: str, request_id: str) -> None:
        self._owner.begin_hand_back(consumer, request_id, self._hand_back(consumer, request_id))

    async def _hand_back(self, consumer: str, request_id: str) -> None:
        try:
            await self._call("POST", "/hand-back", {"consumer": consumer, "request_id": request_id})
        except BinderyError as error:  # their leases time out
            log.warning("messages_not_handed_back", topic=self._topic.short, consumer=consumer, error=str(error))

    async def leave(self, consumer: str) -> bool:
        await self._call("DELETE", f"/consumers/{quote(consumer, safe='')}", None)
        return True

    async def claimed(self, ledger_ids: Collection[int], *, main_first: int) -> Collection[int]:
        found = self._claimed(ledger_ids, main_first)
        if len(found) < len(ledger_ids) and self._now() >= self._ledgers_read_at + LEDGERS_S:
            read = sorted(await self._read_ledger_ids())
            newer = [one for one in self._ledger_ids if not read or one > read[-1]]  # a server of ZooKeeper may lag
            self._ledger_ids = read + newer
            self._ledgers_read_at = self._now()
            found = self._claimed(ledger_ids, main_first)
        return found

    def _claimed(self, ledger_ids: Collection[int], main_first: int) -> set[int]:
        known = self._ledger_ids
        return {one for one in ledger_ids if one in known or (known and main_first <= one < known[0])}

    async def unknown(self, ids: Sequence[MessageId]) -> list[MessageId]:
        answer = await self._call("POST", "/unknown", {"message_ids": _texts(ids)})
        return _ids(_read(lambda: msgspec.json.decode(answer, type=_Unknown)).unknown)

    async def ack(self, ids: Sequence[MessageId], *, consumer: str | None) -> None:
        await self._call("POST", "/ack", _by(consumer, message_ids=_texts(ids)))

    async def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None) -> list[MessageId]:
        body = _by(consumer, message_ids=_texts(ids), delay_ms=round(delay_s * 1000))
        answer = await self._call("POST", "/nack", body)
        self._quiet_until.clear()
        return _ids(_read(lambda: msgspec.json.decode(answer, type=_Returned)).returned)

    async def retry(self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None) -> MoveResult:
        body = _by(
            consumer,
            message_ids=_texts(ids),
            delay_ms=to.delay_ms,
            properties=dict(to.properties),
            max_redeliver=to.max_redeliver,
            dead_letter_topic=to.dead_letters.topic.full,
        )
        answer = await self._call("POST", "/retry", body, timeout_s=RETRY_S)
        self._quiet_until.clear()
        result = _read(lambda: msgspec.json.decode(answer, type=_Retried))
        return MoveResult(
            moved=[
                MovedMessage(
                    MessageId.parse(one.message_id),
                    TopicName.parse(one.topic),
                    MessageId.parse(one.copy_id),
                    one.reconsume_times,
                )
                for one in result.moved
            ],
            acknowledged=_ids(result.acknowledged),
            failed=[
                (
                    MessageId.parse(one.message_id),
                    remote_error(one.error.status, msgspec.json.encode(one.error)),
                )
                for one in result.failed
            ],
        )

    async def explain(self, message_id: MessageId, *, consumer: str | None) -> Reason:
        query = (
            {"message_id": str(message_id)}
            if consumer is None
            else {
                "message_id": str(message_id),
                "consumer": consumer,
            }
        )
        answer = await self._call("GET", f"/explain?{urlencode(query)}", None)
        why = _read(lambda: msgspec.json.decode(answer, type=_Explanation)).message
        return Reason(why.code, why.detail, until_ms=why.ends_in_ms, consumer=why.consumer, policy=why.policy)

    async def backlog_entries(self) -> int:
        answer = await self._call("GET", "/explain", None)
        return _read(lambda: msgspec.json.decode(answer, type=_About)).subscription.backlog_entries

    def in_use(self) -> AbstractContextManager[None]:
        """Nothing is open here."""
        return nullcontext()

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float = ANSWER_S,
        is_waiting: bool = False,
    ) -> bytes:
        """Return the body of the owner's answer. Raises its error, and TryAgain if it cannot be reached."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            status, answer = await self._proxy.call(
                method,
                self._url,
                self._path + path,
                content,
                accept=_NDJSON if path.startswith("/receive") else b"*/*",
                headers=self._headers,
                timeout_s=timeout_s,
                is_waiting=is_waiting,
            )
        except NotOwner as error:
            self._is_silent()
            raise self._no_answer() from error
        except OutcomeUnknown:
            self._is_silent()
            raise
        if status == 200:
            return answer
        failure = remote_error(status, answer)
        if isinstance(failure, NoSuchTopic | NoSuchSubscription):  # of the retry topic, which was deleted
            self._on_lost()
            if self._headers:
                raise failure
            raise RetryTopicAway("the retry topic was deleted; retry", topic=self._topic.short) from failure
        if isinstance(failure, TooManyRequests):
            raise ResponsesFull(failure.message, **failure.facts) from failure
        if isinstance(failure, TryAgain):
            self._is_silent()  # its owner may have changed
            raise RetryTopicAway(failure.message, **failure.facts) from failure
        raise failure

    def _is_silent(self) -> None:
        """The owner does not answer, or not for this topic."""
        self._failures += 1
        self._silent_until = self._now() + SILENT_S.delay_s(self._failures)
        self._on_lost()

    def _no_answer(self) -> RetryTopicAway:
        return RetryTopicAway(
            f"the broker that owns the {self._what} does not answer; retry", topic=self._topic.short, owner=self._url
        )


def _receive_body(request: ReceiveRequest, kind: SubscriptionType, request_id: str) -> dict[str, Any]:
    """Return the request as that of a client. `ReceiveBody` has the fields."""
    body: dict[str, Any] = {
        "consumer": request.consumer,
        "type": kind,
        "max": request.count_max,
        "wait_ms": round(request.wait_s * 1000),
        "ack_timeout_ms": round(request.ack_timeout_s * 1000),
        "session_ttl_ms": round(request.session_ttl_s * 1000),
        "request_id": request_id,
        "redeliver": request.redeliver,
        "priority": request.priority,
    }
    if kind == "key_shared":
        mode = request.key_shared
        body["key_shared"] = {
            "mode": "sticky" if mode.sticky else "auto_split",
            "allow_out_of_order": mode.allow_out_of_order,
            "ranges": [list(one) for one in request.key_ranges],
        }
    if request.dead_letters is not None:
        body["dead_letter"] = {
            "max_redeliver": request.dead_letters.max_redeliver,
            "topic": request.dead_letters.to.topic.full,
            "initial_subscription": request.dead_letters.to.subscription,
        }
    return body


def _delivery(one: RemoteMessage) -> Delivery[Sequence[Any]]:
    index = one.id.batch_index
    bits = SINGLE if index == NOT_IN_BATCH else bits_of([index])
    return Delivery(one.id.position, bits, [one.message], one.lease, one.redelivery_count)


def _by(consumer: str | None, **fields: Any) -> dict[str, Any]:
    return fields if consumer is None else {**fields, "consumer": consumer}


def _texts(ids: Sequence[MessageId]) -> list[str]:
    return list(map(str, ids))


def _ids(texts: Sequence[str]) -> list[MessageId]:
    return list(map(MessageId.parse, texts))


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except (msgspec.MsgspecError, BadRequest) as error:
        raise OutcomeUnknown("the owner of the retry topic gave an answer that cannot be read") from error

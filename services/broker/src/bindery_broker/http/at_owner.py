"""Run an operation on the broker that owns its topic: in this process, or by proxying the request.

An operation that fails because the topic moves (TopicFenced, NotOwner) is run again, on the new owner, for
`held_request_s_max` at most. Operations raise those errors only if nothing was written, or if what was written is not
written again.

| request                       | while its topic moves                                                              |
|-------------------------------|------------------------------------------------------------------------------------|
| of a client, to the owner     | waits here until the next owner has the bundle, and is passed on to it             |
| of a client, to another broker| is sent to the owner, which answers that it is none; it is sent to the next one    |
| passed on by another broker   | waits here too, and is then answered with NotOwner: that broker passes it on       |

A broker that gets a request from another one never passes it on, so that no request goes round in circles.

Requests to a partitioned topic have no owner: any broker runs them, by requests to the partitions.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import quote

from bindery_core.errors import Conflict, NoSuchSubscription, NoSuchTopic, NotThere, TopicFenced, TryAgain
from bindery_kit.admin.content_types import JSON_TYPE
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE
from bindery_pulsar.topic_name import SUBSCRIPTION_SIZE_MAX, TopicName
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bindery_broker.broker import Broker
from bindery_broker.errors import NotOwner, OwnedByPulsar, TopicIsPartitioned
from bindery_broker.http.authorization import run_allowed
from bindery_broker.http.exchange import PARTITION_HEADER, PROXIED_HEADER, ROUTED_BY_HEADER, Answered, Exchange, Reply
from bindery_broker.http.paths import path_of
from bindery_broker.http.peers.drains import Drain
from bindery_broker.http.peers.handovers import HandOvers
from bindery_broker.http.peers.redirects import Redirects, redirect
from bindery_broker.http.peers.splits import Splits
from bindery_broker.http.peers.unloads import Unloads
from bindery_broker.http.proxy import Proxy
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.ownership import RemoteOwner, Unloaded
from bindery_broker.ownership.splits import Split
from bindery_broker.partitioned.record import PartitionedRecord

PULSARS: Final = (b"/admin/v2/", b"/lookup/v2/")
"""Beginnings of the paths that Pulsar brokers serve as well."""
WAITING: Final = frozenset(("receive", "readMessages", "takeTopic"))
"""Ids of the operations that wait."""
PARTITIONING: Final = frozenset(("produce", "receive", "subscribe"))
"""Ids of the operations that create a missing topic with the partitions that its policies ask for."""
PAUSES_S: Final = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Maximum seconds between two attempts to run an operation, the last one for all that follow. An attempt begins before
if the owner of the topic has changed."""


class PartitionedOperation(Protocol):
    async def __call__(
        self, exchange: Exchange, whole: PartitionedRecord, operation: Callable[[Exchange], Awaitable[Response]], /
    ) -> Response:
        """Return the answer of an operation on a partitioned topic. `operation`: runs it on a single topic."""
        ...

    async def create(self, exchange: Exchange, name: TopicName, partitions: int, /) -> bool:
        """Create a partitioned topic that the request needs. Returns whether it is new. Raises Conflict if there is an
        ordinary topic of this name."""
        ...


class AtOwner:
    def __init__(
        self,
        broker: Broker,
        proxy: Proxy,
        *,
        creating: Collection[str],
        partitioned: "PartitionedOperation | None" = None,
    ) -> None:
        """`creating`: ids of the operations that create a missing topic."""
        self.broker = broker
        self.partitioned = partitioned
        """Runs the operations on partitioned topics; None: these are refused."""
        self.app: ASGIApp = _no_app
        """See `OperationRunner`."""
        self.drain = Drain(broker, proxy, HandOvers(broker, proxy))
        """Hands over all bundles of this broker."""
        self._unloads = Unloads(broker, proxy)
        self._redirects = Redirects(broker.listeners)
        self._splits = Splits(broker, proxy, self._unloads)
        self._proxy = proxy
        self._name = f"on-{broker.store.session_id:x}".encode()
        self._serials = itertools.count(1)
        """Ids of calls that wait at other brokers."""
        self._creating = frozenset(creating)

    def run(
        self,
        exchange: Exchange,
        operation: Callable[[Exchange], Awaitable[Response]],
        *,
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> Coroutine[Any, Any, Response]:
        """Return the answer of the operation or of the owner. `begin`: runs before it, if the request may have it.

        Raises Forbidden before anything that exists is looked at, LimitExceeded before `begin`, what the operation
        raises, or NotOwner (retry).
        """
        if self.broker.access is None and begin is None and exchange.allowance is None:
            return self._run(exchange, operation)

        run = partial(self._run, exchange, operation)
        if begin is None:
            return run_allowed(exchange, run)

        async def begin_and_run() -> Response:
            await begin()
            return await run()

        return run_allowed(exchange, begin_and_run)

    async def _run(self, exchange: Exchange, operation: Callable[[Exchange], Awaitable[Response]]) -> Response:
        name = exchange.topic_name
        if name is None:
            return await operation(exchange)
        topics = self.broker.topics
        if topics.loaded(name) is None:
            whole = await self.broker.partitioned.find(name) or await self._create_partitioned(exchange, name)
            if whole is not None:
                return await self._on_all(exchange, whole, operation)
            await self._check_partition(exchange, name)
        topics.begin_use(name)
        attempts = _Attempts()
        try:
            while True:
                try:
                    return await self._attempt(exchange, name, operation, attempts)
                except (NoSuchTopic, NoSuchSubscription, TopicIsPartitioned) as error:
                    if not isinstance(error, NoSuchSubscription) and not exchange.is_answered:
                        whole = await self.broker.partitioned.find_now(name)
                        if whole is not None:
                            return await self._on_all(exchange, whole, operation)
                    if isinstance(error, TopicIsPartitioned):
                        raise
                    raise _with_fix(error, exchange) from error
                except _OwnedElsewhere as error:
                    raise NotOwner(error.message, **error.facts) from None
                except (TopicFenced, NotOwner) as error:
                    if exchange.is_answered or not await self._may_repeat(name, attempts):
                        raise NotOwner(
                            f"the topic is moving to another broker, retry: {error}", **error.facts
                        ) from error
                    exchange.is_repeated = True
        finally:
            topics.end_use(name)

    async def _attempt(
        self,
        exchange: Exchange,
        name: TopicName,
        operation: Callable[[Exchange], Awaitable[Response]],
        attempts: "_Attempts",
    ) -> Response:
        broker = self.broker
        if broker.topics.loaded(name) is None or broker.ownership.leaving_s(name) is not None:
            response = await self._elsewhere(exchange, attempts)
            if response is not None:
                return response
            if exchange.header(PARTITION_HEADER) and exchange.operation in self._creating:
                await self._check_part(exchange, name)
        broker.running.begin(name)
        try:
            return await operation(exchange)
        finally:
            broker.running.end(name)

    async def _may_repeat(self, name: TopicName, attempts: "_Attempts") -> bool:
        """Wait for the next owner of a topic, if the time and the number of those that wait allow it."""
        loop, limit_s = asyncio.get_running_loop(), self.broker.settings.held_request_s_max
        attempts.ends_at = attempts.ends_at or loop.time() + limit_s
        pause_s = PAUSES_S[min(attempts.count, len(PAUSES_S) - 1)]
        attempts.count += 1
        left_s = attempts.ends_at - loop.time()
        if left_s <= 0:
            return False
        if pause_s:
            running, ownership = self.broker.running, self.broker.ownership
            if running.is_full:
                return False
            with running.hold(name):
                bundle = ownership.divisions.known(name)
                if attempts.owner:
                    await ownership.next_owner(bundle, former=attempts.owner, timeout_s=min(pause_s, left_s))
                else:
                    await asyncio.sleep(min(pause_s, left_s))
        return True

    async def _on_all(
        self, exchange: Exchange, whole: PartitionedRecord, operation: Callable[[Exchange], Awaitable[Response]]
    ) -> Response:
        if self.partitioned is None:
            raise TopicIsPartitioned("the topic is partitioned", topic=exchange.topic.short)
        return await self.partitioned(exchange, whole, operation)

    async def _create_partitioned(self, exchange: Exchange, name: TopicName) -> PartitionedRecord | None:
        """Create a missing topic with the partitions that its policies ask for; None: it has none."""
        if exchange.operation not in PARTITIONING or self.partitioned is None:
            return None
        partitions = await self.broker.topics.implicit_partitions(name)
        if not partitions:
            return None
        try:
            await self.partitioned.create(exchange, name, partitions)
        except Conflict:
            if not await self.broker.topics.exists(name):  # else an ordinary topic was created meanwhile
                raise
        return await self.broker.partitioned.find_now(name)

    async def _check_partition(self, exchange: Exchange, name: TopicName) -> None:
        """Refuse a request that would create a partition that the partitioned topic does not have."""
        if name.partition < 0 or exchange.operation not in self._creating:
            return
        if exchange.operation != "createTopic":
            try:
                await self.broker.partitioned.check_implicit(name)
            except NoSuchTopic:
                if not await self.broker.topics.exists(name):
                    raise

    async def _check_part(self, exchange: Exchange, name: TopicName) -> None:
        """Refuse a request to a partition that was deleted with its topic since another broker has sent it."""
        if exchange.operation != "createTopic" and not await self.broker.topics.exists(name):
            await self.broker.partitioned.check_partition(name)

    async def pass_on(self, exchange: Exchange, url: str, *, routed_by: TopicName) -> Response:
        """Return the answer of the broker at `url`, which owns the topic `routed_by`, to this request.

        The topic in the path belongs to this broker, which has checked what the request needs of it. The complete body
        must have been read. Raises NotOwner if that broker does not answer, or OutcomeUnknown.
        """
        path = exchange.raw_path.decode("ascii")
        if exchange.scope["query_string"]:
            path += "?" + exchange.scope["query_string"].decode("ascii")
        body = None if exchange.method == "GET" else await exchange.body()
        headers = [(ROUTED_BY_HEADER, quote(routed_by.full, safe="").encode())]
        try:
            status, answer = await self._proxy.call(
                exchange.method, url, path, body, headers=headers, client=exchange.principal
            )
        except NotOwner:
            self.broker.ownership.forget_remote(self.broker.ownership.divisions.known(routed_by))
            raise TryAgain(
                "the broker that owns the other topic does not answer; retry", topic=routed_by.short, owner=url
            ) from None
        if status == NotOwner.status:
            self.broker.ownership.forget_remote(self.broker.ownership.divisions.known(routed_by))
        return Reply(status, answer, JSON_TYPE if status < 400 else PROBLEM_TYPE.encode())

    async def delete_topic(self, name: TopicName) -> None:
        """Delete a topic, also with consumers, at its owner. Raises NoSuchTopic, TryAgain, OutcomeUnknown."""
        remote = await self.broker.locate(name, create=False)
        if remote is None:
            await self.broker.topics.delete(name, force=True)
            return
        try:
            status, answer = await self._proxy.call("DELETE", remote.http_url, f"{path_of(name)}?force=true")
        except NotOwner:
            self.broker.ownership.forget_remote(self.broker.ownership.divisions.known(name))
            raise
        if status == NoSuchTopic.status:
            raise NoSuchTopic("no such topic", topic=name.short)
        if status >= 400:
            self.broker.ownership.forget_remote(self.broker.ownership.divisions.known(name))
            reason = answer[:200].decode(errors="replace")
            raise TryAgain("the owner of a topic did not delete it; retry", topic=name.short, answer=reason)

    async def unload(
        self, bundles: Sequence[Bundle], *, hold_s: float | None, only_here: bool = False, destination: str = ""
    ) -> list[Unloaded]:
        """Unload bundles at their owners. See `Unloads.unload`."""
        return await self._unloads.unload(bundles, hold_s=hold_s, only_here=only_here, destination=destination)

    async def split(self, bundle: Bundle, how: Split, *, unload: bool, only_here: bool = False) -> list[Bundle]:
        """Split a bundle at its owner. See `Splits.split`."""
        return await self._splits.split(bundle, how, unload=unload, only_here=only_here)

    async def _located(self, exchange: Exchange) -> RemoteOwner | None:
        """Return the owner of the topic; None: this broker. While its bundle is handed over from here, wait for the
        next owner, as long as requests are held. Raises NotOwner, and the errors of `Broker.locate`."""
        broker, name = self.broker, exchange.topic
        create = exchange.operation in self._creating
        hold_s = broker.ownership.leaving_s(name)
        if hold_s is None:
            return await broker.locate(name, create=create)
        with broker.running.hold(name):
            exchange.is_repeated = True
            try:
                async with asyncio.timeout(max(hold_s, broker.settings.held_request_s_max)):
                    return await broker.locate(name, create=create)
            except TimeoutError:
                raise _OwnedElsewhere("the topic is still moving to another broker; retry", topic=name.short) from None

    async def _elsewhere(self, exchange: Exchange, attempts: "_Attempts") -> Response | None:
        """Proxy the request to the topic's owner. Returns None, with nothing sent, if this broker is the owner."""
        name = exchange.topic
        attempts.owner = ""
        try:
            remote = await self._located(exchange)
        except OwnedByPulsar as error:
            if exchange.raw_path.startswith(PULSARS):  # the owner has the same calls; clients of these follow redirects
                return await self._to_pulsar(exchange, error)
            raise
        if remote is None:
            return None
        if exchange.header(PROXIED_HEADER):
            raise _OwnedElsewhere("this broker does not own the topic; retry", topic=name.short, owner=remote.http_url)
        redirected = self._redirects.to(exchange, remote)
        if redirected is not None:
            return redirected
        self.broker.metrics.proxied.inc()
        attempts.owner = remote.http_url
        try:
            await self._forward(exchange, remote.http_url)
        except NotOwner:
            self.broker.ownership.forget_remote(self.broker.ownership.divisions.known(name))
            if not exchange.may_send_body_again:
                raise _OwnedElsewhere("the topic is moving to another broker; retry", topic=name.short) from None
            raise
        return Answered()

    async def _to_pulsar(self, exchange: Exchange, error: OwnedByPulsar) -> Response:
        """Return a redirect to the Pulsar broker that owns the topic."""
        bundle = self.broker.ownership.divisions.known(exchange.topic)
        owner = await self.broker.ownership.owner(bundle) if self._redirects.may_choose(exchange) else None
        if owner is None:
            return redirect(exchange, error.http_url)
        return self._redirects.always(exchange, owner)

    async def _forward(self, exchange: Exchange, url: str) -> None:
        """Pass the request on. When this broker stops, a call that waits at the owner is sent there again, to be
        answered soon. It has the same id there: if the first answer was on its way, the second one has its messages."""
        size_max = self.broker.settings.request_bytes_max
        if exchange.operation not in WAITING or self.broker.stopping:
            await self._proxy.forward(exchange, url, body_size_max=size_max)
            return None
        exchange.sent_id = exchange.sent_id or b"%s-%d" % (self._name, next(self._serials))
        forwarding = asyncio.ensure_future(self._proxy.forward(exchange, url, body_size_max=size_max))
        stopping = asyncio.ensure_future(self.broker.stops.wait())
        try:
            await asyncio.wait({forwarding, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not forwarding.done() and not exchange.is_answered and exchange.may_send_body_again:
                forwarding.cancel()
                await asyncio.wait({forwarding})
            if not forwarding.cancelled():
                return await forwarding
            await self._proxy.forward(exchange, url, body_size_max=size_max)
        finally:
            stopping.cancel()
            if not forwarding.done():
                forwarding.cancel()
                await asyncio.wait({forwarding})


class _OwnedElsewhere(NotOwner):
    """The request is not run again here: the broker that has passed it on, or the client, repeats it."""


@dataclass(slots=True)
class _Attempts:
    """The attempts to run one operation."""

    count: int = 0
    ends_at: float = 0.0
    """When the last one may begin, in monotonic seconds of the loop; 0: the first one has not failed yet."""
    owner: str = ""
    """Address of the broker to which the last one was passed on; empty: it ran here."""


async def _no_app(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError("the application is not composed yet")


def _with_fix(error: NotThere, exchange: Exchange) -> NotThere:
    """Return the error with the request that creates what is missing, because a GET creates nothing."""
    subscription = exchange.scope.get("path_params", {}).get("subscription", "")
    if (
        exchange.method == "DELETE"
        or len(subscription) > SUBSCRIPTION_SIZE_MAX
        or not exchange.broker.settings.auto_create_topics
    ):
        return error
    name = exchange.topic
    path = path_of(name)
    if subscription:
        path += f"/subscriptions/{quote(subscription, safe='')}"
        fix = f"PUT {path} and POST {path}/receive create {'both' if isinstance(error, NoSuchTopic) else 'it'}"
    else:
        fix = f"PUT {path} creates it, and so does the first message"
    return type(error)(f"{error.message}; {fix}", **error.facts)

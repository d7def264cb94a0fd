"""Run an operation on the broker that owns its topic: in this process, or by proxying the request.

An operation that fails because the topic has just moved (TopicFenced, NotOwner) is run once more, on the new owner.
Operations raise those errors only if nothing was written, or if what was written is not written again.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Final
from urllib.parse import quote

from bindery_core.errors import NoSuchSubscription, NoSuchTopic, NotThere, TopicFenced, TryAgain
from bindery_kit.admin.content_types import JSON_TYPE
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE
from bindery_pulsar.topic_name import SUBSCRIPTION_SIZE_MAX, TopicName
from starlette.responses import Response

from bindery_broker.broker import Broker
from bindery_broker.errors import NotOwner
from bindery_broker.http.exchange import PROXIED_HEADER, ROUTED_BY_HEADER, Answered, Exchange, Reply
from bindery_broker.http.paths import path_of
from bindery_broker.http.proxy import Proxy, redirect
from bindery_broker.ownership.bundles import Bundle

ATTEMPTS_MAX: Final = 2
"""Maximum number of attempts to run an operation on the owner of the topic."""


class AtOwner:
    def __init__(self, broker: Broker, proxy: Proxy, *, creating: Collection[str]) -> None:
        """`creating`: ids of the operations that create a missing topic."""
        self.broker = broker
        self._proxy = proxy
        self._creating = frozenset(creating)

    async def run(self, exchange: Exchange, operation: Callable[[Exchange], Awaitable[Response]]) -> Response:
        """Return the answer of the operation or of the owner. Raises what the operation raises, or NotOwner (retry)."""
        name = exchange.topic_name
        if name is None:
            return await operation(exchange)
        topics = self.broker.topics
        topics.begin_use(name)
        try:
            for attempt in range(1, ATTEMPTS_MAX + 1):
                try:
                    if topics.loaded(name) is None:
                        response = await self._elsewhere(exchange)
                        if response is not None:
                            return response
                    return await operation(exchange)
                except (NoSuchTopic, NoSuchSubscription) as error:
                    raise _with_fix(error, exchange) from error
                except (TopicFenced, NotOwner) as error:
                    if attempt < ATTEMPTS_MAX and not exchange.is_answered:
                        continue
                    raise NotOwner(f"the topic is moving to another broker, retry: {error}", **error.facts) from error
            raise AssertionError("unreachable")
        finally:
            topics.end_use(name)

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
            status, answer = await self._proxy.call(exchange.method, url, path, body, headers=headers)
        except NotOwner:
            self.broker.ownership.forget_remote(Bundle.of(routed_by))
            raise TryAgain(
                "the broker that owns the other topic does not answer; retry", topic=routed_by.short, owner=url
            ) from None
        if status == NotOwner.status:
            self.broker.ownership.forget_remote(Bundle.of(routed_by))
        return Reply(status, answer, JSON_TYPE if status < 400 else PROBLEM_TYPE.encode())

    async def _elsewhere(self, exchange: Exchange) -> Response | None:
        """Proxy the request to the topic's owner. Returns None, with nothing sent, if this broker is the owner."""
        name = exchange.topic
        remote = await self.broker.locate(name, create=exchange.operation in self._creating)
        if remote is None:
            return None
        if exchange.header(PROXIED_HEADER):
            raise NotOwner("this broker does not own the topic; retry", topic=name.short, owner=remote.http_url)
        if b"redirect=true" in exchange.scope["query_string"]:
            return redirect(exchange, remote.http_url)
        self.broker.metrics.proxied.inc()
        try:
            await self._proxy.forward(exchange, remote.http_url, body_size_max=self.broker.settings.request_bytes_max)
        except NotOwner:
            self.broker.ownership.forget_remote(Bundle.of(name))
            raise
        return Answered()


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

"""AtOwner: run an operation where its topic is owned: here, or by passing the request on.

An operation that meets a topic which just moved (TopicFenced, NotOwner) is run once more, on the owner that is found
then; operations raise those only when nothing was written.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from bindery_core.errors import TopicFenced
from starlette.responses import Response

from bindery_broker.broker import Broker
from bindery_broker.errors import NotOwner
from bindery_broker.http.exchange import Answered, Exchange
from bindery_broker.http.proxy import PROXIED_HEADER, Proxy, redirect
from bindery_broker.ownership.bundles import Bundle

ATTEMPTS_MAX: Final = 2
_CREATES: Final = frozenset(("produce", "createTopic", "receive", "stream", "subscribe"))
"""Operations that take a topic which does not exist yet."""


class AtOwner:
    def __init__(self, broker: Broker, proxy: Proxy) -> None:
        self.broker = broker
        self._proxy = proxy

    async def run(self, exchange: Exchange, operation: Callable[[Exchange], Awaitable[Response]]) -> Response:
        """The operation's answer, or the owner's. Raises what the operation raises; NotOwner: ask again."""
        name = exchange.topic_name
        if name is None:
            return await operation(exchange)
        self.broker.topics.begin_use(name)
        try:
            return await self._run(exchange, operation)
        finally:
            self.broker.topics.end_use(name)

    async def _run(self, exchange: Exchange, operation: Callable[[Exchange], Awaitable[Response]]) -> Response:
        name = exchange.topic
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if self.broker.topics.loaded(name) is None:
                    response = await self._elsewhere(exchange)
                    if response is not None:
                        return response
                return await operation(exchange)
            except (TopicFenced, NotOwner) as error:
                if attempt < ATTEMPTS_MAX and not exchange.is_answered:
                    continue
                raise NotOwner(f"the topic is moving, ask again: {error}", **error.facts) from error
        raise AssertionError("unreachable")

    async def _elsewhere(self, exchange: Exchange) -> Response | None:
        """Pass the request to the topic's owner; its answer, or None when the owner is this broker."""
        name = exchange.topic
        remote = await self.broker.locate(name, create=exchange.operation in _CREATES)
        if remote is None:
            return None
        if exchange.header(PROXIED_HEADER):
            raise NotOwner("this broker does not own the topic; ask again", topic=name.short, owner=remote.http_url)
        if b"redirect=true" in exchange.scope["query_string"]:
            return redirect(exchange, remote.http_url)
        self.broker.metrics.proxied.inc()
        try:
            await self._proxy.forward(exchange, remote.http_url, body_size_max=self.broker.settings.request_bytes_max)
        except NotOwner:
            self.broker.ownership.forget_remote(Bundle.of(name))
            raise
        return Answered()

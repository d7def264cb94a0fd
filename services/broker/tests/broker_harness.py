"""A broker over in-memory bookies and metadata that is called through ASGI: no sockets, no processes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from bindery_broker.broker import Broker, Components
from bindery_broker.http.app import BrokerApp
from bindery_broker.http.charging.passed_on import KEY_SIZE, PassedOn
from bindery_broker.http.late_app import LateApp
from bindery_broker.http.protocol import ProblemHttpProtocol
from bindery_broker.http.proxy import Proxy
from bindery_broker.http.v1 import ROUTERS
from bindery_broker.namespaces.records import encode, new_namespace, new_tenant
from bindery_broker.settings import BrokerSettings
from bindery_broker.topic_metrics import TopicMetrics
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_kit.http.http_server import HttpServer
from bindery_kit.observability.metrics import Metrics
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import Create, SessionState
from managed_ledger_faults import FaultyClient, FaultyStore, Plan

TOPIC = "/v1/topics/public/default/t"
CLUSTER = "bindery"
ROUTES = [route for router in ROUTERS for route in router.routes]
"""All operations."""


class Clock:
    """A monotonic and a wall clock that the test advances."""

    def __init__(self) -> None:
        self.monotonic_s = 1_000.0
        self.wall_ms = 1_700_000_000_000

    def advance(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_ms += round(seconds * 1000)

    def now(self) -> float:
        return self.monotonic_s

    def now_ms(self) -> int:
        return self.wall_ms


def make_namespaces(tree: MemoryTree, *names: str, **policies: Any) -> None:
    """Create the namespaces `tenant/namespace` that do not exist, and their tenants. `policies`: Policies JSON."""
    record = {**new_namespace(cluster=CLUSTER), **policies}
    for name in names:
        tenant = name.partition("/")[0]
        for path, data in (
            ("/admin", {}),
            ("/admin/policies", {}),
            (f"/admin/policies/{tenant}", new_tenant(admin_roles=[], allowed_clusters=[CLUSTER])),
            (f"/admin/policies/{name}", record),
        ):
            if tree.znodes.exists(path) is None:
                tree.znodes.apply([Create(path, encode(data))], owner=0, now_ms=0)


class Harness:
    """One broker at `url`. Several can share ledgers and metadata and forward requests to one another."""

    def __init__(
        self,
        *,
        tree: MemoryTree,
        ledgers: MemoryLedgers,
        clock: Clock,
        url: str,
        plan: Plan | None = None,
        **settings: Any,
    ) -> None:
        """The namespace public/default is created if it is missing. `plan`: when calls of topics and cursors to bookies
        and metadata fail, or never return."""
        make_namespaces(tree, "public/default")
        self.clock = clock
        self.tree = tree
        self.ledgers = ledgers
        self.store: MemoryStore = tree.connect()
        self.leases = Leases(self.store)
        self.settings = BrokerSettings(**{"topic_idle_s": 300, **settings})
        self.metrics = Metrics("broker", with_process=False)
        components = Components(
            client=MemoryLedgerClient(ledgers) if plan is None else FaultyClient(ledgers, plan),
            store=self.store if plan is None else _PlannedStore(self.store, plan),
            leases=self.leases,
            clock=clock.now_ms,
            now=clock.now,
            metrics=self.metrics,
        )
        self.broker = Broker(self.settings, components, url=url)
        self.topic_metrics = TopicMetrics(topics_max=self.settings.metrics_topics_max)
        self.topic_metrics.watch(self.broker)
        self.peers: dict[str, httpx.ASGITransport] = {}
        self.app = BrokerApp(self.broker, proxy=Proxy(transport=_Peers(self.peers)))
        if self.settings.auth.is_set:
            self.app.limiter.passed_on = PassedOn(bytes(KEY_SIZE))  # as brokers share it by ZooKeeper
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url=url)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Serve on a port with its limits. In the block, `app` and `client` are those of the port."""
        late, before = LateApp(), (self.app, self.client)
        async with HttpServer(late, port=0, http=ProblemHttpProtocol, settings=self.settings.http) as server:
            self.app = BrokerApp(self.broker, arriving=server.bodies)
            late.put(self.app)
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as self.client:
                yield
        await self.app.close()
        self.app, self.client = before

    async def topic_page(self) -> bytes:
        """Return the metrics of topics."""
        await self.topic_metrics.collect()
        return self.topic_metrics.render()

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **kwargs)

    async def produce(self, *payloads: str, topic: str = TOPIC, **kwargs: Any) -> list[str]:
        """Send one request per payload. Returns the message ids."""
        ids = []
        for payload in payloads:
            answer = await self.client.post(f"{topic}/messages", content=payload.encode(), **kwargs)
            assert answer.status_code == 200, answer.text
            ids += answer.json()["message_ids"]
        return ids

    async def produce_batch(self, *payloads: str, topic: str = TOPIC) -> list[str]:
        lines = "\n".join(json.dumps({"payload": payload}) for payload in payloads)
        answer = await self.client.post(
            f"{topic}/messages", content=lines, headers={"content-type": "application/x-ndjson"}
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["message_ids"])

    async def receive(
        self, consumer: str = "c1", *, sub: str = "s", topic: str = TOPIC, **fields: Any
    ) -> list[dict[str, Any]]:
        answer = await self.receive_raw(consumer, sub=sub, topic=topic, **fields)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["messages"])

    async def receive_raw(
        self, consumer: str = "c1", *, sub: str = "s", topic: str = TOPIC, **fields: Any
    ) -> httpx.Response:
        fields = {"wait_ms": 0, **fields}
        return await self.post(f"{topic}/subscriptions/{sub}/receive", {"consumer": consumer, **fields})

    async def ack(self, ids: list[str], *, sub: str = "s", topic: str = TOPIC) -> httpx.Response:
        return await self.post(f"{topic}/subscriptions/{sub}/ack", {"message_ids": ids})

    def znodes(self) -> dict[str, tuple[bytes, int]]:
        """Return data and version of each znode of the cluster."""
        found: dict[str, tuple[bytes, int]] = {}
        paths = ["/"]
        while paths:
            path = paths.pop()
            node = self.tree.znodes.get(path)
            found[path] = (node.data, node.stat.version)
            paths += [f"{path.rstrip('/')}/{child}" for child in self.tree.znodes.children(path)]
        return found

    async def die(self) -> None:
        """End like kill -9: the session ends, nothing is stored or closed."""
        for topic in self.broker.topics:
            topic.abandon("killed")
        await self.broker.policies.close()
        await self.store.close()

    async def close(self) -> None:
        await self.client.aclose()
        await self.broker.close()
        await self.app.close()
        await self.leases.close()
        await self.store.close()


class _PlannedStore(FaultyStore):
    @property
    def session_id(self) -> int:
        return self._inner.session_id

    @property
    def session_state(self) -> SessionState:
        return self._inner.session_state

    def on_session_change(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        return self._inner.on_session_change(listener)


class _Peers(httpx.AsyncBaseTransport):
    """Other brokers by the host of their URL. An unknown host refuses the connection."""

    def __init__(self, peers: dict[str, httpx.ASGITransport]) -> None:
        self._peers = peers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        peer = self._peers.get(request.url.host)
        if peer is None:
            raise httpx.ConnectError("refused", request=request)
        return await peer.handle_async_request(request)


async def settle() -> None:
    """Let every task run until it waits for an event from outside."""
    for _ in range(100):
        await asyncio.sleep(0)


def payloads(messages: list[dict[str, Any]]) -> list[str]:
    return [message["payload"] for message in messages]


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [message["message_id"] for message in messages]


def problem(answer: httpx.Response, *, status: int, code: str) -> dict[str, Any]:
    """Check that `answer` is a problem with this status and code. Returns its body."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert body["code"] == code, body
    assert answer.headers["x-request-id"]
    return body

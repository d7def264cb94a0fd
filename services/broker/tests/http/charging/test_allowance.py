"""Limits of clients, tenants and namespaces on requests: to a gate in simulated time, and to brokers in memory."""

import asyncio
from statistics import quantiles
from typing import Any

import httpx
import pytest
from asgi_call import Line, http_scope, piece
from bindery_broker.http import admin
from bindery_broker.http.budget import ByteBudget
from bindery_broker.http.charging.allowance import Limiter, announced_size, scopes_in
from bindery_broker.http.charging.allowance import client_of as client_in
from bindery_broker.http.charging.passed_on import KEY_PATH, PASSED_ON_HEADER, PassedOn, Sender, fetch_key
from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.http.gate import Gate, HotRoutes
from bindery_broker.limits.accounts import Owner
from bindery_broker.settings import BrokerSettings, LimitSettings
from bindery_client.memory.memory import MemoryLedgers
from bindery_core.errors import BadRequest
from bindery_identity.principal import Method, Principal
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.loop import SimLoop
from broker_harness import ROUTES, TOPIC, Clock, Harness
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

PRODUCE = "/v1/topics/public/default/t/messages"
TOOK_S = 0.02
"""Simulated seconds that an operation takes."""
EVERY_ROUTE = [*ROUTES, *(route for router in admin.ROUTERS for route in router.routes)]


class Limited:
    """A gate with limits over operations that take TOOK_S, in simulated time."""

    def __init__(self, **limits: Any) -> None:
        self.loop = SimLoop()  # type: ignore[abstract]
        self.settings = BrokerSettings()
        self.clock = self.now = self.loop.time
        self.metrics = self
        self.broker = self
        self.app: ASGIApp = self._other
        self.accounts = LimitSettings(**limits).accounts()
        self.limiter = Limiter(self.accounts, by_address=True, now=self.now)
        self.gate = Gate(
            self._other,
            at_owner=self,  # type: ignore[arg-type]
            budget=ByteBudget(2**20),
            routes=HotRoutes([route for route in ROUTES if route.operation_id == "produce"]),
            limiter=self.limiter,
        )

    def answered(self, _operation: str, _status: int, _seconds: float) -> None:
        return

    async def run(self, exchange: Exchange, _operation: Any) -> Response:
        await exchange.charge_resource()
        await exchange.read_body(size_max=2**20)
        await asyncio.sleep(TOOK_S)
        return Reply(200, b"stored")

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Reply(200, b"x" * 1_000)(scope, receive, send)

    async def call(
        self, role: str | None, *, method: str = "POST", path: str = PRODUCE, body: bytes = b"m", announce: bool = True
    ) -> tuple[int, float, Line]:
        """Return the status, the seconds until the answer, and the line."""
        headers = [(b"content-length", b"%d" % len(body))] if announce else [(b"transfer-encoding", b"chunked")]
        scope = http_scope(method, path, headers=headers)
        if role is not None:
            scope["state"] = {"principal": Principal(role=role, method=Method.TOKEN)}
        began = self.now()
        line = Line(piece(body))
        await self.gate(scope, line.receive, line.send)
        return line.status, self.now() - began, line

    def play(self, work: Any, *, time_max: float = 3_600) -> Any:
        task = self.loop.create_task(work)
        self.loop.run_until(task.done, time_max=time_max, callbacks_max=2_000_000)
        return task.result()


async def _paced(limited: Limited, role: str, *, per_s: float, count: int) -> list[tuple[int, float, Line]]:
    """Return the answers to requests at a constant rate, whatever the answers take."""
    calls = []
    for _ in range(count):
        calls.append(asyncio.create_task(limited.call(role)))
        await asyncio.sleep(1 / per_s)
    return await asyncio.gather(*calls)


def _p99(answers: list[tuple[int, float, Line]]) -> float:
    return quantiles([seconds for _, seconds, _ in answers], n=100)[98]


def test_a_client_above_its_rate_delays_only_itself() -> None:
    alone = Limited(principal_requests_rate=50)
    before = alone.play(_paced(alone, "neighbor", per_s=40, count=400))

    both = Limited(principal_requests_rate=50)

    async def run() -> Any:
        flood = asyncio.create_task(_paced(both, "flood", per_s=500, count=5_000))
        answers = await _paced(both, "neighbor", per_s=40, count=400)
        return answers, await flood

    neighbor, flood = both.play(run())
    assert {status for status, _, _ in neighbor} == {200}
    assert _p99(neighbor) <= 1.5 * _p99(before)
    statuses = [status for status, _, _ in flood]
    assert statuses.count(200) <= 50 * (10 + 2) + 50 + 1, "its rate, the longest wait and the burst"
    assert statuses.count(200) >= 50 * 10
    assert statuses.count(429) == 5_000 - statuses.count(200)
    assert max(seconds for _, seconds, _ in flood) <= 2 + TOOK_S + 1e-6


def test_a_refusal_says_which_limit_whose_its_rate_and_when_to_retry() -> None:
    limited = Limited(tenant_requests_rate=0.1, wait_ms_max=0)

    async def run() -> Line:
        await limited.call("etl")
        return (await limited.call("etl"))[2]

    line = limited.play(run())
    problem = httpx.Response(line.status, content=line.body, headers=line.headers)
    assert (problem.status_code, problem.headers["retry-after"]) == (429, "10")
    body = problem.json()
    assert body["code"] == "limit_exceeded"
    assert {name: body["facts"][name] for name in ("limit", "kind", "name", "rate")} == {
        "limit": "requests",
        "kind": "tenant",
        "name": "public",
        "rate": 0.1,
    }
    assert "0.1 requests per second" in body["detail"]


def test_a_body_is_counted_before_it_is_read_if_its_size_is_announced() -> None:
    limited = Limited(principal_bytes_in_rate=100, wait_ms_max=0)

    async def run() -> tuple[Line, Line]:
        await limited.call("etl", body=b"x" * 100)
        announced = await limited.call("etl", body=b"x" * 100)
        chunked = await limited.call("etl", body=b"x" * 100, announce=False)
        return announced[2], chunked[2]

    announced, chunked = limited.play(run())
    assert (announced.status, len(announced.unread)) == (429, 1)
    assert (chunked.status, len(chunked.unread)) == (429, 0)


def test_the_client_and_the_tenant_together_delay_a_request_no_longer_than_the_maximum() -> None:
    limited = Limited(principal_requests_rate=1, namespace_requests_rate=1, burst_s=1, wait_ms_max=1_500)

    async def run() -> tuple[int, float, Line]:
        await limited.call("etl")
        other = asyncio.create_task(limited.call("other"))  # takes the next turn of the namespace
        await asyncio.sleep(0.1)
        answer = await limited.call("etl")
        await other
        return answer

    status, seconds, line = limited.play(run())
    assert (status, httpx.Response(status, content=line.body).json()["facts"]["kind"]) == (429, "namespace")
    assert seconds <= 1.5


def test_bytes_that_went_out_delay_reads_and_not_writes() -> None:
    limited = Limited(principal_bytes_out_rate=1_000)

    async def run() -> list[Any]:
        answers = [await limited.call("etl", method="GET", path="/v1/topics", body=b"") for _ in range(5)]
        return [*answers, await limited.call("etl")]

    *reads, write = limited.play(run())
    assert {status for status, _, _ in reads} == {200}
    assert sum(seconds for _, seconds, _ in reads) == pytest.approx(3, abs=0.1), "5,000 bytes at 1,000/s, after a burst"
    assert write[1] == pytest.approx(TOOK_S)


def test_a_connection_counts_until_its_request_ends() -> None:
    limited = Limited(principal_connections_max=2)

    async def run() -> tuple[list[int], int]:
        answers = await asyncio.gather(*(limited.call("etl") for _ in range(3)))
        return [status for status, _, _ in answers], (await limited.call("etl"))[0]

    assert limited.play(run()) == ([200, 200, 429], 200)


def test_clients_without_a_role_are_told_apart_by_their_address() -> None:
    def client(host: str | None, principal: Principal | None = None) -> Any:
        scope: dict[str, Any] = {"client": None if host is None else (host, 1)}
        if principal is not None:
            scope["state"] = {"principal": principal}
        return client_in(scope, by_address=True)

    assert client("10.0.0.1") == (Owner.ADDRESS, "10.0.0.1")
    assert client("2001:db8::1") == client("2001:db8::2")
    assert client(None) == (Owner.ADDRESS, "?")
    assert client("10.0.0.1", Principal(role="etl", method=Method.TOKEN)) == (Owner.ROLE, "etl")
    assert client("10.0.0.1", Principal(role="anonymous", method=Method.NONE)) == (Owner.ADDRESS, "10.0.0.1")
    proxied = Principal(role="proxy", original_role="etl", method=Method.TOKEN)
    assert client("10.0.0.1", proxied) == (Owner.ROLE, "etl")
    assert client_in({"client": ("10.0.0.1", 1)}, by_address=False) is None


@pytest.mark.parametrize("route", EVERY_ROUTE, ids=lambda route: route.operation_id)
def test_the_tenant_and_the_namespace_of_each_route_are_found(route: Any) -> None:
    path = route.path_format
    for name in ("tenant", "namespace", "topic", "local"):
        path = path.replace(f"{{{name}}}", {"tenant": "t%20t", "namespace": "n"}.get(name, "x"))
    expected = []
    if "{tenant}" in route.path_format:
        expected.append((Owner.TENANT, "t t"))
    if "{namespace}" in route.path_format:
        expected.append((Owner.NAMESPACE, "t t/n"))
    assert scopes_in(path.encode()) == tuple(expected)
    assert scopes_in(f"{path}/".encode()) == tuple(expected)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/admin/v2/persistent/t/n/x/stats", "t/n"),
        (b"/admin/v2/non-persistent/t/n", "t/n"),
        (b"/admin/v2/namespaces/t/n/permissions", "t/n"),
        (b"/admin/v2/schemas/t/n/x/schema", "t/n"),
        (b"/lookup/v2/topic/persistent/t/n/x", "t/n"),
        (b"/admin/v2/tenants/t", "t"),
        (b"/admin/v2/namespaces/t", "t"),
        (b"/v1/topics", ""),
        (b"/v1/topics/", ""),
        (b"/docs", ""),
        (b"/", ""),
    ],
)
def test_the_namespace_in_paths_of_pulsar(path: bytes, expected: str) -> None:
    found = scopes_in(path)
    assert (found[-1][1] if found else "") == expected


@pytest.mark.parametrize(
    ("header", "size"), [(b"", 0), (b"5", 5), (b"-5", 0), (b"x", 0), (b"100", 100), (b"101", 0), (b"9" * 5_000, 0)]
)
def test_the_announced_size(header: bytes, size: int) -> None:
    assert announced_size(header, size_max=100) == size


# -- brokers in memory ---------------------------------------------------------------------------------------------


async def _with(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock, **limits: Any) -> Harness:
    return Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", limits=LimitSettings(**limits))


async def test_limits_and_their_use_are_shown(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> None:
    broker = await _with(tree, ledgers, clock, principal_requests_rate=100, namespace_topics_rate=30)
    await broker.produce("a")
    answer = await broker.client.get("/v1/limits", params={"namespace": "public/default"})
    assert answer.status_code == 200, answer.text
    client, tenant, namespace = answer.json()["owners"]
    assert (client["kind"], client["name"]) == ("address", "127.0.0.1")
    assert client["limits"] == [
        {"limit": "requests", "rate": 100.0, "burst": 100.0, "available": 98.0, "retry_after_s": 0.0}
    ]
    assert tenant == {"kind": "tenant", "name": "public", "limits": []}
    assert namespace["limits"] == [
        {"limit": "topics", "rate": 30.0, "burst": 30.0, "available": 29.0, "retry_after_s": 0.0}
    ]
    wrong = await broker.client.get("/v1/limits", params={"namespace": "public/default", "tenant": "other"})
    assert wrong.status_code == 400
    await broker.close()


async def test_without_limits_the_answer_is_empty(broker: Harness) -> None:
    answer = (await broker.client.get("/v1/limits")).json()
    assert answer == {"owners": [{"kind": "address", "name": "127.0.0.1", "limits": []}]}


async def test_created_topics_are_limited_and_existing_ones_are_not(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock
) -> None:
    broker = await _with(tree, ledgers, clock, namespace_topics_rate=2, wait_ms_max=0)
    await broker.produce("a", topic="/v1/topics/public/default/one")
    assert (await broker.client.put("/v1/topics/public/default/two")).status_code == 201
    refused = await broker.client.put("/v1/topics/public/default/three")
    assert (refused.status_code, refused.json()["facts"]["limit"]) == (429, "topics")
    assert (await broker.client.get("/v1/topics")).json()["topics"] == ["public/default/one", "public/default/two"]
    await broker.produce("b", topic="/v1/topics/public/default/one")
    clock.advance(60)
    whole = await broker.client.put("/v1/topics/public/default/whole/partitions", json={"partitions": 4})
    assert whole.status_code == 201, "more than the limit, after a whole period"
    refused = await broker.client.put("/v1/topics/public/default/whole/partitions", json={"partitions": 5})
    assert refused.status_code == 429
    single = await broker.client.put("/v1/topics/public/default/other-partition-0")
    assert single.status_code == 429, "a partition without its topic counts"
    await broker.close()


async def test_what_a_request_to_a_partitioned_topic_does_to_the_partitions_counts_once(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock
) -> None:
    broker = await _with(tree, ledgers, clock, namespace_requests_rate=100, namespace_bytes_in_rate=1e6)
    await broker.client.put("/v1/topics/public/default/p/partitions", json={"partitions": 3})
    account = broker.broker.accounts.account(Owner.NAMESPACE, "public/default", clock.now())
    assert account is not None
    before = {use.limit: use.available for use in account.usage(clock.now())}
    await broker.produce("hello", topic="/v1/topics/public/default/p")
    after = {use.limit: use.available for use in account.usage(clock.now())}
    assert {limit: before[limit] - after[limit] for limit in before} == {"requests": 1, "bytes_in": 5}
    await broker.close()


async def test_a_receive_takes_no_more_bytes_than_its_client_may_have(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock
) -> None:
    broker = await _with(tree, ledgers, clock, principal_bytes_out_rate=5_000)
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={"initial": "earliest"})
    await broker.produce(*("x" * 1_000 for _ in range(20)))
    clock.advance(10)
    first = await broker.receive(max=20)
    assert 1 <= len(first) <= 5
    page = (broker.metrics.render()).decode()
    assert "bindery_broker_limit_accounts 1.0" in page
    await broker.close()


async def test_a_stream_waits_for_its_limit_and_goes_on(tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock) -> None:
    broker = await _with(tree, ledgers, clock, principal_bytes_out_rate=2_000)
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={"initial": "earliest"})
    clock.advance(60)
    async with (
        broker.serve(),
        broker.client.stream("GET", f"{TOPIC}/subscriptions/s/stream", params={"consumer": "c"}) as answer,
    ):
        assert answer.status_code == 200
        got: list[str] = []

        async def read() -> None:
            async for line in answer.aiter_lines():
                got.append(line)

        async def until(payload: str) -> None:
            async with asyncio.timeout(20):
                while not any(payload in line for line in got):
                    await asyncio.sleep(0.02)

        reading = asyncio.create_task(read())
        await broker.produce("first" + "x" * 8_000)
        await until("first")
        await broker.produce("second")
        await asyncio.sleep(1.0)
        assert not any("second" in line for line in got), "it waits until the debt is paid, on the clock of the test"
        clock.advance(10)
        await until("second")
        reading.cancel()
    await broker.close()


async def test_a_request_that_was_passed_on_counts_at_the_first_broker_only(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock
) -> None:
    limits = LimitSettings(principal_requests_rate=1_000, principal_topics_rate=600)
    one, two = (
        Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}", limits=limits) for name in ("one", "two")
    )
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    for harness in (one, two):
        harness.app.limiter.passed_on = PassedOn(await fetch_key(harness.store, randomness=_Fixed()))

    def used(harness: Harness) -> dict[str, float]:
        account = harness.broker.accounts.account(Owner.ADDRESS, "127.0.0.1", clock.now())
        assert account is not None
        return {use.limit.value: use.burst - use.available for use in account.usage(clock.now())}

    await two.produce("owned by two")
    assert used(two) == {"requests": 1, "topics": 1}
    await one.produce("passed on", topic=TOPIC)
    created = await one.client.put("/v1/topics/public/default/t-2")
    assert (used(one)["requests"], used(two)["requests"]) == (2, 1)
    assert created.status_code == 201
    assert used(one)["topics"] + used(two)["topics"] == 2, "the owner of the new topic counts it, for the client"
    forged = {"bindery-proxied": "1", "bindery-passed-on": "0" * 64 + " 0 -"}
    await two.produce("forged", headers=forged)
    assert used(two)["requests"] == 2
    for harness in (one, two):
        await harness.close()


async def test_a_request_from_a_broker_without_limits_is_charged(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock
) -> None:
    limits = LimitSettings(principal_requests_rate=1_000)
    one = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one")
    two = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://two", limits=limits)
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    for harness in (one, two):
        harness.app.limiter.passed_on = PassedOn(await fetch_key(harness.store, randomness=_Fixed()))
    await two.produce("owned by two")
    await one.produce("passed on")
    account = two.broker.accounts.account(Owner.ADDRESS, "127.0.0.1", clock.now())
    assert account is not None
    assert [use.burst - use.available for use in account.usage(clock.now())] == [2]
    for harness in (one, two):
        await harness.close()


async def test_the_limit_of_bytes_holds_for_a_receive_that_is_passed_on(
    tree: MemoryTree, ledgers: MemoryLedgers, clock: Clock
) -> None:
    limits = LimitSettings(principal_bytes_out_rate=5_000)
    one, two = (
        Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://{name}", limits=limits) for name in ("one", "two")
    )
    one.peers["two"] = httpx.ASGITransport(app=two.app)
    for harness in (one, two):
        harness.app.limiter.passed_on = PassedOn(await fetch_key(harness.store, randomness=_Fixed()))
    await two.client.put(f"{TOPIC}/subscriptions/s", json={"initial": "earliest"})
    await two.produce(*("x" * 1_000 for _ in range(20)))
    clock.advance(10)
    assert 1 <= len(await one.receive(max=20)) <= 5
    for harness in (one, two):
        await harness.close()


class _Fixed:
    def getrandbits(self, count: int, /) -> int:
        return 2 ** (count - 1) + 7


# -- proofs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sender",
    [
        Sender(is_part=False, client=None),
        Sender(is_part=True, client=(Owner.ROLE, "röle with spaces/ and : %")),
        Sender(is_part=False, client=(Owner.ADDRESS, "2001:db8::/64")),
        Sender(is_part=False, client=None, is_charged=False),
    ],
)
def test_a_proof_is_read_by_brokers_with_the_same_key_only(sender: Sender) -> None:
    name, value = PassedOn(b"k" * 32).header(sender)
    assert name == PASSED_ON_HEADER
    assert PassedOn(b"k" * 32).read(value) == sender
    assert PassedOn(b"j" * 32).read(value) is None
    for at in range(len(value)):
        changed = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        assert PassedOn(b"k" * 32).read(changed) is None
    for size in range(len(value)):
        assert PassedOn(b"k" * 32).read(value[:size]) is None


async def test_all_brokers_get_the_same_key(tree: MemoryTree) -> None:
    stores = [tree.connect() for _ in range(2)]
    keys = [await fetch_key(store, randomness=_Fixed()) for store in stores]
    assert keys[0] == keys[1] == (await stores[0].get(KEY_PATH)).data
    with pytest.raises(BadRequest, match="wrong size"):
        PassedOn(keys[0][1:])
    for store in stores:
        await store.close()

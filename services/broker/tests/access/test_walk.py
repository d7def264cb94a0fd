"""Walk every route of a broker's port with every kind of client, and write what was observed into docs/access-table.md.

The brokers authenticate signed tokens, as those of a cluster do, and keep ledgers and metadata in memory. Expected is
what the table of requirements says; nothing here names an operation, so a new one is walked as soon as it exists.

A client without a permission gets the same answer whether what the path names exists or not. `PLACES` has the cases in
which the broker would take another way: a topic, one of another broker, a partitioned one, and what is missing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from access_parts import ROOT, brokers
from bindery_broker.access.decision import Need
from bindery_broker.access.requirements import FIXED_FAMILIES, POLICY_FAMILIES, REQUIREMENTS, requirement
from bindery_broker.http import admin, v1
from bindery_broker.http.late_app import refuse_unknown
from bindery_identity.authenticator import Authenticator
from bindery_identity.tokens import SignedTokens, sign
from bindery_kit.access.authenticate import PROBES, Authenticate
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.process_page import ProcessPage
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import Create, Set
from broker_harness import settle

KEY = b"k" * 32
NOW_S = 1_700_000_000
NONE, WRONG, EXPIRED = "no token", "wrong token", "expired token"
UNKNOWN = (NONE, WRONG, EXPIRED)
KINDS = {"none": "nobody", "consume": "consumer", "produce": "producer", "tenant admin": "admin", "super-user": "super"}
"""Kinds of roles, and a role of each (`access_parts.PERMISSIONS`)."""
OTHER_ADMIN = "other-admin"
"""Administrator of another tenant: may do what a role without permissions may."""
COLUMNS = (*UNKNOWN, *KINDS)
MAY = {
    Need.ANYONE: {*KINDS},
    Need.LOOKUP: {"consume", "produce", "tenant admin", "super-user"},
    Need.PRODUCE: {"produce", "tenant admin", "super-user"},
    Need.CONSUME: {"consume", "tenant admin", "super-user"},
    Need.NAMESPACE_USE: {"consume", "produce", "tenant admin", "super-user"},
    Need.NAMESPACE_CONSUME: {"consume", "tenant admin", "super-user"},
    Need.TENANT_ADMIN: {"tenant admin", "super-user"},
    Need.SUPER_USER: {"super-user"},
}
PLACES = (
    ("acme", "shop", "t"),
    ("acme", "shop", "elsewhere"),
    ("acme", "shop", "parts"),
    ("acme", "shop", "parts-partition-0"),
    ("acme", "shop", "missing"),
    ("acme", "missing", "missing"),
    ("missing", "missing", "missing"),
)
"""Tenant, namespace and topic of a path."""
FREE_PLACE = ("acme", "shop", "missing")
VALUES = {"version": "0", "timestamp": "1", "bundle": "0x00000000_0xffffffff", "policy": "ttl", "cluster": "bindery"}
"""Other names in paths; those that are missing are `1`."""
ROUTES = [route for router in (*v1.ROUTERS, *admin.ROUTERS) for route in router.routes]
UNREGISTERED = "adminBrokerHealth"
"""Operation that answers 500, as Pulsar's does, because these brokers are in no list of brokers."""
FAMILIES = POLICY_FAMILIES + FIXED_FAMILIES


def fill(path: str, place: Sequence[str]) -> str:
    """Return the path of a route with names in it."""
    tenant, namespace, topic = place
    names = {**VALUES, "tenant": tenant, "namespace": namespace, "topic": topic, "local": topic}
    parts = path.split("/")
    for at, part in enumerate(parts):
        if part.startswith("{"):
            parts[at] = names.get(part.strip("{}").partition(":")[0], "1")
    return "/".join(parts)


def places(path: str) -> list[Sequence[str]]:
    """Return the places that differ in the path."""
    found: dict[str, Sequence[str]] = {}
    for place in PLACES:
        found.setdefault(fill(path, place), place)
    return list(found.values())


class Walker:
    """Sends requests to one of two brokers that share a cluster."""

    def __init__(self, tree: MemoryTree, app: Any) -> None:
        self.app = app
        self._tree = tree
        self._policies = {path: tree.znodes.get(path).data for path in self._paths()}

    def _paths(self) -> list[str]:
        znodes = self._tree.znodes
        tenants = [f"/admin/policies/{name}" for name in znodes.children("/admin/policies")]
        return [*tenants, *(f"{tenant}/{name}" for tenant in tenants for name in znodes.children(tenant))]

    async def restore(self) -> None:
        """Undo what an allowed request has done to tenants, namespaces and permissions."""
        znodes = self._tree.znodes
        for path, data in self._policies.items():
            if znodes.exists(path) is None:
                znodes.apply([Create(path, data)], owner=0, now_ms=0)
            elif znodes.get(path).data != data:
                znodes.apply([Set(path, data, None)], owner=0, now_ms=0)
            else:
                continue
            await settle()

    async def ask(self, method: str, path: str, kind: str, *, body: bytes | None = None) -> tuple[int, str]:
        """Return status and body of the answer. `kind`: one of COLUMNS, or a role. Of a stream only the status is read.

        A broken handler gives status 500, which no test here accepts.
        """
        headers = [(b"host", b"walk"), *credentials(kind)]
        if method not in ("GET", "HEAD"):
            body = b"{}" if body is None else body
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"wait_ms=0",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        started, ended = asyncio.Event(), asyncio.Event()
        answer: list[Any] = [0, b""]
        pieces = [{"type": "http.request", "body": body or b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pieces:
                return pieces.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer[0] = message["status"]
                started.set()
            else:
                answer[1] += message.get("body", b"")
                if not message.get("more_body"):
                    ended.set()

        task = asyncio.create_task(self.app(scope, receive, send))
        if path.endswith("/stream"):
            reading = asyncio.create_task(started.wait())
            await asyncio.wait((task, reading), return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            if answer[0] == 200:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return answer[0], answer[1].decode("utf-8", "replace")


def credentials(kind: str) -> list[tuple[bytes, bytes]]:
    if kind == NONE:
        return []
    key = b"w" * 32 if kind == WRONG else KEY
    expires_at_s = NOW_S - 3600 if kind == EXPIRED else NOW_S + 3600
    subject = "super" if kind in UNKNOWN else KINDS.get(kind, kind)
    return [(b"authorization", b"Bearer " + sign(key, subject=subject, expires_at_s=expires_at_s))]


@contextlib.asynccontextmanager
async def walkers(*, guards_metrics: bool = False) -> AsyncIterator[Walker]:
    async with brokers(2, topic_idle_s=300) as (one, two):

        async def put(client: Any, path: str, body: Any = None) -> None:
            answer = await client.put(path, json=body, headers={"x-role": "super"})
            assert answer.status_code in (200, 201, 204), answer.text

        await put(one.client, f"{ROOT}/t")
        await put(two.client, f"{ROOT}/elsewhere")
        await put(one.client, f"{ROOT}/parts/partitions", {"partitions": 2})
        ops = OpsApp(Health(), ProcessPage("broker", one.metrics.render), app=one.app)
        authenticator = Authenticator(now_s=lambda: NOW_S, tokens=SignedTokens([KEY]))
        app = Authenticate(
            ops, authenticator, refuse=refuse_unknown, clock=one.clock.now, guards_metrics=guards_metrics
        )
        yield Walker(one.tree, app)


def expected(route: Any, kind: str) -> str:
    if kind in UNKNOWN:
        return "401"
    return "yes" if kind in MAY[requirement(route.unique_id)] else "403"


async def observe(walker: Walker, route: Any, kind: str, place: Sequence[str] = FREE_PLACE) -> str:
    """Return the outcome of a request as the document has it, and restore what it has changed."""
    (method,) = route.methods
    status, text = await walker.ask(method, fill(route.path, place), kind)
    assert status, (route.unique_id, kind)
    assert status != 500 or route.unique_id == UNREGISTERED, (route.unique_id, kind, status, text)
    if status in (401, 403):
        return str(status)
    if method != "GET":
        await walker.restore()
    return "yes"


async def test_every_route_with_every_kind_of_client(check_section):
    """Outcomes are those that the requirements demand, and those that the document shows."""
    found: dict[str, list[str]] = {}
    async with walkers() as walker:
        for route in ROUTES:
            outcomes = [await observe(walker, route, kind) for kind in COLUMNS]
            assert outcomes == [expected(route, kind) for kind in COLUMNS], route.unique_id
            assert await observe(walker, route, OTHER_ADMIN) == expected(route, "none"), route.unique_id
            found[route.unique_id] = outcomes
    check_section("access-table.md", "broker", document(found))


async def test_refusals_do_not_reveal_what_exists():
    """A role without the permission gets one answer in all places; only the names in it differ."""
    async with walkers() as walker:
        for route in ROUTES:
            if (expected(route, "none") == "yes" and "{tenant" not in route.path) or is_fixed(route.unique_id):
                continue
            (method,) = route.methods
            answers = set()
            for place in places(route.path):
                status, text = await walker.ask(method, fill(route.path, place), "none")
                for name in ("/".join(place), "/".join(place[:2]), place[0]):
                    text = text.replace(name, "*")
                answers.add((status, text))
            assert len(answers) == 1, (route.unique_id, answers)


def is_fixed(operation: str) -> bool:
    return operation not in REQUIREMENTS and operation.startswith(FIXED_FAMILIES)


def document(found: dict[str, list[str]]) -> str:
    """Return a row for each operation, and one for each family whose operations are made in a loop."""
    rows: dict[str, tuple[str, list[str]]] = {}
    for route in ROUTES:
        operation, outcomes = route.unique_id, found[route.unique_id]
        family = next((one for one in FAMILIES if operation not in REQUIREMENTS and operation.startswith(one)), None)
        if family is None:
            (method,) = route.methods
            path = "/".join(part.partition(":")[0] + "}" if "{" in part else part for part in route.path.split("/"))
            row = (f"`{operation}`: {method} {path}", outcomes)
        else:
            count = sum(one.unique_id not in REQUIREMENTS and one.unique_id.startswith(family) for one in ROUTES)
            row = (f"`{family}...`: {count} operations", outcomes)
        assert rows.setdefault(row[0], row) == row, row
    lines = [f"| operation | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(outcomes)} |" for name, outcomes in rows.values()]
    return "\n".join(lines)


PAGES = ("/docs", "/openapi.json")
OPEN_PATHS = (*PROBES, "/metrics", "/metrics/")


@pytest.mark.parametrize("guards_metrics", [False, True])
async def test_probes_pages_and_web_sockets(check_section, guards_metrics):
    found: dict[str, list[str]] = {}
    async with walkers(guards_metrics=guards_metrics) as walker:
        for path in (*OPEN_PATHS, *PAGES, "/nothing/here"):
            outcomes = []
            for kind in COLUMNS:
                status, _ = await walker.ask("GET", path, kind)
                is_open = path in PROBES or (path.startswith("/metrics") and not guards_metrics)
                assert (status == 401) == (kind in UNKNOWN and not is_open), (path, kind, status)
                assert status in (200, 401, 404, 503), (path, kind, status)
                outcomes.append("401" if status == 401 else "404" if status == 404 else "yes")
            found[path] = outcomes
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        for kind in COLUMNS:
            scope = {"type": "websocket", "path": f"{ROOT}/t", "headers": credentials(kind), "state": {}}
            await walker.app(scope, None, send)
        assert sent == [{"type": "websocket.close", "code": 1008}] * len(COLUMNS)
    if not guards_metrics:
        found["WebSocket, every path"] = ["closed"] * len(COLUMNS)
        lines = [f"| path | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [f"| {path} | {' | '.join(outcomes)} |" for path, outcomes in found.items()]
        check_section("access-table.md", "broker-pages", "\n".join(lines))

"""Which operations the audit log records, and the lines of a broker."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_broker.access import audited
from bindery_broker.access.audited import BEGINNINGS, STATED, Kind, is_change, kind_of
from bindery_broker.http import admin, v1
from bindery_broker.http.charging.passed_on import Sender
from bindery_broker.http.route import HotRoute
from bindery_broker.settings import AuditSettings
from bindery_core.errors import Forbidden
from bindery_identity.principal import Method, Principal
from bindery_kit.access.audit_log import AuditLog
from bindery_kit.access.audit_trail import AuditTrail, trail
from bindery_kit.http.http_server import HttpServer
from broker_harness import TOPIC, Harness

OPERATIONS = {
    route.unique_id: set(route.methods) for router in (*v1.ROUTERS, *admin.ROUTERS) for route in router.routes
}
SUBSCRIPTION = f"{TOPIC}/subscriptions/s"
V2 = "/admin/v2/persistent/public/default/t"


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_operation_has_an_entry_and_every_entry_an_operation():
    """A new route whose method is not GET fails here until it is decided whether it is an administrative change."""
    missing = [name for name, methods in OPERATIONS.items() if kind_of(name, methods) is None]
    assert not missing, f"add these operations to bindery_broker.access.audited: {missing}"
    assert set(STATED) <= set(OPERATIONS)
    assert all(any(name.startswith(beginning) for name in OPERATIONS) for beginning in BEGINNINGS)
    assert sum(len(names) for names in audited._BY_KIND.values()) == len(STATED), "an operation has two kinds"


def test_no_get_is_a_change_and_unknown_operations_are():
    assert not [name for name, methods in OPERATIONS.items() if methods <= {"GET", "HEAD"} and is_change(name, methods)]
    assert is_change("somethingNew", {"POST"})
    assert kind_of("somethingNew", {"POST"}) is None


def test_hot_operations_are_not_changes():
    """Their answers may skip the lines (`AuditTrail`)."""
    hot = [route.unique_id for router in v1.ROUTERS for route in router.routes if isinstance(route, HotRoute)]
    assert hot
    assert {kind_of(name, OPERATIONS[name]) for name in hot} <= {Kind.DATA, Kind.INTERNAL, Kind.READ}


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture
async def log(path: Path) -> Any:
    made = AuditSettings(file=str(path)).open(service="broker", clock=lambda: 0.0, wall_clock_ms=lambda: 0)
    assert made is not None
    yield made
    await made.close()


def client_of(broker: Harness, log: AuditLog, *, role: str | None = None) -> httpx.AsyncClient:
    """Return a client of the broker behind its audit log, as `role`."""

    async def known(scope: Any, receive: Any, send: Any) -> None:
        if role is not None:
            scope["state"]["principal"] = Principal(role=role, method=Method.TOKEN)
        await broker.app(scope, receive, send)

    app = AuditTrail(known, log)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, client=("10.0.0.9", 1)), base_url="http://b")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


async def test_changes_of_both_apis_have_two_lines(broker: Harness, log: AuditLog, path: Path):
    async with client_of(broker, log, role="alice") as http:
        topic = {"tenant": "public", "namespace": "default", "topic": "t"}
        for method, url, body, operation, resource, status, code in (
            ("PUT", TOPIC, None, "createTopic", topic, 201, None),
            ("PUT", SUBSCRIPTION, None, "subscribe", {**topic, "subscription": "s"}, 201, None),
            ("POST", f"{SUBSCRIPTION}/seek", {"to": "x"}, "seek", {**topic, "subscription": "s"}, 400, None),
            ("DELETE", f"{TOPIC}2", None, "deleteTopic", {**topic, "topic": "t2"}, 404, "no_such_topic"),
            ("POST", f"{V2}/messageTTL?messageTTL=60&token=secret", {}, "adminSetTopicMessageTTL", None, 204, None),
            ("DELETE", f"{V2}2", None, "adminDeleteTopic", {**topic, "topic": "t2"}, 404, "no_such_topic"),
            ("POST", "/admin/v2/namespaces/public/default/permissions/bob", ["produce"], "adminGrantPermission",
             {"tenant": "public", "namespace": "default", "role": "bob"}, 204, None),
        ):  # fmt: skip
            before = len(lines_of(path))
            answer = await http.request(method, url, json=body, headers={"x-request-id": f"r-{operation}"})
            assert answer.status_code == status, answer.text
            started, finished = lines_of(path)[before:]
            assert (started["event"], finished["event"]) == ("change_started", "change_finished")
            assert started["change"] == finished["change"]
            for line in (started, finished):
                assert (line["operation"], line["role"], line["method"]) == (operation, "alice", method)
                assert (line["request_id"], line["client"]) == (f"r-{operation}", "10.0.0.9")
                assert resource is None or line["resource"] == resource
            assert (finished["status"], finished["code"]) == (status, code)
    assert "secret" not in path.read_text()


async def test_messages_and_reads_have_no_lines(broker: Harness, log: AuditLog, path: Path):
    async with client_of(broker, log) as http:
        assert (await http.post(f"{TOPIC}/messages", content=b"x")).status_code == 200
        assert (await http.post(f"{SUBSCRIPTION}/receive", json={"consumer": "c", "wait_ms": 0})).status_code == 200
        assert (await http.get(TOPIC)).status_code == 200
        assert (await http.get(f"{V2}/stats")).status_code == 200
    assert path.read_bytes() == b""


async def test_refusals_of_every_kind_of_route_have_a_line(
    broker: Harness, log: AuditLog, path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def forbid(exchange: Any, operation: Any, **_: Any) -> Any:
        raise Forbidden("the role may not do this")

    async with client_of(broker, log, role="bob") as http:
        monkeypatch.setattr(broker.app._gate._at_owner, "run", forbid)
        requests = {
            "produce": await http.post(f"{TOPIC}/messages", content=b"x"),
            "topicStats": await http.get(TOPIC),
            "adminTopicStats": await http.get(f"{V2}/stats"),
        }
    assert {answer.status_code for answer in requests.values()} == {403}
    lines = lines_of(path)
    assert [line["operation"] for line in lines] == list(requests)
    for line in lines:
        assert (line["event"], line["role"], line["status"], line["code"]) == ("denied", "bob", 403, "forbidden")
        assert line["resource"] == {"tenant": "public", "namespace": "default", "topic": "t"}
        assert line["request_id"] is not None


async def test_without_its_line_a_change_is_refused_and_not_made(broker: Harness, log: AuditLog, path: Path):
    path.unlink()
    path.mkdir()
    async with client_of(broker, log) as http:
        for url, member in ((TOPIC, "detail"), (V2, "reason")):
            answer = await http.put(url)
            assert answer.status_code == 503, answer.text
            assert "the audit log cannot be written" in answer.json()[member]
            assert int(answer.headers["retry-after"]) > 0
        assert (await http.get(TOPIC)).status_code == 404
        assert (await http.post(f"{TOPIC}/messages", content=b"x")).status_code == 200, "messages need no line"
    assert log.failures == 2
    path.rmdir()


async def test_a_served_port_records_what_the_checks_of_origins_refuse(broker: Harness, log: AuditLog, path: Path):
    """On a real socket, where short answers of hot operations skip ASGI."""
    outermost = trail(log)
    async with (
        HttpServer(broker.app, port=0, settings=broker.settings.http, outermost=outermost) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get(TOPIC, headers={"origin": "https://evil.example"})).status_code == 403
        for _ in range(3):
            assert (await http.post(f"{TOPIC}/messages", content=b"x")).status_code == 200
        assert (await http.delete(TOPIC)).status_code == 200
    lines = lines_of(path)
    assert [(line["event"], line["operation"], line.get("status"), line.get("code")) for line in lines] == [
        ("denied", None, 403, "origin_not_allowed"),
        ("change_started", "deleteTopic", None, None),
        ("change_finished", "deleteTopic", 200, None),
    ]


async def test_a_request_that_another_broker_passed_on_says_so(broker: Harness, log: AuditLog, path: Path):
    async with client_of(broker, log) as http:
        await http.put(TOPIC, headers={"bindery-proxied": "1"})
    assert [line["is_proxied"] for line in lines_of(path)] == [True, True]


async def test_a_client_that_claims_to_be_a_broker_is_not_recorded_as_one(
    tree: Any, ledgers: Any, clock: Any, log: AuditLog, path: Path
):
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://b", auth={"passwords_file": "/not/read"})
    proof = broker.app.limiter.passed_on.header(Sender(is_part=False, client=None))
    async with client_of(broker, log, role="alice") as http:
        await http.put(TOPIC, headers={"bindery-proxied": "1", "bindery-passed-on": "0" * 64 + " 0 -"})
        await http.put(TOPIC, headers=[(b"bindery-proxied", b"1"), proof])
    assert [line["is_proxied"] for line in lines_of(path)] == [False, False, True, True]
    await broker.close()

"""Which requests of a port get lines in the audit log, and when."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_parts import lines_of, make_log
from bindery_identity.principal import Method, Principal
from bindery_kit.access import audit_log
from bindery_kit.access.audit_log import AuditLog, AuditLogUnavailable
from bindery_kit.access.audit_trail import IS_PROXIED, AuditTrail, entry_of
from bindery_kit.http.http_request import request_of
from bindery_kit.observability.health import AsgiApp, Receive, Scope, Send


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def answering(status: int, *, before: Callable[[Scope], Any] | None = None) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if before is not None:
            await before(scope)
        headers = [(b"x-request-id", b"r7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return app


async def change(scope: Scope) -> None:
    entry = entry_of(scope)
    assert entry is not None
    await entry.begin("createTopic", {"tenant": "t", "topic": "x"}, request_id="r1")


async def call(app: AsgiApp, log: AuditLog, path: Path, **parts: Any) -> list[tuple[int, int]]:
    """Return (status, number of lines in the file by then) of each beginning of an answer."""
    seen: list[tuple[int, int]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append((message["status"], len(lines_of(path)) if path.exists() else 0))

    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v1/topics/t/n/x",
        "raw_path": b"/v1/topics/t/n/x?token=secret",
        "query_string": b"token=secret",
        "headers": [(b"authorization", b"Bearer secret")],
        "client": ("10.0.0.9", 4711),
        **parts,
    }
    await AuditTrail(app, log)(scope, receive_nothing, send)
    return seen


async def receive_nothing() -> Any:
    return {"type": "http.disconnect"}


async def test_a_change_has_a_line_before_and_a_line_before_its_answer(path: Path):
    log = make_log(path)
    principal = Principal(role="proxy", method=Method.TOKEN, original_role="alice")
    seen = await call(answering(201, before=change), log, path, state={"principal": principal})
    assert seen == [(201, 2)]
    request = {
        "time": "2023-11-14T22:13:20.123Z",
        "service": "broker",
        "change": lines_of(path)[0]["change"],
        "request_id": "r1",
        "role": "proxy",
        "original_role": "alice",
        "method": "PUT",
        "path": "/v1/topics/t/n/x",
        "operation": "createTopic",
        "resource": {"tenant": "t", "topic": "x"},
        "client": "10.0.0.9",
        "is_proxied": False,
    }
    assert lines_of(path) == [
        {**request, "event": "change_started"},
        {**request, "event": "change_finished", "status": 201, "code": None},
    ]
    assert b"secret" not in path.read_bytes()
    await log.close()


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_has_a_line_before_its_answer(path: Path, status: int):
    log = make_log(path)
    seen = await call(answering(status), log, path, state={IS_PROXIED: True})
    assert seen == [(status, 1)]
    line = lines_of(path)[0]
    shown = {name: line[name] for name in ("event", "status", "request_id", "operation", "role", "is_proxied")}
    assert shown == {
        "event": "denied",
        "status": status,
        "request_id": "r7",
        "operation": None,
        "role": None,
        "is_proxied": True,
    }
    await log.close()


@pytest.mark.parametrize("status", [200, 400, 404, 500])
async def test_other_requests_have_no_line(path: Path, status: int):
    log = make_log(path)
    assert await call(answering(status), log, path) == [(status, 0)]
    await log.close()


async def test_a_change_that_is_refused_has_no_third_line(path: Path):
    log = make_log(path)
    assert await call(answering(403, before=change), log, path) == [(403, 2)]
    assert [line["event"] for line in lines_of(path)] == ["change_started", "change_finished"]
    await log.close()


@pytest.mark.parametrize("end", [RuntimeError, asyncio.CancelledError])
async def test_a_change_without_an_answer_has_a_line_without_a_status(path: Path, end: type[BaseException]):
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await change(scope)
        raise end

    log = make_log(path)
    with pytest.raises(end):
        await call(fails, log, path)
    assert [(line["event"], line.get("status")) for line in lines_of(path)] == [
        ("change_started", None),
        ("change_finished", None),
    ]
    await log.close()


async def test_a_change_of_parts_is_one_change(path: Path):
    async def twice(scope: Scope) -> None:
        await change(scope)
        await change(scope)

    log = make_log(path)
    await call(answering(200, before=twice), log, path)
    assert len(lines_of(path)) == 2
    await log.close()


async def test_without_its_line_a_change_is_refused_or_made(tmp_path: Path):
    """`refuse` raises before the change; `continue` makes it and counts."""
    path = tmp_path / "none" / "audit.log"
    log = make_log(path, refuses=True)
    with pytest.raises(AuditLogUnavailable):
        await call(answering(200, before=change), log, path)
    assert log.failures == 1
    await log.close()
    log = make_log(path, refuses=False)
    assert await call(answering(200, before=change), log, path) == [(200, 0)]
    assert log.failures == 2
    await log.close()


@pytest.fixture
def stuck(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[AuditLog, threading.Event]:
    """A log whose file takes no line until the event is set."""
    log, free = make_log(path), threading.Event()
    append = log._file.append
    monkeypatch.setattr(log._file, "append", lambda lines: (free.wait(30), append(lines)))
    return log, free


async def test_a_refused_change_does_not_look_as_if_it_had_been_started(
    path: Path, stuck: tuple[AuditLog, threading.Event], monkeypatch: pytest.MonkeyPatch
):
    """The disk hangs until the change is refused, and then takes the first line."""
    log, free = stuck
    monkeypatch.setattr(audit_log, "WRITE_TIMEOUT_S", 0.01)
    with pytest.raises(AuditLogUnavailable):
        await call(answering(200, before=change), log, path)
    monkeypatch.setattr(audit_log, "WRITE_TIMEOUT_S", 30.0)
    free.set()
    await log.close()
    lines = lines_of(path)
    assert [(line["event"], line.get("status"), line.get("code")) for line in lines] == [
        ("change_started", None, None),
        ("change_finished", 503, "audit_log_unavailable"),
    ]
    assert lines[0]["change"] == lines[1]["change"]
    assert (log.failures, log.lines["change_finished"]) == (1, 1)


async def test_a_change_whose_client_goes_before_its_first_line_is_not_begun(
    path: Path, stuck: tuple[AuditLog, threading.Event]
):
    log, free = stuck
    calling = asyncio.create_task(call(answering(200, before=change), log, path))
    async with asyncio.timeout(30):
        while log._writing is None:
            await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    free.set()
    await log.close()
    assert [(line["event"], line.get("code")) for line in lines_of(path)] == [
        ("change_started", None),
        ("change_finished", "not_begun"),
    ]


async def test_a_made_change_is_answered_although_its_second_line_cannot_be_written(path: Path):
    async def breaks(scope: Scope) -> None:
        await change(scope)
        path.rename(path.with_suffix(".1"))
        path.mkdir()

    log = make_log(path)
    seen: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    scope = {"type": "http", "method": "PUT", "path": "/", "headers": [], "client": None}
    await AuditTrail(answering(200, before=breaks), log)(scope, receive_nothing, send)
    assert seen == [200]
    assert log.failures == 1
    await log.close()


async def test_the_short_way_of_responses_stays_open(path: Path):
    """A handler finds the server's request behind the `send` that it gets."""
    found: list[object] = []

    class Server:
        async def send(self, message: Any) -> None: ...

    server = Server()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(getattr(send, "__self__", None))
        assert request_of(send) is None  # not a server of this library

    log = make_log(path)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": None}
    await AuditTrail(app, log)(scope, receive_nothing, server.send)
    assert found == [server]
    await log.close()

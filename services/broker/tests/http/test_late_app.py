"""The application of a port whose broker is still starting."""

from asgi_call import Line, http_scope
from bindery_broker.http.late_app import LateApp, refuse_unknown
from bindery_core.errors import Unauthorized
from bindery_kit.observability.health import Receive, Scope, Send


async def test_requests_are_answered_with_503_until_the_broker_has_started() -> None:
    line = Line()
    await LateApp()(http_scope(), line.receive, line.send)
    assert line.status == 503
    assert line.problem()["code"] == "starting"
    assert (b"retry-after", b"1") in line.headers


async def test_a_refused_client_gets_the_id_of_its_request() -> None:
    for path in ("/v1/topics", "/admin/v2/tenants"):
        ids = []
        for headers in ([(b"x-request-id", b"mine")], [], []):
            line = Line()
            await refuse_unknown(
                http_scope(path=path, headers=headers), line.receive, line.send, Unauthorized("no"), ["Bearer"]
            )
            assert line.status == 401
            ids.append(dict(line.headers)[b"x-request-id"])
        assert ids[0] == b"mine"
        assert len(set(ids)) == 3


async def test_websockets_are_told_to_try_again_later() -> None:
    line = Line()
    await LateApp()({"type": "websocket"}, line.receive, line.send)
    assert line.sent == [{"type": "websocket.close", "code": 1013}]


async def test_the_server_may_start_and_stop() -> None:
    line = Line({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    await LateApp()({"type": "lifespan"}, line.receive, line.send)
    assert line.sent == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]


async def test_every_call_goes_to_the_broker_once_it_is_there() -> None:
    app, calls = LateApp(), []

    async def started(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append((scope, receive, send))

    app.put(started)
    line = Line()
    scopes = [http_scope(), {"type": "websocket"}, {"type": "lifespan"}]
    for scope in scopes:
        await app(scope, line.receive, line.send)
    assert calls == [(scope, line.receive, line.send) for scope in scopes]
    assert line.sent == []

"""The admin API: BookKeeper's paths and responses, errors, and limits."""

import asyncio

import pytest
from bindery_bookie.admin.app import HEAVY_MAX, ROUTES, AdminApp
from bindery_kit.admin.http import BODY_SIZE_MAX, QUERY_SIZE_MAX, Answer, Request, Route, json_answer


async def test_a_huge_body_is_refused(admin) -> None:
    answer = await admin.http.put("/api/v1/bookie/state/readonly", content=b" " * (BODY_SIZE_MAX + 1))
    assert answer.status_code == 413


async def test_errors_of_unknown_paths_and_methods_list_the_known_ones(admin) -> None:
    answer = await admin.http.get("/api/v1/bookie/nothing")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert "/api/v1/bookie/info" in answer.json()["detail"]
    answer = await admin.http.post("/api/v1/bookie/info")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"


async def test_head_is_get_without_a_body(admin) -> None:
    answer = await admin.http.head("/api/v1/bookie/info")
    assert answer.status_code == 200
    assert answer.content == b""
    assert int(answer.headers["content-length"]) > 0


# --- bounds ---------------------------------------------------------------------------------------------------------


async def test_a_huge_query_is_refused(admin) -> None:
    answer = await admin.http.get("/api/v1/bookie/info?x=" + "y" * QUERY_SIZE_MAX)
    assert answer.status_code == 414
    answer = await admin.http.get("/api/v1/bookie/info?" + "&".join(f"a{at}=1" for at in range(100)))
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize("text", ["x", "-2", "1.5", "0xg", str(2**63), ""])
async def test_the_error_of_a_wrong_number_names_its_parameter(admin, text) -> None:
    answer = await admin.http.get("/api/v1/ledger/metadata", params={"ledger_id": text})
    assert answer.status_code == 400
    assert answer.json()["facts"]["parameter"] == "ledger_id"


async def test_deeply_nested_json_is_a_bad_request(admin) -> None:
    json_type = {"content-type": "application/json"}
    answer = await admin.http.put("/api/v1/bookie/state/readonly", content=b"[" * 60_000, headers=json_type)
    assert answer.status_code == 400


async def test_a_handler_that_fails_or_hangs_gets_an_error_response(admin, monkeypatch, make_admin) -> None:
    async def broken(context, request: Request) -> Answer:
        raise RuntimeError("secret detail")

    async def hanging(context, request: Request) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async def streaming(context, request: Request) -> Answer:
        async def pieces():  # type: ignore[no-untyped-def]
            await asyncio.Event().wait()
            yield b""

        return Answer(200, "text/plain", pieces())

    monkeypatch.setattr("bindery_kit.admin.app.REQUEST_TIMEOUT_S", 0.02)
    routes = [
        Route("GET", "/broken", broken, is_heavy=True),
        Route("GET", "/hanging", hanging, is_heavy=True),
        Route("GET", "/streaming", streaming, is_heavy=True),
    ]
    made = make_admin()
    made.app = AdminApp(made.app._context, routes)
    http = made.client()
    for _ in range(HEAVY_MAX + 1):
        answer = await http.get("/broken")
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert (await http.get("/hanging")).status_code == 504
        assert (await http.get("/streaming")).status_code == 504


async def test_only_a_few_heavy_requests_run_at_a_time(make_admin) -> None:
    go_on = asyncio.Event()
    begun = 0

    async def heavy(context, request: Request) -> Answer:
        async def pieces():  # type: ignore[no-untyped-def]
            nonlocal begun
            begun += 1
            yield b"a"
            await go_on.wait()
            yield b"b"

        return Answer(200, "text/plain", pieces())

    async def light(context, request: Request) -> Answer:
        return json_answer({})

    made = make_admin()
    made.app = AdminApp(made.app._context, [Route("GET", "/h", heavy, is_heavy=True), Route("GET", "/l", light)])
    http = made.client()
    running = [asyncio.create_task(http.get("/h")) for _ in range(HEAVY_MAX)]
    while begun < HEAVY_MAX:
        await asyncio.sleep(0.001)
    refused = await http.get("/h")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert (await http.get("/l")).status_code == 200
    go_on.set()
    assert [answer.text for answer in await asyncio.gather(*running)] == ["ab"] * HEAVY_MAX
    assert (await http.get("/h")).text == "ab"


async def test_a_client_that_leaves_ends_its_stream(make_admin) -> None:
    ended = asyncio.Event()

    async def endless(context, request: Request) -> Answer:
        async def pieces():  # type: ignore[no-untyped-def]
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0)
            finally:
                ended.set()

        return Answer(200, "text/plain", pieces())

    app = AdminApp(make_admin().app._context, [Route("GET", "/endless", endless)])
    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive():  # type: ignore[no-untyped-def]
        return messages.pop(0)

    async def send(message):  # type: ignore[no-untyped-def]
        return None

    scope = {"type": "http", "method": "GET", "path": "/endless", "query_string": b"", "headers": []}
    async with asyncio.timeout(30):
        await app(scope, receive, send)
    assert ended.is_set()


async def test_a_client_that_does_not_read_is_disconnected(make_admin, monkeypatch) -> None:
    monkeypatch.setattr("bindery_kit.admin.app.SEND_TIMEOUT_S", 0.02)

    async def two_pieces(context, request: Request) -> Answer:
        async def pieces():  # type: ignore[no-untyped-def]
            yield b"a"
            yield b"b"

        return Answer(200, "text/plain", pieces())

    made = make_admin()
    made.app = app = AdminApp(made.app._context, [Route("GET", "/h", two_pieces, is_heavy=True)])

    async def receive():  # type: ignore[no-untyped-def]
        await asyncio.Event().wait()

    async def send(message):  # type: ignore[no-untyped-def]
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/h", "query_string": b"", "headers": []}
    async with asyncio.timeout(30):
        for _ in range(HEAVY_MAX):
            with pytest.raises(TimeoutError):
                await app(scope, receive, send)
        assert (await made.client().get("/h")).text == "ab"


async def test_during_the_start_only_some_paths_are_served(make_admin) -> None:
    made = make_admin(is_open=lambda: False, metadata=lambda: None)
    for route in ROUTES:
        answer = await made.http.request(route.method, route.path)
        if route.during_start:
            assert answer.status_code != 500, route.path
        else:
            assert (answer.status_code, answer.json()["code"]) == (503, "starting"), route.path


async def test_a_bookie_without_a_store_has_no_access_to_recovery(admin) -> None:
    answer = await admin.http.get("/api/v1/autorecovery/status")
    assert answer.status_code == 503
    assert "recovery" in answer.json()["detail"]

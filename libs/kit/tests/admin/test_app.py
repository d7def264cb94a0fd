"""AdminApp: the choice of a route, the names in its path, and its errors."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from bindery_core.errors import Unauthorized
from bindery_identity.tokens import Bearer
from bindery_kit.admin.access import OPEN, Access, AdminAccess
from bindery_kit.admin.app import HEAVY_MAX, AdminApp
from bindery_kit.admin.http import Answer, Request, Route, json_answer


async def _tell(context: str, request: Request) -> Answer:
    return json_answer({"context": context, "in_path": dict(request.in_path)})


async def _number(context: str, request: Request) -> Answer:
    return json_answer(request.number("id"))


async def _break(context: str, request: Request) -> Answer:
    raise RuntimeError("secret")


async def _echo(context: str, request: Request) -> Answer:
    return json_answer(request.json_object(may_be_empty=True))


ROUTES: list[Route[str]] = [
    Route("GET", "/things", _tell),
    Route("GET", "/things/{id}", _number),
    Route("DELETE", "/things/{id}", _tell),
    Route("GET", "/things/special", _tell),
    Route("GET", "/things/{id}/parts/{part}", _tell),
    Route("GET", "/broken", _break),
    Route("PUT", "/echo", _echo),
]


@pytest.fixture
def http() -> httpx.AsyncClient:
    app = AdminApp("here", ROUTES, access=OPEN, service="shop")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop")


async def test_names_in_a_path_are_decoded_and_passed_to_the_handler(http: httpx.AsyncClient) -> None:
    assert (await http.get("/things/7/parts/a%20b%2Fc")).status_code == 404, "a name holds no slash"
    found = (await http.get("/things/7/parts/a%20b")).json()
    assert found == {"context": "here", "in_path": {"id": "7", "part": "a b"}}
    assert (await http.get("/things/7/parts/")).status_code == 404
    assert (await http.get("/things/7")).json() == 7
    assert (await http.get("/things/7?id=8")).json() == 7
    assert (await http.get("/things/0x10")).json() == 16
    assert (await http.delete("/things/7")).json()["in_path"] == {"id": "7"}


async def test_a_fixed_path_takes_precedence_over_a_pattern(http: httpx.AsyncClient) -> None:
    assert (await http.get("/things/special")).json() == {"context": "here", "in_path": {}}
    assert (await http.delete("/things/special")).status_code == 405


async def test_errors_contain_the_name_of_the_service(http: httpx.AsyncClient) -> None:
    answer = await http.get("/things/seven")
    assert answer.status_code == 400
    assert answer.json()["facts"]["parameter"] == "id"
    answer = await http.get("/broken")
    assert (answer.status_code, answer.json()["detail"]) == (500, "internal error: the log of the shop has the cause")
    answer = await http.post("/things/7")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, DELETE")


JSON = {"content-type": "application/json"}


async def test_a_json_body_needs_its_content_type_and_an_empty_body_needs_none(http: httpx.AsyncClient) -> None:
    assert (await http.put("/echo", content=b'{"a":1}', headers=JSON)).json() == {"a": 1}
    assert (await http.put("/echo")).json() == {}
    assert (await http.put("/echo", content=b" ", headers={"content-type": "text/plain"})).json() == {}
    for wrong in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = await http.put("/echo", content=b'{"a":1}', headers=wrong)
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
        assert "-H 'Content-Type: application/json'" in answer.json()["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"\\ud800"}',
        b'{"\\udc00\\ud800":1}',
        b'{"a":[{"b":"\\uDFFF"}]}',
        b'{"a":"\xed\xa0\x80"}',
        '{"a":"\ud800"}'.encode("utf-16", "surrogatepass"),
    ],
)
async def test_a_json_body_with_half_a_character_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    """Python reads an unpaired surrogate into a string that cannot be encoded, so that storing it fails later."""
    answer = await http.put("/echo", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert "surrogate" in answer.json()["detail"]
    pair = await http.put("/echo", content=b'{"a":"\\ud83d\\udc19"}', headers=JSON)
    assert pair.json() == {"a": "\N{OCTOPUS}"}


async def test_an_encoded_body_is_refused_before_it_is_read(http: httpx.AsyncClient) -> None:
    sent = []

    async def body() -> AsyncIterator[bytes]:
        sent.append(True)
        yield b'{"a":1}'

    answer = await http.put("/echo", content=body(), headers={**JSON, "content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    assert not sent


class OneToken:
    """Accepts one token."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        if token != self._token:
            raise Unauthorized("another token")
        return Bearer("somebody")


def access(token: bytes | None) -> Access:
    return Access(OneToken(token) if token else None, now_s=lambda: 0.0, hint="set it")


async def _trust(context: str, request: Request) -> Answer:
    return json_answer(request.is_trusted)


@pytest.mark.parametrize(
    ("own", "cluster", "token", "told"),
    [
        (None, None, None, [True, 200, 200]),
        (None, access(None), None, [False, 200, 401]),
        (None, access(None), "own", [False, 200, 401]),
        (access(b"own"), access(None), "own", [True, 200, 401]),
        (access(b"own"), access(b"cluster"), "own", [True, 200, 401]),
        (access(b"own"), access(b"cluster"), "cluster", [False, 401, 200]),
        (access(b"own"), access(b"own"), None, [False, 401, 401]),
        (access(None), access(None), "own", [False, 401, 401]),
    ],
)
async def test_changes_of_the_cluster_have_a_check_of_their_own(
    own: Access | None, cluster: Access | None, token: str | None, told: list[object]
) -> None:
    """Whether a read is trusted; the status of a change of this process, and of one of the cluster."""
    routes = [
        Route("GET", "/read", _trust),
        Route("PUT", "/own", _tell),
        Route("PUT", "/cluster", _tell, is_cluster_wide=True),
    ]
    app = AdminApp("here", routes, access=AdminAccess(own=own, cluster=cluster), service="shop")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop", headers=headers)
    changes = [(await http.put(path)).status_code for path in ("/own", "/cluster")]
    assert [(await http.get("/read")).json(), *changes] == told


async def test_heavy_requests_wait_for_their_turn_and_then_get_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bindery_kit.admin.app.HEAVY_WAIT_S", 0.2)
    running: list[str] = []
    release = asyncio.Event()

    async def heavy(_context: str, request: Request) -> Answer:
        running.append(request.query["name"])
        await release.wait()
        return json_answer(request.query["name"])

    app = AdminApp("here", [Route("GET", "/heavy", heavy, is_heavy=True)], access=OPEN, service="shop")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shop") as http:
        first = [asyncio.create_task(http.get(f"/heavy?name={number}")) for number in range(HEAVY_MAX)]
        while len(running) < HEAVY_MAX:
            await asyncio.sleep(0.001)
        answer = await http.get("/heavy?name=late")
        assert (answer.status_code, answer.json()["code"]) == (429, "too_many_requests")
        assert answer.headers["retry-after"] == "1"
        waiting = asyncio.create_task(http.get("/heavy?name=waiting"))
        await asyncio.sleep(0.05)
        assert len(running) == HEAVY_MAX
        release.set()
        assert [(await one).status_code for one in (*first, waiting)] == [200] * (HEAVY_MAX + 1)
        assert running[HEAVY_MAX:] == ["waiting"]
        assert (await http.get("/heavy?name=again")).status_code == 200

"""The admin API: BookKeeper's paths and shapes, clear errors."""

import httpx
import pytest
from bindery_bookie.admin import BODY_SIZE_MAX, AdminApp
from bindery_bookie.state import BookieState
from bindery_kit.health import Health


class Admin:
    def __init__(self, store) -> None:  # type: ignore[no-untyped-def]
        self.state, self.health = BookieState(), Health()
        app = AdminApp(store, self.state, self.health, lambda: {"port": "3181"})
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bookie")


@pytest.fixture
def admin(memory_store) -> Admin:
    return Admin(memory_store)


async def test_info_and_state_have_bookkeepers_shape(admin) -> None:
    admin.state.running = True
    assert (await admin.http.get("/api/v1/bookie/info")).json() == {"freeSpace": 400, "totalSpace": 1000}
    assert (await admin.http.get("/api/v1/bookie/state")).json() == {
        "running": True,
        "readOnly": False,
        "shuttingDown": False,
        "availableForHighPriorityWrites": True,
    }
    assert (await admin.http.get("/heartbeat")).text == "OK\n"
    assert (await admin.http.get("/api/v1/config/server_config")).json() == {"port": "3181"}


async def test_ready_follows_health(admin) -> None:
    assert (await admin.http.get("/api/v1/bookie/is_ready")).status_code == 503
    admin.health.started()
    answer = await admin.http.get("/api/v1/bookie/is_ready")
    assert (answer.status_code, answer.text) == (200, "OK")


async def test_an_operator_may_turn_the_bookie_read_only_and_back(admin) -> None:
    path = "/api/v1/bookie/state/readonly"
    assert (await admin.http.put(path, json={"readOnly": True})).json()["readOnly"] is True
    assert admin.state.reasons == {"admin": "an operator asked for it"}
    admin.state.set_read_only("disk", "full")
    assert (await admin.http.put(path, json={"readOnly": False})).json() == {
        "readOnly": True,
        "reasons": {"disk": "full"},
    }
    assert (await admin.http.get(path)).json()["readOnly"] is True


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"readOnly": 1}', b'{"readonly": true}', b"\xff"])
async def test_a_body_that_says_nothing_is_a_bad_request(admin, body) -> None:
    answer = await admin.http.put("/api/v1/bookie/state/readonly", content=body)
    assert answer.status_code == 400
    assert answer.json()["code"] == "bad_request"
    assert not admin.state.read_only


async def test_a_huge_body_is_refused(admin) -> None:
    answer = await admin.http.put("/api/v1/bookie/state/readonly", content=b" " * (BODY_SIZE_MAX + 1))
    assert answer.status_code == 413


async def test_unknown_paths_and_methods_say_what_there_is(admin) -> None:
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

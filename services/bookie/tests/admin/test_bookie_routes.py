"""Routes about the bookie itself have BookKeeper's paths and responses."""

import pytest
from bindery_bookie.admin.bookie_routes import ROUTES

API = "/api/v1/bookie"


async def test_info_and_state_have_bookkeepers_shape(admin) -> None:
    admin.state.running = True
    assert (await admin.http.get("/api/v1/bookie/info")).json() == {"freeSpace": 400, "totalSpace": 1000}
    assert (await admin.http.get("/api/v1/bookie/state")).json() == {
        "running": True,
        "readOnly": False,
        "shuttingDown": False,
        "availableForHighPriorityWrites": True,
        "membership": {"intent": "active", "sinceMs": 0, "untilMs": None, "reason": "", "by": ""},
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
    assert admin.state.reasons == {"admin": "set by an operator"}
    admin.state.set_read_only("disk", "full")
    assert (await admin.http.put(path, json={"readOnly": False})).json() == {
        "readOnly": True,
        "reasons": {"disk": "full"},
    }
    assert (await admin.http.get(path)).json()["readOnly"] is True


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"readOnly": 1}', b'{"readonly": true}', b"\xff"])
async def test_a_body_without_the_member_is_a_bad_request(admin, body) -> None:
    json_type = {"content-type": "application/json"}
    answer = await admin.http.put("/api/v1/bookie/state/readonly", content=body, headers=json_type)
    assert answer.status_code == 400
    assert answer.json()["code"] == "bad_request"
    assert not admin.state.read_only


async def test_settings_of_a_running_bookie_cannot_be_changed(admin) -> None:
    assert (await admin.http.put("/api/v1/config/server_config", json={"port": "1"})).status_code == 405


async def test_the_sanity_check_is_skipped_on_a_read_only_bookie(admin) -> None:
    admin.state.set_read_only("disk", "full")
    answer = (await admin.http.get("/api/v1/bookie/sanity")).json()
    assert answer == {"passed": False, "readOnly": True, "reason": "read-only: full"}
    assert not admin.store.groups


async def test_the_state_shows_what_adds_are_accepted(admin) -> None:
    admin.state.set_read_only("disk", "full")
    admin.state.shutting_down = True
    admin.state.membership = {"intent": "draining"}
    assert (await admin.http.get(f"{API}/state")).json() == {
        "running": False,
        "readOnly": True,
        "shuttingDown": True,
        "availableForHighPriorityWrites": False,
        "membership": {"intent": "draining"},
    }
    admin.state.high_priority_writes = True
    assert (await admin.http.get(f"{API}/state")).json()["availableForHighPriorityWrites"] is True


async def test_a_bookie_that_is_not_ready_has_reasons(admin) -> None:
    admin.health.started()
    admin.health.block("disk", "full")
    answer = await admin.http.get(f"{API}/is_ready")
    assert (answer.status_code, answer.json()) == (503, {"reasons": {"disk": "full"}})


async def test_the_sanity_route_has_the_result(admin) -> None:
    assert (await admin.http.get(f"{API}/sanity")).json() == {"passed": True, "readOnly": False}


async def test_the_sanity_route_has_the_cause_of_a_failure(admin, monkeypatch) -> None:
    def fail(keys, done) -> None:  # type: ignore[no-untyped-def]
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(admin.store, "read_many", fail)
    answer = (await admin.http.get(f"{API}/sanity")).json()
    assert answer == {"passed": False, "readOnly": False, "reason": "[Errno 5] the disk is gone"}


async def test_which_routes_are_served_during_the_start(make_admin) -> None:
    http = make_admin(is_open=lambda: False, metadata=lambda: None).http
    for path in ("/heartbeat", "/api/v1/config/server_config", f"{API}/state", f"{API}/state/readonly"):
        assert (await http.get(path)).status_code == 200, path
    assert (await http.get(f"{API}/is_ready")).json() == {"reasons": {"startup": "starting"}}
    assert (await http.put(f"{API}/state/readonly", json={"readOnly": True})).status_code == 200
    for path in ("info", "sanity"):
        assert (await http.get(f"{API}/{path}")).json()["code"] == "starting", path


def test_only_the_sanity_check_is_guarded_and_limited() -> None:
    assert [route.path for route in ROUTES if route.is_guarded or route.is_heavy] == [f"{API}/sanity"]
    assert [route.is_guarded and route.is_heavy for route in ROUTES if route.path == f"{API}/sanity"] == [True]

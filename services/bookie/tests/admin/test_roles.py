"""Roles on the HTTP port of a bookie, and its lines in the audit log."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_bookie.access import roles
from bindery_bookie.access.roles import Role, Roles
from bindery_bookie.access.security import AuthSettings, admin_access
from bindery_bookie.admin.app import ROUTES
from bindery_bookie.settings import AdminSettings, AuditSettings
from bindery_identity.tokens import sign
from bindery_kit.access.allowed_names import AllowedNames
from bindery_kit.access.audit_trail import AuditTrail

KEY = b"k" * 32
NAMES = {Role.CLIENT: "broker", Role.RECOVERY: "auditor", Role.ADMIN: "operator"}
LIMITED = Roles(**{role.value: AllowedNames(frozenset({name})) for role, name in NAMES.items()})  # type: ignore[arg-type]


@pytest.fixture
def limited(make_admin: Any, tmp_path: Path) -> Any:
    (tmp_path / "keys").write_bytes(KEY)
    settings = AdminSettings(keys_file=str(tmp_path / "keys"))
    return make_admin(access=admin_access(AuthSettings(), settings, host="10.0.0.1", now_s=lambda: 0.0), roles=LIMITED)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {sign(KEY, subject=name).decode()}"}


async def test_each_route_is_for_its_role(limited: Any) -> None:
    """Every route with the token of each role, of a stranger, and without one."""
    for route in ROUTES:
        role = roles.ROUTES[route.method, route.path]
        for name in (*NAMES.values(), "stranger", None):
            http = limited.client(**({} if name is None else bearer(name)))
            answer = await http.request(route.method, route.path, params={"ledger_id": "987654"})
            what = f"{route.method} {route.path} as {name}"
            if role is None or name == NAMES[role]:
                assert answer.status_code not in (401, 403), what
            else:
                assert answer.status_code == (401 if name is None else 403), what
                assert answer.json()["code"] == ("unauthorized" if name is None else "forbidden"), what
                assert "987654" not in answer.text, what
                if name is not None:
                    assert f"auth.{role.value}_roles" in answer.json()["detail"]


async def test_passwords_are_shown_only_to_the_role_for_recovery(limited: Any) -> None:
    await limited.initialize()
    for name, is_trusted in (("auditor", True), ("operator", False), ("broker", False)):
        scope = {"headers": [(b"authorization", bearer(name)["Authorization"].encode())]}
        [route] = [one for one in ROUTES if (one.method, one.path) == ("GET", "/api/v1/ledger/metadata")]
        assert limited.app._admit(route, scope, None) is is_trusted


async def test_changes_and_refusals_are_in_the_audit_log(limited: Any, tmp_path: Path) -> None:
    log = AuditSettings(file=str(tmp_path / "audit")).open(
        service="bookie", clock=lambda: 0.0, wall_clock_ms=lambda: 1_700_000_000_123
    )
    assert log is not None
    transport = httpx.ASGITransport(app=AuditTrail(limited.app, log), client=("10.0.0.9", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://bookie") as http:
        path = "/api/v1/bookie/state/readonly"
        await http.put(path, json={"readOnly": True}, headers={**bearer("operator"), "X-Request-Id": "r1"})
        await http.put(path, json={"readOnly": "x"}, headers=bearer("operator"))
        await http.put(path, json={"readOnly": True}, headers=bearer("stranger"))
        await http.get("/api/v1/ledger/read?ledger_id=5&password=secret")
        await http.get("/api/v1/bookie/state", headers=bearer("stranger"))
        await http.delete("/api/v1/ledger/delete?ledger_id=5", headers=bearer("broker"))
    await log.close()
    text = (tmp_path / "audit").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    shown = [
        (line["event"], line["role"], line["operation"], line.get("status"), line.get("code"), line["resource"])
        for line in lines
    ]
    put = "PUT /api/v1/bookie/state/readonly"
    assert shown == [
        ("change_started", "operator", put, None, None, {}),
        ("change_finished", "operator", put, 200, None, {}),
        ("change_started", "operator", put, None, None, {}),
        ("change_finished", "operator", put, 400, "bad_request", {}),
        ("denied", "stranger", put, 403, "forbidden", {}),
        ("denied", None, "GET /api/v1/ledger/read", 401, "unauthorized", {"ledger_id": "5"}),
        ("denied", "broker", "DELETE /api/v1/ledger/delete", 403, "forbidden", {"ledger_id": "5"}),
    ]
    assert [line["request_id"] for line in lines[:3]] == ["r1", "r1", None]
    assert lines[0]["change"] == lines[1]["change"] != lines[2]["change"]
    assert {line["client"] for line in lines} == {"10.0.0.9"}
    assert "secret" not in text
    assert "Bearer" not in text


async def test_without_its_line_a_change_is_not_made(limited: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    settings = AuditSettings(file=str(tmp_path / "logs" / "audit"))
    log = settings.open(service="bookie", clock=lambda: 0.0, wall_clock_ms=lambda: 0)
    assert log is not None
    (tmp_path / "logs" / "audit").unlink()
    (tmp_path / "logs").rmdir()
    transport = httpx.ASGITransport(app=AuditTrail(limited.app, log))
    async with httpx.AsyncClient(transport=transport, base_url="http://bookie") as http:
        answer = await http.put("/api/v1/bookie/state/readonly", json={"readOnly": True}, headers=bearer("operator"))
    assert (answer.status_code, answer.json()["code"]) == (503, "audit_log_unavailable")
    assert "audit_log.on_failure=continue" in answer.json()["detail"]
    assert not limited.state.read_only
    await log.close()

"""Roles of an auditor's clients."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_auditor.app import ROUTES, AuditorApp, AuditorContext
from bindery_auditor.main import admin_access
from bindery_auditor.roles import role_rules
from bindery_auditor.settings import AdminSettings, AuditorSettings
from bindery_core.errors import BadRequest
from bindery_identity.tokens import sign

KEY = b"k" * 32


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    (tmp_path / "keys").write_bytes(KEY)
    return str(tmp_path / "keys")


async def statuses(admin: AdminSettings, name: str | None) -> dict[tuple[str, str], int]:
    """Return the status of each route with the token of `name`; None: without a token."""
    access = admin_access(AuditorSettings(admin=admin))
    app = AuditorApp(AuditorContext(), access=access, rules=role_rules(admin, ROUTES))
    headers = {} if name is None else {"Authorization": f"Bearer {sign(KEY, subject=name).decode()}"}
    found: dict[tuple[str, str], Any] = {}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://auditor", headers=headers) as http:
        for route in ROUTES:
            answer = await http.request(route.method, route.path.format(id=7))
            found[route.method, route.path] = answer.status_code
    return found


async def test_each_route_needs_exactly_one_role(keys_file: str) -> None:
    admin = AdminSettings(keys_file=keys_file, reader_roles="viewer", operator_roles="operator,second")
    expected = {
        "viewer": {"GET": 503, "PUT": 403, "POST": 403},
        "operator": {"GET": 403, "PUT": 503, "POST": 503},
        "second": {"GET": 403, "PUT": 503, "POST": 503},
        "stranger": {"GET": 403, "PUT": 403, "POST": 403},
        None: {"GET": 401, "PUT": 401, "POST": 401},
    }
    for name, by_method in expected.items():
        found = await statuses(admin, name)
        assert found == {(method, path): by_method[method] for method, path in found}, name


async def test_by_default_reading_is_open_and_every_token_may_change(keys_file: str) -> None:
    admin = AdminSettings(keys_file=keys_file)
    for name, change in (("anyone", 503), (None, 401)):
        found = await statuses(admin, name)
        assert {status for (method, _), status in found.items() if method == "GET"} == {503}
        assert {status for (method, _), status in found.items() if method != "GET"} == {change}


@pytest.mark.parametrize("setting", ["reader_roles", "operator_roles"])
def test_names_without_signed_tokens_are_refused(setting: str, tmp_path: Path) -> None:
    for admin in (
        AdminSettings(**{setting: "alice"}),  # type: ignore[arg-type]
        AdminSettings(token_file=str(tmp_path / "secrets"), **{setting: "alice"}),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadRequest, match=rf"admin\.{setting} names clients, which needs signed tokens"):
            role_rules(admin, ROUTES)


def test_every_route_has_a_role() -> None:
    rules = role_rules(AdminSettings(), ROUTES)
    assert {(route.method, route.path): rules[route.method, route.path].role for route in ROUTES} == {
        (route.method, route.path): "reader" if route.method == "GET" else "operator" for route in ROUTES
    }

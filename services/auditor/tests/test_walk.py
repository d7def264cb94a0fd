"""Walk all routes of the auditor's port with every kind of client, and write what was observed into
docs/access-table.md.
"""

from pathlib import Path

import httpx
import pytest
from bindery_auditor.app import ROUTES, AuditorApp, AuditorContext
from bindery_auditor.main import admin_access
from bindery_auditor.roles import role_rules
from bindery_auditor.settings import AdminSettings, AuditorSettings
from bindery_identity.tokens import sign
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.process_page import ProcessPage

KEY = b"k" * 32
NONE, WRONG, EXPIRED = "no token", "wrong token", "expired token"
UNKNOWN = (NONE, WRONG, EXPIRED)
COLUMNS = (*UNKNOWN, "none", "reader", "operator")
"""The name of a client with a token is its kind: its only role, if it has one."""
PROBES = ("/livez", "/readyz", "/startupz", "/metrics")


@pytest.mark.parametrize("limits_readers", [True, False])
async def test_every_route_with_every_kind_of_client(tmp_path: Path, check_section, limits_readers):
    """`reader_roles` limits who may read; without it, reading needs no token."""
    (tmp_path / "keys").write_bytes(KEY)
    admin = AdminSettings(
        keys_file=str(tmp_path / "keys"), operator_roles="operator", reader_roles="reader" if limits_readers else "*"
    )
    access, rules = admin_access(AuditorSettings(admin=admin)), role_rules(admin, ROUTES)
    app = OpsApp(
        Health(),
        ProcessPage("auditor", lambda: b""),
        app=AuditorApp(AuditorContext(), access=access, rules=rules),
    )
    lines = [f"| route | role | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://auditor") as http:

        async def outcome(method: str, path: str, kind: str) -> str:
            headers = {}
            if kind != NONE:
                key, expires_at_s = (b"w" * 32 if kind == WRONG else KEY), 1_000 if kind == EXPIRED else None
                headers["Authorization"] = f"Bearer {sign(key, subject=kind, expires_at_s=expires_at_s).decode()}"
            answer = await http.request(method, path, headers=headers)
            return str(answer.status_code) if answer.status_code in (401, 403) else "yes"

        for route in ROUTES:
            role = rules[route.method, route.path].role
            found = []
            for kind in COLUMNS:
                status = await outcome(route.method, route.path.format(id=7), kind)
                refused = "401" if kind in UNKNOWN else "yes" if kind == role else "403"
                is_open = role == "reader" and not limits_readers
                assert status == ("yes" if is_open else refused), (route.method, route.path, kind)
                found.append(status)
            lines.append(f"| {route.method} {route.path} | {role} | {' | '.join(found)} |")
        for path in PROBES:
            found = [await outcome("GET", path, kind) for kind in COLUMNS]
            assert set(found) == {"yes"}, path
            lines.append(f"| GET {path} | none | {' | '.join(found)} |")
    if limits_readers:
        check_section("access-table.md", "auditor", "\n".join(lines))

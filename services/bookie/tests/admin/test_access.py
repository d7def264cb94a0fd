"""Authentication of the admin API: changes need a token, and so does reading the content of entries."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, admin_access
from bindery_bookie.admin.app import HEAVY_MAX, ROUTES, AdminApp
from bindery_bookie.settings import AdminSettings
from bindery_identity.tokens import sign
from bindery_kit.admin.access import AdminAccess
from bindery_kit.admin.http import Answer, Request, Route, json_answer

SECRET = "a-secret-of-the-cluster"
KEY = b"k" * 32
NOW_S = 1_700_000_000
GUARDED = {"/api/v1/ledger/read", "/api/v1/bookie/sanity"}


OPERATOR = "a-secret-of-the-operators"
CLUSTER_WIDE = {
    ("PUT", "/api/v1/autorecovery/status"),
    ("PUT", "/api/v1/autorecovery/trigger_audit"),
    ("PUT", "/api/v1/autorecovery/lost_bookie_recovery_delay"),
    ("PUT", "/api/v1/autorecovery/bookie"),
    ("PUT", "/api/v1/autorecovery/decommission"),
    ("DELETE", "/api/v1/ledger/delete"),
    ("PUT", "/api/v1/bookie/gc/rollback"),
}
OWN = {
    ("PUT", "/api/v1/bookie/state/readonly"),
    ("PUT", "/api/v1/bookie/expand_storage"),
    ("PUT", "/api/v1/bookie/gc"),
    ("PUT", "/api/v1/bookie/gc/suspend_compaction"),
    ("PUT", "/api/v1/bookie/gc/resume_compaction"),
    ("PUT", "/api/v1/bookie/entry_location_compact"),
    ("PUT", "/api/v1/bookie/scrub"),
    ("PUT", "/api/v1/bookie/drill"),
    ("DELETE", "/api/v1/bookie/drill"),
}


def access(auth: AuthSettings | None = None, *, host: str = "127.0.0.1", **admin: str) -> AdminAccess:
    return admin_access(auth or AuthSettings(), AdminSettings(**admin), host=host, now_s=lambda: NOW_S)


@pytest.fixture
def secrets_file(tmp_path: Path) -> str:
    (tmp_path / "secrets").write_text(f"{SECRET}\nanother-secret-of-it\n")
    return str(tmp_path / "secrets")


@pytest.fixture
def locked(make_admin, secrets_file) -> Callable[..., object]:
    settings = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=secrets_file)
    return make_admin(access=access(settings))


def test_everything_except_a_plain_get_needs_a_token() -> None:
    assert {route.path for route in ROUTES if route.method == "GET" and route.needs_token} == GUARDED
    assert all(route.needs_token for route in ROUTES if route.method != "GET")
    assert len([route for route in ROUTES if route.needs_token]) >= 12


@pytest.mark.parametrize(
    "token", [None, "", "Bearer", "Bearer ", f"Basic {SECRET}", "Bearer wrong-secret-of-the-cluster", SECRET]
)
async def test_routes_that_need_a_token_refuse_requests_without_a_good_one(locked, token) -> None:
    http = locked.client(**({} if token is None else {"Authorization": token}))
    for route in ROUTES:
        answer = await http.request(route.method, route.path)
        if route.method != "GET" or route.path in GUARDED:
            assert answer.status_code == 401, f"{route.method} {route.path}"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["code"] == "unauthorized"
            assert SECRET not in answer.text
        else:
            assert answer.status_code != 401, f"{route.method} {route.path}"
    assert not locked.state.read_only
    assert not locked.store.groups


async def test_every_route_passes_with_a_good_token(locked) -> None:
    for token in (f"Bearer {SECRET}", "bearer another-secret-of-it", f"Bearer   {SECRET} "):
        http = locked.client(Authorization=token)
        for route in ROUTES:
            answer = await http.request(route.method, route.path)
            assert answer.status_code != 401, f"{route.method} {route.path}"


async def test_a_request_with_two_tokens_is_refused(locked) -> None:
    headers = [("Authorization", f"Bearer {SECRET}"), ("Authorization", "Bearer x")]
    answer = await locked.http.put("/api/v1/bookie/state/readonly", json={"readOnly": True}, headers=headers)
    assert answer.status_code == 401


async def test_a_signed_token_is_accepted_until_it_expires(make_admin, tmp_path) -> None:
    (tmp_path / "keys").write_bytes(KEY)
    settings = AuthSettings(provider=AuthProvider.TOKEN, keys_file=str(tmp_path / "keys"))
    made = make_admin(access=access(settings))
    for expires_at_s, status in ((NOW_S + 60, 200), (NOW_S - 60, 401)):
        token = sign(KEY, subject="operator", expires_at_s=expires_at_s).decode()
        answer = await made.client(Authorization=f"Bearer {token}").put(
            "/api/v1/bookie/state/readonly", json={"readOnly": False}
        )
        assert answer.status_code == status


async def test_with_certificates_a_configured_token_is_accepted_and_without_one_every_token_is_refused(
    make_admin, secrets_file
) -> None:
    for file, token, status in ((secrets_file, SECRET, 200), ("", SECRET, 401)):
        settings = AuthSettings(provider=AuthProvider.CERTIFICATE, secrets_file=file)
        made = make_admin(access=access(settings))
        answer = await made.client(Authorization=f"Bearer {token}").put(
            "/api/v1/bookie/state/readonly", json={"readOnly": False}
        )
        assert answer.status_code == status
        if status == 401:
            assert "auth.secrets_file" in answer.json()["detail"]


async def test_without_authentication_no_token_is_needed(make_admin) -> None:
    assert access() == AdminAccess(own=None, cluster=None)
    answer = await make_admin(access=access()).http.put("/api/v1/bookie/state/readonly", json={"readOnly": True})
    assert answer.status_code == 200


# --- changes of the whole cluster -------------------------------------------------------------------------------------


def test_each_change_concerns_this_bookie_or_the_whole_cluster() -> None:
    """A new route belongs to one of the two lists."""
    changes = {(route.method, route.path): route.is_cluster_wide for route in ROUTES if route.method != "GET"}
    assert {route for route, is_wide in changes.items() if is_wide} == CLUSTER_WIDE
    assert {route for route, is_wide in changes.items() if not is_wide} == OWN


@pytest.fixture
def operators_file(tmp_path: Path) -> str:
    (tmp_path / "operators").write_text(f"{OPERATOR}\n")
    return str(tmp_path / "operators")


async def refused(admin, token: str | None) -> set[tuple[str, str]]:
    """Return the changes that the application refuses with this token."""
    http = admin.client(**({} if token is None else {"Authorization": f"Bearer {token}"}))
    found = set()
    for route in ROUTES:
        answer = await http.request(route.method, route.path)
        if answer.status_code == 401:
            found.add((route.method, route.path))
            assert OPERATOR not in answer.text
    return found - {("GET", path) for path in GUARDED}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "bookie.example.org"])
async def test_a_port_that_others_can_reach_refuses_changes_of_the_cluster_without_tokens_of_operators(
    make_admin, host
) -> None:
    """`--insecure` opens what concerns this bookie only. The bookie does not know the auditor's token."""
    made = make_admin(access=access(host=host))
    for token in (None, OPERATOR, ""):
        assert await refused(made, token) == CLUSTER_WIDE
    for method, path in CLUSTER_WIDE:
        answer = await made.http.request(method, path)
        assert "admin.token_file (BOOKIE_ADMIN_TOKEN_FILE)" in answer.json()["detail"]
    assert (await made.http.put("/api/v1/bookie/state/readonly", json={"readOnly": True})).status_code == 200


async def test_the_token_of_a_client_does_not_change_the_cluster_on_such_a_port(make_admin, secrets_file) -> None:
    auth = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=secrets_file)
    made = make_admin(access=access(auth, host="0.0.0.0"))
    assert await refused(made, SECRET) == CLUSTER_WIDE
    for token in (None, OPERATOR):
        assert await refused(made, token) == CLUSTER_WIDE | OWN
    on_loopback = make_admin(access=access(auth))
    assert await refused(on_loopback, SECRET) == set()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("provider", list(AuthProvider))
async def test_tokens_of_operators_replace_those_of_clients(
    make_admin, secrets_file, operators_file, host, provider
) -> None:
    auth = AuthSettings(provider=provider, secrets_file=secrets_file)
    made = make_admin(access=access(auth, host=host, token_file=operators_file))
    assert await refused(made, OPERATOR) == set()
    for token in (None, SECRET, OPERATOR + "x", OPERATOR[:-1]):
        assert await refused(made, token) == CLUSTER_WIDE | OWN


async def test_without_tokens_a_port_on_loopback_is_free(make_admin) -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.9"):
        assert await refused(make_admin(access=access(host=host)), None) == set()


async def test_a_head_request_does_not_get_around_the_check(make_admin) -> None:
    made = make_admin(access=access(host="0.0.0.0"))
    await made.initialize()
    for method, path in CLUSTER_WIDE:
        for other in ("HEAD", "GET", "POST", "put", "PATCH", "OPTIONS"):
            answer = await made.http.request(other, f"{path}?enabled=false&ledger_id=1")
            assert answer.status_code in (401, 405) or other in ("HEAD", "GET"), f"{other} {path}"
        for variant in (path + "/", path.upper(), path.replace("/v1/", "/v1//"), path.replace("status", "%73tatus")):
            answer = await made.http.request(method, f"{variant}?enabled=false&ledger_id=1")
            assert answer.status_code in (401, 404), f"{method} {variant}"
    assert await made.metadata.exists("/ledgers/underreplication/disable") is None


async def test_passwords_are_masked_on_a_port_that_others_can_reach(make_admin) -> None:
    from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment

    made = make_admin(access=access(host="0.0.0.0"))
    await made.initialize()
    metadata = LedgerMetadata(
        ensemble_size=1, write_quorum=1, ack_quorum=1, segments=(Segment(0, ("b0",)),), password=b"hidden"
    )
    ledger_id, _ = await made.manager.create(metadata)
    answer = await made.http.get(f"/api/v1/ledger/metadata?ledger_id={ledger_id}")
    assert (answer.status_code, "aGlkZGVu" in answer.text) == (200, False)


async def test_passwords_of_ledgers_are_masked_without_a_token(locked) -> None:
    from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment

    await locked.initialize()
    metadata = LedgerMetadata(
        ensemble_size=1, write_quorum=1, ack_quorum=1, segments=(Segment(0, ("b0",)),), password=b"hidden"
    )
    ledger_id, _ = await locked.manager.create(metadata)
    for path in (
        f"/api/v1/ledger/metadata?ledger_id={ledger_id}",
        "/api/v1/ledger/list?print_metadata=true",
        "/api/v1/ledger/list?print_metadata=true&decode_meta=false",
    ):
        assert "aGlkZGVu" not in (shown := (await locked.http.get(path)).text)
        assert "hidden" not in shown
        answer = await locked.client(Authorization=f"Bearer {SECRET}").get(path)
        assert "aGlkZGVu" in answer.text or "hidden" in answer.text


async def test_requests_without_a_token_do_not_block_requests_with_one(locked, monkeypatch) -> None:
    monkeypatch.setattr("bindery_kit.admin.app.HEAVY_WAIT_S", 0.05)
    go_on = asyncio.Event()
    begun = 0

    async def heavy(context, request: Request) -> Answer:
        nonlocal begun
        begun += 1
        if not request.is_trusted:
            await go_on.wait()
        return json_answer({})

    locked.app = AdminApp(locked.app._context, [Route("GET", "/h", heavy, is_heavy=True)])
    others, operator = locked.client(), locked.client(Authorization=f"Bearer {SECRET}")
    running = [asyncio.create_task(others.get("/h")) for _ in range(HEAVY_MAX)]
    while begun < HEAVY_MAX:
        await asyncio.sleep(0.001)
    assert (await others.get("/h")).status_code == 429
    assert (await operator.get("/h")).status_code == 200
    go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
    assert (await others.get("/h")).status_code == 200

"""Authentication of the admin API: changes need a token, and so does reading the content of entries."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, access_by_provider
from bindery_bookie.admin.app import HEAVY_MAX, ROUTES, AdminApp
from bindery_core.auth_token import sign
from bindery_kit.admin.http import Answer, Request, Route, json_answer

SECRET = "a-secret-of-the-cluster"
KEY = b"k" * 32
NOW_S = 1_700_000_000
GUARDED = {"/api/v1/ledger/read", "/api/v1/bookie/sanity"}


@pytest.fixture
def secrets_file(tmp_path: Path) -> str:
    (tmp_path / "secrets").write_text(f"{SECRET}\nanother-secret-of-it\n")
    return str(tmp_path / "secrets")


@pytest.fixture
def locked(make_admin, secrets_file) -> Callable[..., object]:
    settings = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=secrets_file)
    return make_admin(access=access_by_provider(settings, now_s=lambda: NOW_S))


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
    made = make_admin(access=access_by_provider(settings, now_s=lambda: NOW_S))
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
        made = make_admin(access=access_by_provider(settings, now_s=lambda: NOW_S))
        answer = await made.client(Authorization=f"Bearer {token}").put(
            "/api/v1/bookie/state/readonly", json={"readOnly": False}
        )
        assert answer.status_code == status
        if status == 401:
            assert "auth.secrets_file" in answer.json()["detail"]


async def test_without_authentication_no_token_is_needed(make_admin) -> None:
    assert access_by_provider(AuthSettings(), now_s=lambda: NOW_S) is None
    answer = await make_admin().http.put("/api/v1/bookie/state/readonly", json={"readOnly": True})
    assert answer.status_code == 200


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


async def test_requests_without_a_token_do_not_block_requests_with_one(locked) -> None:
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

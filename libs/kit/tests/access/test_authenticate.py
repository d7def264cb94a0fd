"""The application in front of a port, and the settings that describe it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from bindery_core.errors import BadRequest
from bindery_identity.authenticator import Authenticator
from bindery_identity.principal import Method, Principal
from bindery_identity.tokens import sign
from bindery_kit.access.authenticate import Authenticate, Credentials
from bindery_kit.access.authentication_settings import AuthenticationSettings
from bindery_kit.access.own_token import CREDENTIALS, OwnToken
from bindery_kit.access.password_checks import FAILURES_BURST
from bindery_kit.configuration.settings import WrongSettings, load
from bindery_kit.http.problem import problem_of

KEY = b"k" * 32
NOW = 1_700_000_000.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(KEY)
    return path


async def refuse(scope: Any, receive: Any, send: Any, error: Any, challenges: list[str]) -> None:
    response = problem_of(error)
    for one in challenges:
        response.headers.append("www-authenticate", one)
    await response(scope, receive, send)


class Port:
    """A port with settings of authentication. Its application tells the principal."""

    def __init__(self, settings: AuthenticationSettings) -> None:
        self.files: list[Any] = []
        authenticator = settings.authenticator(now_s=lambda: NOW, follow=self.files.append)
        assert authenticator is not None
        self.guard = Authenticate(
            self._app, authenticator, refuse=refuse, clock=lambda: 0.0, guards_metrics=settings.metrics
        )
        self.seen: list[Principal | None] = []
        self.app = self._answer

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def checked(self) -> None:
        """Return when the credentials of waiting calls have been verified again."""
        while (task := self.guard._rechecks.task) is not None and not task.done():
            await asyncio.sleep(0)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope.get("state", {}).get("principal"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def get(self, path: str = "/x", *, role: str | None = None, **headers: str) -> httpx.Response:
        if role is not None:
            headers["authorization"] = "Bearer " + sign(KEY, subject=role).decode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.guard), base_url="http://port", headers=named
        ) as client:
            return await client.get(path)


async def test_a_request_needs_credentials_and_the_application_gets_the_principal(keys: Path) -> None:
    port = Port(AuthenticationSettings(tokens_keys_file=str(keys)))
    refused = await port.get()
    assert refused.status_code == 401
    assert refused.json()["code"] == "unauthorized"
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert (await port.get(authorization="Bearer wrong")).status_code == 401
    assert port.seen == []
    assert (await port.get(role="alice")).status_code == 200
    (principal,) = port.seen
    assert principal is not None
    assert principal.role == "alice"
    page = port.guard.render().decode()
    assert 'bindery_authentications_total{outcome="refused",method="unknown"} 2' in page
    assert 'bindery_authentications_total{outcome="admitted",method="token"} 1' in page


@pytest.mark.parametrize("guards", [True, False])
async def test_probes_are_open_and_metrics_as_configured(keys: Path, guards: bool) -> None:
    port = Port(AuthenticationSettings(tokens_keys_file=str(keys), metrics=guards))
    for path in ("/livez", "/readyz", "/startupz"):
        assert (await port.get(path)).status_code == 200
    for path in ("/metrics", "/metrics/"):
        assert (await port.get(path)).status_code == (401 if guards else 200)
    assert (await port.get("/livez/x")).status_code == 401


async def test_the_header_of_proxies_is_only_for_proxies(keys: Path) -> None:
    port = Port(AuthenticationSettings(tokens_keys_file=str(keys), proxy_roles="broker, edge"))
    assert (await port.get(role="alice", bindery_role="admin")).status_code == 403
    assert (await port.get(role="broker")).status_code == 403
    assert (await port.get(bindery_role="alice")).status_code == 401
    assert (await port.get(role="broker", bindery_role="J%C3%BCrgen%20A")).status_code == 200
    assert (await port.get(role="broker", bindery_role="broker")).status_code == 200
    assert (await port.get(role="broker", bindery_role="edge")).status_code == 403
    assert (await port.get(role="broker", bindery_role="a%0Ab")).status_code == 401
    for malformed in ("%FFadmin", "%zz", "ali%2", "%", "a b"):
        assert (await port.get(role="broker", bindery_role=malformed)).status_code == 401, malformed
    assert [one and (one.role, one.original_role) for one in port.seen] == [
        ("broker", "J\u00fcrgen A"),
        ("broker", None),
    ]


async def test_a_proxy_of_pulsar_names_the_client_in_its_own_header(keys: Path) -> None:
    port = Port(AuthenticationSettings(tokens_keys_file=str(keys), proxy_roles="broker, edge"))
    assert (await port.get(role="edge", x_original_principal="a%20b")).status_code == 200
    assert (await port.get(role="alice", x_original_principal="admin")).status_code == 403
    assert (await port.get(role="alice", x_original_principal="alice")).status_code == 200
    assert (await port.get(role="edge", x_original_principal="edge")).status_code == 403
    assert (await port.get(role="edge", x_original_principal="broker")).status_code == 403
    assert (await port.get(role="edge", x_original_principal="")).status_code == 401
    assert (await port.get(role="edge", x_original_principal="a", bindery_role="a")).status_code == 401
    assert [one and (one.role, one.original_role) for one in port.seen] == [("edge", "a%20b"), ("alice", None)]
    assert b"x-original-principal" in CREDENTIALS


async def test_the_role_of_the_own_token_passes_on_requests_of_proxies(tmp_path: Path, keys: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(sign(KEY, subject="broker"))
    settings = AuthenticationSettings(
        tokens_keys_file=str(keys), broker_token_file=str(file), proxy_roles="broker, edge"
    )
    own_token: OwnToken | None = None
    known = settings.authenticator(
        now_s=lambda: NOW, follow=lambda _: None, own_role=lambda: None if own_token is None else own_token.role
    )
    own_token = settings.own_token(authenticator=known, follow=lambda _: None)
    assert known is not None
    assert own_token is not None
    broker = Principal(role="broker", method=Method.TOKEN)
    assert known.on_behalf_of(broker, "edge").original_role == "edge"


async def test_keys_are_replaced_while_the_port_is_in_use(keys: Path) -> None:
    port = Port(AuthenticationSettings(tokens_keys_file=str(keys)))
    assert (await port.get(role="alice")).status_code == 200
    (file,) = port.files
    keys.write_bytes(b"another key of more than 32 bytes")
    assert file.poll()
    assert (await port.get(role="alice")).status_code == 401, "a verified token is forgotten with its key"
    keys.write_bytes(b"too short")
    assert not file.poll()
    token = sign(b"another key of more than 32 bytes", subject="bob").decode()
    assert (await port.get(authorization=f"Bearer {token}")).status_code == 200, "a bad file keeps the last good keys"


async def test_passwords_and_anonymous_clients(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("bob:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0\n")
    port = Port(AuthenticationSettings(passwords_file=str(file), anonymous_role="nobody"))
    assert (await port.get(authorization="Basic Ym9iOnNlY3JldCBwYXNz")).status_code == 200
    assert (await port.get(authorization="Basic Ym9iOndyb25n")).status_code == 401
    assert (await port.get()).status_code == 200
    assert [one and one.role for one in port.seen] == ["bob", "nobody"]


async def test_wrong_passwords_of_an_address_are_refused_unchecked_and_known_ones_are_served(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("bob:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0\n")
    port = Port(AuthenticationSettings(passwords_file=str(file)))
    assert (await port.get(authorization="Basic Ym9iOnNlY3JldCBwYXNz")).status_code == 200
    statuses = [(await port.get(authorization="Basic Ym9iOndyb25n")).status_code for _ in range(FAILURES_BURST + 1)]
    assert statuses == [401] * FAILURES_BURST + [429]
    assert (await port.get(authorization="Basic Ym9iOnNlY3JldCBwYXNz")).status_code == 200


class Waiting:
    """A request that watches its credentials until they are refused."""

    def __init__(self, port: "Port", authorization: str, **headers: str) -> None:
        self.ended = asyncio.Event()
        self.admitted: asyncio.Future[Credentials] = asyncio.get_running_loop().create_future()
        self.late = asyncio.Event()
        """Set: the request watches its credentials only now."""
        self.late.set()
        port.app = self._app
        self.task = asyncio.create_task(port.get(authorization=authorization, **headers))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        credentials = scope["state"]["credentials"]
        self.admitted.set_result(credentials)
        await self.late.wait()
        end = credentials.watch(self.ended.set)
        try:
            await self.ended.wait()
        finally:
            end()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def test_a_call_ends_when_its_credentials_are_taken_back(keys: Path, tmp_path: Path) -> None:
    other = b"another key of more than 32 bytes"
    passwords = tmp_path / "passwords"
    bob, reader = "bob:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0\n", "reader:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=\n"
    passwords.write_text(bob + reader)
    keys.write_bytes(KEY + b"\n" + other)
    port = Port(AuthenticationSettings(tokens_keys_file=str(keys), passwords_file=str(passwords)))

    async def open_(authorization: str) -> Waiting:
        waiting = Waiting(port, authorization)
        async with asyncio.timeout(30):
            await waiting.admitted
        return waiting

    first = await open_("Bearer " + sign(KEY, subject="alice").decode())
    second = await open_("Bearer " + sign(other, subject="alice").decode())
    third = await open_("Basic Ym9iOnNlY3JldCBwYXNz")
    fourth = await open_("Basic cmVhZGVyOnBhc3N3b3Jk")
    late = Waiting(port, "Bearer " + sign(KEY, subject="late").decode())
    late.late.clear()
    await late.admitted
    keys.write_bytes(other)
    assert port.files[0].poll()
    port.guard.check_again()
    async with asyncio.timeout(30):
        await first.task
        late.late.set()
        await late.task
        await port.checked()
    assert not any(one.ended.is_set() for one in (second, third, fourth))
    passwords.write_text(reader)
    assert port.files[1].poll()
    port.guard.check_again()
    async with asyncio.timeout(30):
        await third.task
        await port.checked()
    assert not any(one.ended.is_set() for one in (second, fourth))
    for one in (second, fourth):
        one.ended.set()
        await one.task
    assert not len(port.guard._rechecks)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--anonymous-role=x"],
        ["--proxy-roles=x"],
        ["--metrics"],
        ["--tokens-keys-file=/k", "--anonymous-role=\u202e"],
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments: list[str]) -> None:
    with pytest.raises((WrongSettings, SystemExit)):
        load(AuthenticationSettings, arguments, prog="x")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tokens_keys_file": "/k", "broker_token_file": "/t"}, "needs the role of that token in auth.proxy_roles"),
        (
            {"tokens_keys_file": "/k", "proxy_roles": "edge, nobody", "anonymous_role": "nobody"},
            r"anonymous_role \(nobody\) must not be one of auth.proxy_roles",
        ),
    ],
)
def test_dangerous_settings_are_refused_with_what_to_change(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AuthenticationSettings(**settings)  # type: ignore[arg-type]


def test_everybody_is_admitted_without_methods_or_with_an_anonymous_role() -> None:
    assert AuthenticationSettings().admits_everybody
    assert AuthenticationSettings().authenticator(now_s=lambda: NOW, follow=lambda _: None) is None
    assert AuthenticationSettings(tokens_keys_file="/k", anonymous_role="x").admits_everybody
    assert not AuthenticationSettings(tokens_keys_file="/k").admits_everybody


def test_the_token_of_a_broker_must_be_that_of_a_proxy(tmp_path: Path, keys: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(sign(KEY, subject="broker") + b"\n")

    def settings(roles: str) -> AuthenticationSettings:
        return AuthenticationSettings(tokens_keys_file=str(keys), broker_token_file=str(file), proxy_roles=roles)

    def own(roles: str = "edge,broker", super_users: frozenset[str] | None = None) -> OwnToken | None:
        chosen = settings(roles)
        authenticator = chosen.authenticator(now_s=lambda: NOW, follow=lambda _: None)
        return chosen.own_token(authenticator=authenticator, follow=lambda _: None, super_users=super_users)

    token = own()
    assert token is not None
    assert "broker" in repr(token.file.value)
    assert sign(KEY, subject="broker").decode() not in repr(token.file.value)
    client = Principal(role="J\u00fcrgen", method="token")  # type: ignore[arg-type]
    assert token.headers(client)[1] == (b"bindery-role", b"J%C3%BCrgen")
    assert token.headers(None) == [
        (b"authorization", b"Bearer " + sign(KEY, subject="broker")),
        (b"bindery-role", b"broker"),
    ]
    with pytest.raises(BadRequest, match=r"must be one of auth\.proxy_roles"):
        own("edge")
    with pytest.raises(BadRequest, match=r"must be one of authorization\.super_user_roles.*role=broker"):
        own(super_users=frozenset({"admin"}))
    assert own(super_users=frozenset({"admin", "broker"})) is not None
    for refused_token, why in (
        (sign(b"o" * 32, subject="broker"), "wrong signature"),
        (sign(KEY, subject="broker", expires_at_s=int(NOW) - 60), "expired"),
        (sign(KEY, subject="broker", audience="others"), "audience"),
    ):
        file.write_bytes(refused_token)
        with pytest.raises(BadRequest, match=rf"would refuse the token in auth\.broker_token_file.*{why}"):
            own()
    file.write_bytes(sign(KEY, subject="broker"))
    with pytest.raises(BadRequest, match=r"would refuse the token.*does not accept tokens.*auth\.tokens_keys_file"):
        settings("broker").own_token(authenticator=Authenticator(now_s=lambda: NOW), follow=lambda _: None)
    token = own()
    assert token is not None
    file.write_bytes(sign(KEY, subject="stranger"))
    token.file.poll()
    assert (token.role, token.file.failure is None) == ("broker", False)
    for content in (b"", b"secret", sign(KEY, subject="x").rpartition(b".")[0]):
        file.write_bytes(content)
        with pytest.raises(BadRequest, match="must contain a signed token") as refused:
            OwnToken(str(file))
        assert not content or content.decode() not in str(refused.value)


def test_the_role_of_an_own_token_is_in_the_claim_of_its_issuer(tmp_path: Path, keys: Path) -> None:
    issuer = "https://issuer.example"
    file = tmp_path / "token"

    def own(**claims: object) -> OwnToken:
        file.write_bytes(jwt.encode({"exp": NOW + 60, **claims}, KEY, algorithm="HS256").encode())
        settings = AuthenticationSettings(
            tokens_keys_file=str(keys),
            tokens_role_claim="role",
            openid_issuers=issuer,
            openid_audiences="bindery",
            openid_role_claim="groups",
            broker_token_file=str(file),
            proxy_roles="broker",
        )
        issuers = settings.openid(follow=lambda _: None)
        authenticator = settings.authenticator(now_s=lambda: NOW, follow=lambda _: None, issuers=issuers)
        token = settings.own_token(authenticator=authenticator, follow=lambda _: None)
        assert token is not None
        return token

    assert own(role="broker", groups="other").role == "broker"
    assert own(iss=issuer, groups=["broker", "x"], role="other").role == "broker"
    with pytest.raises(BadRequest, match=r"the token has no role: .*claim=groups"):
        own(iss=issuer, role="broker")

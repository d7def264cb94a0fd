"""Roles of the ledger port's clients and of the HTTP port's: complete tables, and refusals in both protocols."""

import typing

import pytest
from bindery_bookie.access import roles
from bindery_bookie.access.authentication import CertificateAuthenticator, TokenAuthenticator
from bindery_bookie.access.roles import NO_ROLES, OPERATION_OF, WIRE, Role, Roles
from bindery_bookie.access.security import AuthProvider, AuthSettings, Security, load_roles
from bindery_bookie.admin.app import ROUTES
from bindery_core.digest import master_key
from bindery_core.errors import BadRequest
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Operation, Status
from bindery_identity.tokens import SignedTokens, sign
from bindery_kit.access.allowed_names import AllowedNames

SIGNING_KEY = b"k" * 32
KEY = master_key(b"")
L8 = "0000000000000008"
ZERO = "0000000000000000"


def names(*found: str) -> AllowedNames:
    return AllowedNames(frozenset(found))


LIMITED = Roles(client=names("broker", "auditor"), recovery=names("auditor"), admin=names("operator"))
V3_REQUESTS = (
    m.AddRequest(2, 8, 0, KEY, b"x" * 64),
    m.ReadRequest(3, 8, 0),
    m.ReadRequest(4, 8, 0, flag=1, master_key=KEY),
    m.WriteLacRequest(5, 8, 0, KEY, b"x" * 64),
    m.ReadLacRequest(6, 8),
    m.ForceLedgerRequest(7, 8),
    m.BookieInfoRequest(8, 3),
    m.ListEntriesRequest(9, 8),
)


def test_every_operation_of_the_protocol_has_an_entry():
    """A new operation, or a new type of request, fails here until its role is decided."""
    assert set(WIRE) == set(Operation)
    kinds = set(typing.get_args(m.Request)) - {m.OtherRequest}
    assert set(OPERATION_OF) == kinds
    assert len(set(OPERATION_OF.values())) == len(OPERATION_OF)


def test_every_route_has_an_entry_and_every_entry_a_route():
    assert set(roles.ROUTES) == {(route.method, route.path) for route in ROUTES}


def test_each_route_that_needs_a_token_needs_a_role():
    needed = {(route.method, route.path): route.needs_token for route in ROUTES}
    assert {route for route, needs in needed.items() if needs} == {
        route for route, role in roles.ROUTES.items() if role is not None
    }


def test_who_may_send_which_requests():
    listing, ordinary = m.ListEntriesRequest, m.AddRequest
    cases = {"broker": ({listing}, {ordinary}), "operator": ({listing, ordinary}, {m.AuthRequest, m.StartTlsRequest})}
    for name, (forbidden, allowed) in cases.items():
        found = LIMITED.forbidden_to(name)
        assert found is not None
        assert forbidden <= found
        assert not allowed & found
    assert LIMITED.forbidden_to("auditor") is None
    assert NO_ROLES.forbidden_to("anyone") is None
    assert NO_ROLES.forbidden_to(None) is None


async def guarded(start_bookie: typing.Any, by: Roles) -> typing.Any:
    authenticator = TokenAuthenticator(SignedTokens([SIGNING_KEY]), plugin="bindery", now_s=lambda: 0.0)
    return await start_bookie(security=Security(authenticator=authenticator, auth_timeout_s=60.0, roles=by))


async def connect(bookie: typing.Any, name: str) -> typing.Any:
    client = await bookie.connect()
    client.send(m.AuthRequest(1, "bindery", sign(SIGNING_KEY, subject=name)))
    assert (await client.receive()).status == Status.OK
    return client


@pytest.mark.parametrize("request_", V3_REQUESTS, ids=lambda one: f"{type(one).__name__}-{one.txn_id}")
async def test_a_client_without_the_role_gets_eua_in_v3_and_keeps_its_connection(start_bookie, request_) -> None:
    bookie = await guarded(start_bookie, LIMITED)
    client = await connect(bookie, "stranger")
    for _ in range(2):
        client.send(request_)
        answer = await client.receive()
        assert (answer.txn_id, answer.status) == (request_.txn_id, Status.UNAUTHORIZED)
    assert bookie.metrics.forbidden == 2


async def test_a_client_with_one_role_may_do_what_it_allows(start_bookie) -> None:
    bookie = await guarded(start_bookie, LIMITED)
    client = await connect(bookie, "broker")
    client.send(m.ReadRequest(2, 8, 0), m.ListEntriesRequest(3, 8), m.ReadRequest(4, 8, 0))
    answers = {(one := await client.receive()).txn_id: one.status for _ in range(3)}
    assert answers == {2: Status.NO_LEDGER, 3: Status.UNAUTHORIZED, 4: Status.NO_LEDGER}
    auditor = await connect(bookie, "auditor")
    auditor.send(m.ListEntriesRequest(3, 8))
    assert (await auditor.receive()).status == Status.NO_LEDGER


async def test_requests_behind_auth_in_one_packet_are_refused_too(start_bookie) -> None:
    bookie = await guarded(start_bookie, LIMITED)
    client = await bookie.connect()
    client.send(m.AuthRequest(1, "bindery", sign(SIGNING_KEY, subject="stranger")), m.ReadRequest(2, 8, 0))
    answers = {(one := await client.receive()).txn_id: one.status for _ in range(2)}
    assert answers == {1: Status.OK, 2: Status.UNAUTHORIZED}


async def test_a_client_without_the_role_gets_eua_in_v2(start_bookie) -> None:
    bookie = await guarded(start_bookie, LIMITED)
    client = await bookie.connect()
    token = sign(SIGNING_KEY, subject="stranger")
    message = b"\x0a\x07bindery\x12" + bytes((len(token) & 0x7F | 0x80, len(token) >> 7)) + token
    client.send_hex("02030000" + message.hex())
    await client.receive_bytes()
    client.send_hex("02020000" + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0202000000000066" + L8 + ZERO
    client.send_hex("02010000" + KEY.hex() + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0201000000000066" + L8 + ZERO
    batch = await client.ask_v2(m.BatchReadRequest(0, 8, 0, 5, 10, 1000))
    assert (type(batch), batch.status, batch.request_id) == (m.BatchReadResponse, Status.UNAUTHORIZED, 5)


async def test_nothing_is_stored_for_a_client_without_the_role(start_bookie) -> None:
    bookie = await guarded(start_bookie, LIMITED)
    client = await connect(bookie, "stranger")
    client.send(m.AddRequest(2, 8, 0, KEY, b"x" * 64), m.ReadRequest(3, 8, 0, flag=1, master_key=KEY))
    for _ in range(2):
        assert (await client.receive()).status == Status.UNAUTHORIZED
    reader = await connect(bookie, "broker")
    reader.send(m.ReadRequest(4, 8, 0))
    assert (await reader.receive()).status == Status.NO_LEDGER


async def test_without_limits_a_connection_does_no_check(start_bookie) -> None:
    bookie = await guarded(start_bookie, NO_ROLES)
    client = await connect(bookie, "stranger")
    client.send(m.ListEntriesRequest(2, 8))
    assert (await client.receive()).status == Status.NO_LEDGER
    assert bookie.metrics.forbidden == 0


@pytest.mark.parametrize("setting", ["client_roles", "recovery_roles"])
def test_roles_of_clients_that_nothing_names_are_refused_at_the_start(setting: str) -> None:
    with pytest.raises(BadRequest, match=f"auth.{setting} names clients, but the ledger port authenticates no client"):
        load_roles(AuthSettings(**{setting: "broker"}))  # type: ignore[arg-type]
    shared = {"provider": AuthProvider.TOKEN, "secrets_file": "secrets", setting: "broker"}
    with pytest.raises(BadRequest, match="shared secrets name no client"):
        load_roles(AuthSettings(**shared))  # type: ignore[arg-type]


def test_settings_name_the_roles() -> None:
    auth = AuthSettings(
        provider=AuthProvider.CERTIFICATE,
        client_roles="broker,auditor",
        recovery_roles="auditor",
        admin_roles="operator",
    )
    assert load_roles(auth) == LIMITED
    assert load_roles(AuthSettings()) == NO_ROLES
    assert LIMITED.of(Role.ADMIN) == names("operator")


def test_a_certificate_names_its_client() -> None:
    authenticator = CertificateAuthenticator(plugin="bindery")
    assert LIMITED.forbidden_to(authenticator.by_certificate(["auditor"])) is None
    assert LIMITED.forbidden_to(authenticator.by_certificate(["broker"])) == {m.ListEntriesRequest}

"""Walk all operations of the ledger port, in both protocols, and all routes of the HTTP port with every kind of client,
and write what was observed into docs/access-table.md.

Each role is held by one client, which has no other. Expected is what the tables of `access.roles` say.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_bookie.access import roles
from bindery_bookie.access.authentication import TokenAuthenticator
from bindery_bookie.access.roles import WIRE, Role, Roles
from bindery_bookie.access.security import AuthSettings, Security, admin_access
from bindery_bookie.admin.app import ROUTES, AdminApp
from bindery_bookie.admin.context import AdminContext
from bindery_bookie.settings import AdminSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.digest import master_key
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import Operation, Status
from bindery_identity.tokens import SignedTokens, sign
from bindery_kit.access.allowed_names import AllowedNames
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.process_page import ProcessPage
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree

SIGNING_KEY = b"k" * 32
KEY = master_key(b"")
NOW_S = 1_700_000_000
NONE, WRONG, EXPIRED = "no token", "wrong token", "expired token"
UNKNOWN = (NONE, WRONG, EXPIRED)
KINDS: dict[str, Role | None] = {"none": None, "client": Role.CLIENT, "recovery": Role.RECOVERY, "admin": Role.ADMIN}
"""Kinds of clients, and the role of each. The name of a client is its kind."""
COLUMNS = (*UNKNOWN, *KINDS)
LIMITED = Roles(**{role.value: AllowedNames(frozenset({role.value})) for role in Role})  # type: ignore[arg-type]
STORED, MISSING = 123_456, 987_654
"""Ledgers: one with an entry, one that does not exist."""
V2_OPERATIONS = (Operation.ADD_ENTRY, Operation.READ_ENTRY, Operation.BATCH_READ_ENTRY)
"""Operations that version 2 has; its AUTH is walked by all clients with a token."""
UNSUPPORTED = (Operation.RANGE_READ_ENTRY, Operation.RANGE_ADD_ENTRY, Operation.BATCH_READ_ENTRY)
"""Operations of version 3 that bookies answer as not supported, whoever sends them."""


def request_of(operation: Operation, ledger_id: int) -> m.Request | bytes:
    """Return a request with transaction id 2, or the message of one that no client of ours can make."""
    match operation:
        case Operation.ADD_ENTRY:
            return m.AddRequest(2, ledger_id, 0, KEY, entry(ledger_id))
        case Operation.READ_ENTRY:
            return m.ReadRequest(2, ledger_id, 0)
        case Operation.BATCH_READ_ENTRY:
            return m.BatchReadRequest(2, ledger_id, 0, 5, 10, 1000)
        case Operation.WRITE_LAC:
            return m.WriteLacRequest(2, ledger_id, 0, KEY, entry(ledger_id))
        case Operation.READ_LAC:
            return m.ReadLacRequest(2, ledger_id)
        case Operation.FORCE_LEDGER:
            return m.ForceLedgerRequest(2, ledger_id)
        case Operation.GET_BOOKIE_INFO:
            return m.BookieInfoRequest(2, 3)
        case Operation.GET_LIST_OF_ENTRIES_OF_LEDGER:
            return m.ListEntriesRequest(2, ledger_id)
        case Operation.START_TLS:
            return m.StartTlsRequest(2)
        case _:
            return bytes((0x0A, 6, 0x08, 3, 0x10, operation, 0x18, 2))


def entry(ledger_id: int) -> bytes:
    return b"".join(int.to_bytes(number, 8, "big", signed=True) for number in (ledger_id, 0, -1, 0)) + b"d" * 32


def token(kind: str) -> bytes:
    key = b"w" * 32 if kind == WRONG else SIGNING_KEY
    return sign(key, subject=kind, expires_at_s=NOW_S - 3600 if kind == EXPIRED else NOW_S + 3600)


async def ask(bookie: Any, operation: Operation, kind: str, ledger_id: int, *, version: int) -> tuple[str, str]:
    """Return the outcome of an operation as the first request after AUTH, and its response without ids."""
    client = await bookie.connect()
    codec = v3 if version == 3 else v2
    try:
        if kind != NONE:
            client.writer.write(codec.encode_requests([m.AuthRequest(1, "bindery", token(kind))]))
            first = codec.decode_response(await client.receive_bytes())
            if first.status != Status.OK:
                assert (first.status, await client.is_closed()) == (Status.UNAUTHORIZED, True)
                return "closed", ""
        if operation == Operation.AUTH:
            assert kind != NONE
            return "yes", ""
        request = request_of(operation, ledger_id)
        if isinstance(request, bytes):
            client.send_hex(request.hex())
        else:
            client.writer.write(codec.encode_requests([request]))
        response = codec.decode_response(await client.receive_bytes())
    except EOFError:
        return "closed", ""
    finally:
        await client.close()
    if version == 3 and operation in UNSUPPORTED and response.status == Status.BAD_REQUEST:
        return "unsupported", ""
    if response.status == Status.UNAUTHORIZED:
        return "EUA", repr(response).replace(str(ledger_id), "*")
    return "yes", ""


def expected(operation: Operation, kind: str, *, version: int) -> str:
    if operation == Operation.AUTH:
        return "closed" if kind in (WRONG, EXPIRED) else "yes"
    if kind in (WRONG, EXPIRED):
        return "closed"
    if kind == NONE:
        if operation == Operation.START_TLS:
            return "yes"
        return "EUA" if version == 3 or operation in (Operation.ADD_ENTRY, Operation.READ_ENTRY) else "closed"
    if version == 3 and operation in UNSUPPORTED:
        return "unsupported"
    role = WIRE[operation]
    return "yes" if role is None or KINDS[kind] is role else "EUA"


async def test_every_operation_with_every_kind_of_client(start_bookie, check_section):
    authenticator = TokenAuthenticator(SignedTokens([SIGNING_KEY]), plugin="bindery", now_s=lambda: NOW_S)
    bookie = await start_bookie(security=Security(authenticator=authenticator, roles=LIMITED))
    bookie.store.add_many([m.AddRequest(1, STORED, 0, KEY, entry(STORED))], lambda statuses: None)
    lines = [f"| operation | protocol | role | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 3) + "|"]
    for version, operations in ((3, tuple(Operation)), (2, V2_OPERATIONS)):
        for operation in operations:
            found = []
            for kind in COLUMNS:
                if (operation, kind) == (Operation.AUTH, NONE):
                    found.append("yes")
                    continue
                outcome, told = await ask(bookie, operation, kind, STORED, version=version)
                assert outcome == expected(operation, kind, version=version), (operation, kind, version)
                if outcome != "yes":
                    assert (outcome, told) == await ask(bookie, operation, kind, MISSING, version=version)
                found.append(outcome)
            role = None if version == 3 and operation in UNSUPPORTED else WIRE[operation]
            what = "none" if role is None else role.value
            lines.append(f"| `{operation.name}` | v{version} | {what} | {' | '.join(found)} |")
    check_section("access-table.md", "bookie-ledger-port", "\n".join(lines))


@pytest.fixture
def http_app(tmp_path: Path, memory_store: Any) -> OpsApp:
    """The HTTP port's application, whose clients have signed tokens."""
    (tmp_path / "keys").write_bytes(SIGNING_KEY)
    settings = AdminSettings(keys_file=str(tmp_path / "keys"))
    metadata = MemoryTree().connect()
    context = AdminContext(
        bookie_id="bookie-0",
        store=memory_store,
        state=BookieState(),
        health=Health(),
        settings=dict,
        is_open=lambda: True,
        disk=RealDisk(),
        layout=LedgersLayout(),
        randomness=random.Random(5),
        metadata=lambda: metadata,
        access=admin_access(AuthSettings(), settings, host="10.0.0.1", now_s=lambda: NOW_S),
        roles=LIMITED,
    )
    return OpsApp(Health(), ProcessPage("bookie", lambda: b""), app=AdminApp(context))


async def test_every_route_with_every_kind_of_client(http_app, check_section):
    transport = httpx.ASGITransport(app=http_app)
    rows: dict[str, tuple[Role | None, Sequence[str]]] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://bookie") as http:

        async def outcome(method: str, path: str, kind: str) -> tuple[str, str]:
            headers = {} if kind == NONE else {"Authorization": f"Bearer {token(kind).decode()}"}
            answer = await http.request(method, path, headers=headers, params={"ledger_id": str(MISSING)})
            return (str(answer.status_code), answer.text) if answer.status_code in (401, 403) else ("yes", "")

        for route in ROUTES:
            role = roles.ROUTES[route.method, route.path]
            found = []
            for kind in COLUMNS:
                status, text = await outcome(route.method, route.path, kind)
                refused = "401" if kind in UNKNOWN else "yes" if KINDS[kind] is role else "403"
                assert status == ("yes" if role is None else refused), (route.method, route.path, kind)
                assert str(MISSING) not in text, (route.method, route.path, kind)
                found.append(status)
            rows[f"{route.method} {route.path}"] = role, found
        for path in ("/livez", "/readyz", "/startupz", "/metrics"):
            rows[f"GET {path}"] = None, [(await outcome("GET", path, kind))[0] for kind in COLUMNS]
            assert set(rows[f"GET {path}"][1]) == {"yes"}
    check_section("access-table.md", "bookie-http", document(rows))


def document(rows: Mapping[str, tuple[Role | None, Sequence[str]]]) -> str:
    lines = [f"| route | role | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, (role, found) in rows.items():
        lines.append(f"| {name} | {'none' if role is None else role.value} | {' | '.join(found)} |")
    return "\n".join(lines)

"""Authentication over a real socket, with BookKeeper's bytes. `test_authentication_requests` covers each request."""

import asyncio

import pytest
from bindery_bookie.access.authentication import TokenAuthenticator
from bindery_bookie.access.security import Security
from bindery_core.digest import master_key
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Status
from bindery_identity.tokens import SharedSecrets

KEY = master_key(b"")
SECRET = b"correct horse battery staple"
L8 = "0000000000000008"
ZERO = "0000000000000000"


@pytest.fixture
async def guarded(start_bookie):  # type: ignore[no-untyped-def]
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    return await start_bookie(security=Security(authenticator=authenticator, auth_timeout_s=60.0))


def auth_message(plugin: bytes, payload: bytes) -> str:
    return f"0a{len(plugin):02x}{plugin.hex()}12{len(payload):02x}{payload.hex()}"


async def test_a_v3_handshake_equals_bookkeepers_bytes(guarded) -> None:
    client = await guarded.connect()
    client.send_hex("0a06080310011801a2060408081000")
    assert (await client.receive_bytes()).hex() == "0a0608031001180110f603", "header and outer status, kept open"
    message = auth_message(b"another", SECRET)
    client.send_hex(f"0a06080310051802b206{len(message) // 2:02x}{message}")
    assert (await client.receive_bytes()).hex() == "0a0608031005180210f603"
    message = auth_message(b"bindery", SECRET)
    client.send_hex(f"0a06080310051803b206{len(message) // 2:02x}{message}")
    expected = auth_message(b"bindery", b"")
    assert (await client.receive_bytes()).hex() == f"0a060803100518031000b206{len(expected) // 2:02x}{expected}"
    client.send_hex("0a06080310011804a2060408081000")
    assert (await client.receive()).status == Status.NO_LEDGER


async def test_a_v2_handshake_equals_bookkeepers_bytes(guarded) -> None:
    client = await guarded.connect()
    client.send_hex("02020000" + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0202000000000066" + L8 + ZERO
    client.send_hex("02010000" + KEY.hex() + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0201000000000066" + L8 + ZERO
    client.send_hex("02030000" + auth_message(b"bindery", SECRET))
    assert (await client.receive_bytes()).hex() == "02030000" + auth_message(b"bindery", b"")
    client.send_hex("02020000" + L8 + ZERO)
    assert (await client.receive_bytes()).hex() == "0202000000000001" + L8 + ZERO


async def test_a_bad_token_ends_the_connection_in_v3_with_a_response(guarded) -> None:
    client = await guarded.connect()
    client.send(m.AuthRequest(1, "bindery", b"wrong"))
    assert (await client.receive_bytes()).hex() == "0a0608031005180110f603"
    assert await client.is_closed()
    assert guarded.metrics.auth_failures == 1


@pytest.mark.parametrize(
    "packet",
    [
        "02030000" + auth_message(b"bindery", b"wrong"),
        "02030000" + auth_message(b"another", SECRET),
        "02070000" + L8 + ZERO + ZERO + "00000001" + ZERO,
    ],
    ids=["bad token", "another plugin", "batch read"],
)
async def test_a_bad_token_ends_the_connection_in_v2_without_a_response(guarded, packet) -> None:
    client = await guarded.connect()
    client.send_hex(packet)
    assert await client.is_closed()


async def test_requests_that_arrive_together_with_the_token_are_served(guarded) -> None:
    client = await guarded.connect()
    client.send(m.AuthRequest(1, "bindery", SECRET), m.AddRequest(2, 1, 0, KEY, bytes(36)), m.ReadRequest(3, 0, 0))
    answers = await client.receive_all(3)
    assert [answers[n].status for n in (1, 2, 3)] == [0, 0, 0]


async def test_requests_after_start_tls_still_need_authentication(guarded) -> None:
    """There is no TLS here, so START_TLS is refused, and the connection continues as before."""
    client = await guarded.connect()
    add = m.AddRequest(2, 8, 0, KEY, bytes(60))
    client.send(m.StartTlsRequest(1), add, m.ReadRequest(3, 8, 0), m.ForceLedgerRequest(4, 8), m.StartTlsRequest(5))
    answers = await client.receive_all(5)
    assert {txn_id: answer.status for txn_id, answer in answers.items()} == {
        1: Status.BAD_REQUEST,
        2: Status.UNAUTHORIZED,
        3: Status.UNAUTHORIZED,
        4: Status.UNAUTHORIZED,
        5: Status.BAD_REQUEST,
    }
    assert (guarded.store.groups, guarded.store.read_groups, guarded.store.forces) == ([], [], 0)
    client.send(m.StartTlsRequest(6), m.AuthRequest(7, "bindery", SECRET), m.ReadRequest(8, 9, 0))
    answers = await client.receive_all(3)
    assert [answers[txn_id].status for txn_id in (6, 7, 8)] == [Status.BAD_REQUEST, 0, Status.NO_LEDGER]


async def test_large_frames_before_authentication_are_refused(guarded) -> None:
    """No memory budget counts partial frames, so many unauthenticated clients could fill the memory with them."""
    stranger, known = await guarded.connect(), await guarded.connect()
    large = m.AddRequest(2, 8, 0, KEY, bytes(100_000))
    stranger.send(large)
    assert await stranger.is_closed()
    assert (await known.ask(m.AuthRequest(1, "bindery", SECRET))).status == 0
    assert (await known.ask(large)).status == 0


async def test_only_clients_that_do_not_authenticate_in_time_are_disconnected(start_bookie) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    guarded = await start_bookie(security=Security(authenticator=authenticator, auth_timeout_s=1.0))
    known = await guarded.connect()
    await known.ask(m.AuthRequest(1, "bindery", SECRET))
    idle = await guarded.connect()
    assert await idle.is_closed()
    await asyncio.sleep(0.1)
    assert (await known.ask(m.AddRequest(2, 1, 0, KEY, bytes(36)))).status == 0


async def test_logs_contain_no_token(guarded, caplog, capsys) -> None:
    for payload in (SECRET[:-1], SECRET):
        client = await guarded.connect()
        client.send(m.AuthRequest(1, "bindery", payload))
        await client.receive()
    told = caplog.text + "".join(capsys.readouterr())
    assert SECRET[:-1].decode() not in told

"""START_TLS on the ledger port, with real handshakes, on both event loops."""

import asyncio
import ssl

import pytest
from bindery_bookie.access.authentication import CertificateAuthenticator, TokenAuthenticator
from bindery_bookie.access.security import AuthSettings, Security, TlsSettings, load_security
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import Status
from bindery_identity.tokens import SharedSecrets
from bindery_simulation.certificates import CA, OTHER_CA, certificate, key

KEY = master_key(b"")
CRC32C = Digester(DigestType.CRC32C)
SECRET = b"correct horse battery staple"


def add(txn_id: int, ledger_id: int, entry_id: int, size: int = 10) -> m.AddRequest:
    body = pack(CRC32C, ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=2**40, payload=bytes(size))
    return m.AddRequest(txn_id, ledger_id, entry_id, KEY, body)


def offered(**fields: object) -> Security:
    settings = TlsSettings(certificate_file=str(certificate("bookie")), key_file=str(key("bookie")))
    context = load_security(AuthSettings(), settings, now_s=lambda: 0.0).tls
    return Security(tls=context, **fields)  # type: ignore[arg-type]


def mutual(*allowed: str, **fields: object) -> Security:
    security = offered(
        tls_required=True, authenticator=CertificateAuthenticator(plugin="bindery", allowed=allowed), **fields
    )
    assert security.tls is not None
    security.tls.load_verify_locations(CA)
    security.tls.verify_mode = ssl.CERT_REQUIRED
    return security


def context(name: str | None = None, *, ca: object = CA) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=ca)  # type: ignore[arg-type]
    if name is not None:
        made.load_cert_chain(certificate(name), key(name))
    return made


async def secure(client, made: ssl.SSLContext | None = None) -> None:  # type: ignore[no-untyped-def]
    """Send START_TLS, read the response in clear text, do the handshake."""
    client.send_hex("0a06080310091801d20600")
    assert (await client.receive_bytes()).hex() == "0a060803100918011000d20600"
    await client.writer.start_tls(made or context(), server_hostname="localhost")


@pytest.fixture
async def tls_bookie(start_bookie):  # type: ignore[no-untyped-def]
    return await start_bookie(security=offered())


async def test_the_response_is_in_clear_text_and_everything_after_it_encrypted(tls_bookie) -> None:
    client = await tls_bookie.connect()
    assert (await client.ask(add(5, 1, 0))).status == 0
    await secure(client)
    assert client.writer.get_extra_info("cipher") is not None
    assert (await client.ask(add(2, 1, 1))).status == 0
    assert (await client.ask(m.ReadRequest(3, 1, 0))).body == add(0, 1, 0).body


async def test_v2_requests_are_served_after_start_tls_which_is_always_v3(tls_bookie) -> None:
    client = await tls_bookie.connect()
    await secure(client)
    client.send_v2(m.AddRequest(2, 1, 0, KEY, add(0, 1, 0).body), m.ReadRequest(2, 1, 7))
    assert {type(await client.receive_v2()) for _ in range(2)} == {m.AddResponse, m.ReadResponse}


async def test_thousands_of_requests_are_served_through_tls(tls_bookie) -> None:
    client = await tls_bookie.connect()
    await secure(client)
    client.send(*[add(n, 1, n, size=2000) for n in range(2000)])
    answers = await client.receive_all(2000)
    assert {answer.status for answer in answers.values()} == {0}
    client.send(*[m.ReadRequest(n, 1, n) for n in range(2000)])
    answers = await client.receive_all(2000)
    assert all(len(answer.body) > 2000 for answer in answers.values())
    budget = tls_bookie.server.operations.reads_budget
    async with asyncio.timeout(30):
        while budget.used:
            await asyncio.sleep(0.001)


async def test_a_slow_reader_through_tls_delays_only_its_own_responses(start_bookie) -> None:
    bookie = await start_bookie(security=offered(), unsent_size_max=64 * 1024)
    slow, quick = await bookie.connect(receive_buffer_size=4096), await bookie.connect()
    await secure(slow)
    assert (await quick.ask(add(1, 1, 0, size=200_000))).status == 0
    slow.reader._limit = 1024  # type: ignore[attr-defined]
    slow.send(*[m.ReadRequest(n, 1, 0) for n in range(300)])
    budget = bookie.server.operations.reads_budget
    async with asyncio.timeout(30):
        while budget.used < 64 * 1024:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert sum(bookie.store.read_groups) < 100
    assert (await quick.ask(m.ReadRequest(9, 1, 0))).status == 0
    slow.reader._limit = 2**20  # type: ignore[attr-defined]
    slow.reader._maybe_resume_transport()  # type: ignore[attr-defined]
    assert len(await slow.receive_all(300)) == 300


async def test_start_tls_without_tls_or_for_the_second_time_is_a_bad_request(bookie, client, tls_bookie) -> None:
    refused = "0a060803100918011094 03".replace(" ", "")
    client.send_hex("0a06080310091801d20600")
    assert (await client.receive_bytes()).hex() == refused
    assert (await client.ask(add(1, 1, 0))).status == 0
    secured = await tls_bookie.connect()
    await secure(secured)
    secured.send_hex("0a06080310091801d20600")
    assert (await secured.receive_bytes()).hex() == refused
    assert (await secured.ask(add(1, 1, 0))).status == 0


@pytest.mark.parametrize(
    "behind",
    [
        v3.encode_request(add(2, 1, 0)),
        v2.encode_request(m.ReadRequest(2, 1, 0)),
        v3.encode_request(add(2, 1, 0))[:20],
        b"\x16\x03\x01",
    ],
    ids=["v3", "v2", "half a frame", "an eager handshake"],
)
async def test_bytes_in_clear_text_after_start_tls_end_the_connection(tls_bookie, behind) -> None:
    """Otherwise an attacker in the network could insert requests that are executed as the client's."""
    client = await tls_bookie.connect()
    client.writer.write(v3.encode_request(m.StartTlsRequest(1)) + behind)
    assert await client.is_closed()
    assert tls_bookie.store.groups == []


def encoded(request: m.AuthRequest, *, version: int) -> bytes:
    return v3.encode_request(request) if version == 3 else v2.encode_request(request)


async def receive_auth(client, *, version: int):  # type: ignore[no-untyped-def]
    return await (client.receive() if version == 3 else client.receive_v2())


@pytest.mark.parametrize("version", [2, 3])
async def test_a_token_sent_with_start_tls_is_checked_after_the_handshake(start_bookie, version) -> None:
    """Apache BookKeeper's client sends its first AUTH without waiting for the handshake."""
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(authenticator=authenticator))
    good, bad = await bookie.connect(), await bookie.connect()
    for client, token in ((good, SECRET), (bad, b"wrong")):
        hasty = encoded(m.AuthRequest(2, "bindery", token), version=version)
        client.writer.write(v3.encode_request(m.StartTlsRequest(1)) + hasty)
        assert await client.receive() == m.StartTlsResponse(1, 0)
        assert bookie.metrics.auth_failures == 0
        await client.writer.start_tls(context(), server_hostname="localhost")
    assert (await receive_auth(good, version=version)).plugin == "bindery"
    if version == 3:
        assert (await good.ask(add(3, 1, 0))).status == 0
        assert (await bad.receive()).status == Status.UNAUTHORIZED
    assert await bad.is_closed()
    assert bookie.metrics.auth_failures == 1


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("version", [2, 3])
async def test_a_token_before_start_tls_is_accepted_if_tls_is_optional(start_bookie, version, together) -> None:
    """Apache BookKeeper's client sometimes sends its first AUTH before START_TLS: two of its threads race."""
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(authenticator=authenticator))
    client = await bookie.connect()
    token = encoded(m.AuthRequest(2, "bindery", SECRET), version=version)
    start_tls = v3.encode_request(m.StartTlsRequest(300))
    in_clear = not together or version == 3  # otherwise the token is found after START_TLS, which is first in its batch
    client.writer.write(token + start_tls if together else token)
    if in_clear:
        assert (await receive_auth(client, version=version)).plugin == "bindery"
    if not together:
        client.writer.write(start_tls)
    assert await client.receive() == m.StartTlsResponse(300, 0)
    await client.writer.start_tls(context(), server_hostname="localhost")
    if not in_clear:
        assert (await receive_auth(client, version=version)).plugin == "bindery"
    if version == 3:
        assert (await client.ask(add(3, 1, 0))).status == 0
    else:
        assert (await client.ask_v2(m.AddRequest(2, 1, 0, KEY, add(0, 1, 0).body))).status == 0
    assert bookie.metrics.auth_failures == 0


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_token_in_clear_text_after_the_response_to_start_tls_is_not_a_handshake(
    start_bookie, version, pieces
) -> None:
    """Apache's client sent it before it received the response, and TCP delivered it after the response."""
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(authenticator=authenticator))
    client = await bookie.connect()
    assert await client.ask(m.StartTlsRequest(1)) == m.StartTlsResponse(1, 0)
    hasty = encoded(m.AuthRequest(2, "bindery", SECRET), version=version)
    size = len(hasty) // pieces + 1
    for at in range(0, len(hasty), size):
        await asyncio.sleep(0.01)
        client.writer.write(hasty[at : at + size])
    await client.writer.start_tls(context(), server_hostname="localhost")
    assert (await receive_auth(client, version=version)).plugin == "bindery"
    if version == 3:
        assert (await client.ask(add(3, 1, 0))).status == 0


@pytest.mark.parametrize("what", ["a read", "a long frame", "nothing", "half a frame"])
async def test_other_requests_in_clear_text_after_start_tls_end_the_connection(start_bookie, what) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(authenticator=authenticator, handshake_timeout_s=0.2))
    client = await bookie.connect()
    assert await client.ask(m.StartTlsRequest(1)) == m.StartTlsResponse(1, 0)
    frame = v3.encode_request(m.ReadRequest(2, 1, 0))
    sent = {"a read": frame, "a long frame": b"\x00\x10\x00\x00", "nothing": b"", "half a frame": frame[:9]}
    client.writer.write(sent[what])
    assert await client.is_closed()
    async with asyncio.timeout(30):
        while bookie.server.connection_count:
            await asyncio.sleep(0.001)


async def test_endless_tokens_in_clear_text_end_the_connection(start_bookie) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(authenticator=authenticator))
    client = await bookie.connect()
    assert await client.ask(m.StartTlsRequest(1)) == m.StartTlsResponse(1, 0)
    client.writer.write(v3.encode_request(m.AuthRequest(2, "bindery", b"x" * 8000)) * 9)
    assert await client.is_closed()


async def test_closing_the_server_does_not_wait_for_a_handshake_that_has_not_begun(start_bookie) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(authenticator=authenticator, handshake_timeout_s=600.0))
    client, gone = await bookie.connect(), await bookie.connect()
    for one in (client, gone):
        assert await one.ask(m.StartTlsRequest(1)) == m.StartTlsResponse(1, 0)
    gone.writer.transport.abort()
    async with asyncio.timeout(30):
        await bookie.server.close()
    assert await client.is_closed()


async def test_a_token_sent_with_start_tls_is_refused_if_tls_is_required(start_bookie) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(tls_required=True, authenticator=authenticator))
    client = await bookie.connect()
    client.writer.write(
        v3.encode_request(m.StartTlsRequest(1)) + v3.encode_request(m.AuthRequest(2, "bindery", SECRET))
    )
    assert await client.is_closed()
    assert bookie.metrics.auth_failures == 1


async def test_responses_to_earlier_requests_wait_for_the_encryption(tls_bookie) -> None:
    client = await tls_bookie.connect()
    await client.ask(add(1, 1, 0))
    tls_bookie.store.hold()
    client.send(m.ForceLedgerRequest(2, 1), add(3, 1, 1), m.StartTlsRequest(4))
    assert await client.receive() == m.StartTlsResponse(4, 0)
    tls_bookie.store.release()
    await asyncio.sleep(0.02)
    await client.writer.start_tls(context(), server_hostname="localhost")
    assert set(await client.receive_all(2)) == {2, 3}


async def test_a_failed_or_missing_handshake_ends_only_its_connection(start_bookie) -> None:
    bookie = await start_bookie(security=offered(handshake_timeout_s=1.0))
    junk, silent, distrustful, good = [await bookie.connect() for _ in range(4)]
    for client in (junk, silent):
        client.send(m.StartTlsRequest(1))
        assert (await client.receive()).status == 0
    junk.writer.write(b"this is no handshake, and it is long enough to be seen as none" * 9)
    assert await silent.is_closed()
    async with asyncio.timeout(30):
        while await junk.reader.read(100):  # an alert may come first
            pass
    with pytest.raises(ssl.SSLError):
        await secure(distrustful, context(ca=OTHER_CA))
    await secure(good)
    assert (await good.ask(add(1, 1, 0))).status == 0
    async with asyncio.timeout(30):
        while bookie.server.connection_count != 1:
            await asyncio.sleep(0.001)
    assert bookie.metrics.auth_failures == 3


async def test_a_client_that_disconnects_during_the_handshake_leaves_no_state(tls_bookie) -> None:
    client = await tls_bookie.connect()
    client.send(m.StartTlsRequest(1))
    await client.receive()
    client.writer.transport.abort()
    async with asyncio.timeout(30):
        while tls_bookie.server.connection_count:
            await asyncio.sleep(0.001)


async def test_closing_the_server_ends_secured_connections_and_handshakes(start_bookie) -> None:
    bookie = await start_bookie(security=offered(handshake_timeout_s=600.0))
    secured, shaking = await bookie.connect(), await bookie.connect()
    await secure(secured)
    shaking.send(m.StartTlsRequest(1))
    await shaking.receive()
    async with asyncio.timeout(30):
        await bookie.server.close()
    assert await secured.is_closed()
    assert await shaking.is_closed()


# --- required TLS -----------------------------------------------------------------------------------------------------


async def test_nothing_is_served_in_clear_text_if_tls_is_required(start_bookie) -> None:
    bookie = await start_bookie(security=offered(tls_required=True))
    client = await bookie.connect()
    client.send(add(1, 1, 0))
    assert (await client.receive_bytes()).hex() == "0a0608031002180110f603"
    assert bookie.store.groups == []
    await secure(client)
    assert (await client.ask(add(2, 1, 0))).status == 0
    in_v2 = await bookie.connect()
    assert await in_v2.ask_v2(m.ReadRequest(2, 1, 0)) == m.ReadResponse(2, Status.UNAUTHORIZED, 1, 0)


async def test_a_token_is_accepted_only_through_tls_if_tls_is_required(start_bookie) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(tls_required=True, authenticator=authenticator))
    hasty, proper = await bookie.connect(), await bookie.connect()
    hasty.send(m.AuthRequest(1, "bindery", SECRET))
    assert (await hasty.receive()).status == Status.UNAUTHORIZED
    assert await hasty.is_closed()
    await secure(proper)
    assert await proper.ask(m.AuthRequest(1, "bindery", SECRET)) == m.AuthResponse(1, 0, "bindery")
    assert (await proper.ask(add(2, 1, 0))).status == 0


async def test_requests_after_a_second_start_tls_are_refused(start_bookie) -> None:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin="bindery", now_s=lambda: 0.0)
    bookie = await start_bookie(security=offered(tls_required=True, authenticator=authenticator))
    client = await bookie.connect()
    await secure(client)
    client.send(m.StartTlsRequest(1), add(2, 1, 0), m.ReadRequest(3, 1, 0))
    answers = await client.receive_all(3)
    assert [answers[txn_id].status for txn_id in (1, 2, 3)] == [
        Status.BAD_REQUEST,
        Status.UNAUTHORIZED,
        Status.UNAUTHORIZED,
    ]
    assert (bookie.store.groups, bookie.store.read_groups) == ([], [])


# --- mutual TLS -------------------------------------------------------------------------------------------------------


async def test_a_client_with_an_allowed_name_in_its_certificate_needs_no_token(start_bookie) -> None:
    bookie = await start_bookie(security=mutual("broker.test"))
    client = await bookie.connect()
    await secure(client, context("client"))
    assert (await client.ask(add(2, 1, 0))).status == 0
    answer = await client.ask(m.AuthRequest(3, "bindery", b""))
    assert answer == m.AuthResponse(3, 0, "AuthDisabledPlugin"), "authenticated already"


async def test_a_client_that_is_not_allowed_is_refused_after_start_tls(start_bookie) -> None:
    bookie = await start_bookie(security=mutual("broker.test"))
    client = await bookie.connect()
    await secure(client, context("guest"))
    assert (await client.receive()).status == Status.IO_ERROR
    client.send(m.StartTlsRequest(1), add(2, 1, 0), m.ReadRequest(3, 1, 0))
    answers = await client.receive_all(3)
    assert (answers[2].status, answers[3].status) == (Status.UNAUTHORIZED, Status.UNAUTHORIZED)
    assert (bookie.store.groups, bookie.store.read_groups) == ([], [])


async def test_a_certificate_without_an_allowed_name_gets_an_error_and_no_service(start_bookie) -> None:
    bookie = await start_bookie(security=mutual("broker.test"))
    client = await bookie.connect()
    await secure(client, context("guest"))
    assert await client.receive() == m.StartTlsResponse(0, Status.IO_ERROR)
    client.send(add(2, 1, 0))
    assert (await client.receive_bytes()).hex() == "0a0608031002180210f603"
    assert bookie.store.groups == []
    assert bookie.metrics.auth_failures == 1


@pytest.mark.parametrize("name", [None, "stranger"])
async def test_a_client_without_a_certificate_of_the_ca_is_refused(start_bookie, name) -> None:
    bookie = await start_bookie(security=mutual())
    client = await bookie.connect()

    async def add_through_tls() -> None:
        await secure(client, context(name))
        client.send(add(2, 1, 0))
        await client.receive()

    with pytest.raises((OSError, EOFError)):  # with TLS 1.3 the client gets the error only when it reads
        await add_through_tls()
    assert bookie.store.groups == []

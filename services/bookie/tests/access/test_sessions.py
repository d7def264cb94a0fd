"""An open connection does not outlive the credentials with which it authenticated."""

import asyncio
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, Security, TlsSettings, load_security
from bindery_bookie.access.sessions import Held, Sessions
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.errors import Unauthorized
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Status
from bindery_identity.tls import client_tls
from bindery_identity.tokens import CLOCK_SKEW_S, sign
from bindery_kit.access import held_credentials
from bindery_kit.process.followed_files import FileFollower
from bindery_simulation.certificates.authority import Authority, replace

KEY = b"a signing key of more than 32 bytes"
OTHER_KEY = b"another signing key of more than 32 bytes"
MASTER_KEY = master_key(b"")
CRC32C = Digester(DigestType.CRC32C)


def add(txn_id: int, entry_id: int = 0) -> m.AddRequest:
    body = pack(CRC32C, ledger_id=1, entry_id=entry_id, lac=-1, length=2**40, payload=b"payload")
    return m.AddRequest(txn_id, 1, entry_id, MASTER_KEY, body)


def token(key: bytes = KEY, **options: Any) -> bytes:
    return sign(key, subject="broker", **options)


async def authenticate(client: Any, text: bytes) -> None:
    assert (await client.ask(m.AuthRequest(1, "bindery", text))).status == Status.OK


class Clock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(KEY + b"\n" + OTHER_KEY + b"\n")
    return path


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers of expiry look at the clock often, because the tests set it."""
    monkeypatch.setattr(held_credentials, "EXPIRY_CHECK_S_MAX", 0.02)


def by_token(keys: Path, follower: FileFollower, clock: Clock) -> Security:
    settings = AuthSettings(provider=AuthProvider.TOKEN, keys_file=str(keys))
    security = load_security(settings, TlsSettings(), now_s=clock, follow=follower.follow)
    assert security.sessions is not None
    follower.on_replaced = security.sessions.check_again
    return security


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_connection_ends_when_its_token_expires(start_bookie: Any, keys: Path, quick_checks: None) -> None:
    clock = Clock()
    bookie = await start_bookie(security=by_token(keys, FileFollower(), clock))
    short, long, unlimited = [await bookie.connect() for _ in range(3)]
    await authenticate(short, token(expires_at_s=int(time.time()) + 1000))
    await authenticate(long, token(expires_at_s=int(time.time()) + 100_000))
    await authenticate(unlimited, token())
    clock.ahead_s = 1000 + CLOCK_SKEW_S - 600
    assert (await short.ask(add(2))).status == Status.OK
    clock.ahead_s = 1000 + CLOCK_SKEW_S
    assert await short.is_closed()
    assert bookie.metrics.auth_failures == 1
    for client in (long, unlimited):
        assert (await client.ask(add(2))).status == Status.OK


async def test_operations_in_progress_finish_and_new_ones_are_refused(start_bookie: Any, keys: Path) -> None:
    follower = FileFollower()
    security = by_token(keys, follower, Clock())
    bookie = await start_bookie(security=security)
    first, second, third = [await bookie.connect() for _ in range(3)]
    for client in (first, second):
        await authenticate(client, token())
    await authenticate(third, token(OTHER_KEY))
    bookie.store.hold()
    first.send(add(2, 0))
    second.send_v2(add(2, 1))
    await eventually(lambda: len(bookie.store.groups) == 2)
    replace(keys, OTHER_KEY + b"\n")
    await follower.poll()
    await eventually(lambda: len(security.sessions) == 1)
    refused = await first.ask(add(3, 2))
    assert isinstance(refused, m.ErrorResponse)
    assert (refused.txn_id, refused.status) == (3, Status.UNAUTHORIZED)
    assert (await second.ask_v2(add(3, 3))).status == Status.UNAUTHORIZED
    bookie.store.release()
    assert (await first.receive()).status == Status.OK
    assert (await second.receive_v2()).status == Status.OK
    for client in (first, second):
        assert await client.is_closed()
    assert sorted(bookie.store.ledgers[1].entries) == [0, 1]
    assert (await third.ask(add(2, 4))).status == Status.OK


async def test_a_poll_that_waits_ends_with_its_connection(start_bookie: Any, keys: Path) -> None:
    follower = FileFollower()
    bookie = await start_bookie(security=by_token(keys, follower, Clock()))
    client = await bookie.connect()
    await authenticate(client, token())
    assert (await client.ask(add(2))).status == Status.OK
    client.send(m.ReadRequest(3, 1, -1, m.ReadFlag.ENTRY_PIGGYBACK, previous_lac=5, timeout_ms=600_000))
    await eventually(lambda: bookie.server.operations.long_polls == 1)
    replace(keys, OTHER_KEY + b"\n")
    await follower.poll()
    async with asyncio.timeout(30):
        while await client.reader.read(1024):
            pass


async def test_a_connection_ends_when_its_ca_is_removed_or_its_certificate_expires(
    start_bookie: Any, tmp_path: Path, quick_checks: None
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    replace(trusted, old.pem + new.pem)
    served, served_key = new.issue("bookie")
    clock, follower = Clock(), FileFollower()
    tls = TlsSettings(certificate_file=str(served), key_file=str(served_key), ca_file=str(trusted))
    security = load_security(AuthSettings(provider=AuthProvider.CERTIFICATE), tls, now_s=clock)
    assert security.tls_files is not None
    assert security.sessions is not None
    follower.follow(security.tls_files)
    follower.on_replaced = security.sessions.check_again
    bookie = await start_bookie(security=security)

    async def connect(authority: Authority, name: str) -> Any:
        own, own_key = authority.issue(name, common_name=name)
        context = client_tls(ca_file=str(new.ca_file), certificate_file=str(own), key_file=str(own_key)).context
        client = await bookie.connect()
        client.send_hex("0a06080310091801d20600")
        await client.receive_bytes()
        await client.writer.start_tls(context, server_hostname="localhost")
        assert (await client.ask(add(2))).status == Status.OK
        return client

    of_old, of_new = await connect(old, "one"), await connect(new, "two")
    replace(trusted, new.pem)
    await follower.poll()
    assert await of_old.is_closed()
    assert (await of_new.ask(add(3))).status == Status.OK
    clock.ahead_s = 100 * 365 * 86_400.0
    assert await of_new.is_closed()


async def test_a_session_that_ended_refers_to_nothing() -> None:
    class Connection:
        def end(self, reason: Unauthorized) -> None:
            raise AssertionError(reason)

    sessions = Sessions(now_s=time.time)
    held = Held(who="x", expires_at_s=time.time() + 3600, verify=lambda: "x")
    connection = Connection()
    session = sessions.begin(held, connection.end)
    gone = weakref.ref(connection)
    gc.disable()
    try:
        session.forget()
        del connection
        assert gone() is None
    finally:
        gc.enable()
    assert len(sessions) == 0


async def test_a_token_that_names_another_client_now_is_refused() -> None:
    names = ["x"]
    sessions = Sessions(now_s=time.time)
    ended: list[Unauthorized] = []
    sessions.begin(Held(who="x", expires_at_s=None, verify=lambda: names[0]), ended.append)
    sessions.check_again()
    await asyncio.sleep(0.01)
    assert not ended
    names[0] = "y"
    sessions.check_again()
    await eventually(lambda: len(ended) == 1)

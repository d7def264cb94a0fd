"""The ledger client replaces its connections when its token is replaced, so that no request fails when the old token
expires. Bookies with the real access control and stores in memory."""

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, TlsSettings, load_security
from bindery_client.client import LedgerClient
from bindery_client.connection import pool
from bindery_client.connection.security import load_security as load_client_security
from bindery_client.settings import ClientSettings
from bindery_core.errors import BinderyError
from bindery_core.formats.bookie_service_info import encode, of_bookie
from bindery_core.ids import BookieId, EntryId
from bindery_identity.tokens import CLOCK_SKEW_S, sign
from bindery_kit.access import held_credentials
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.certificates.authority import replace

KEY = b"a signing key of more than 32 bytes"
LIFE_S = 1000
"""Seconds for which a token is accepted, by the clock of the bookies, which the test sets."""
LIVES = 4


class Cluster:
    """Three bookies that require tokens, and one client."""

    def __init__(self, tmp_path: Path, start_bookie: Any) -> None:
        self.ahead_s = 0.0
        self.tree, self.layout = MemoryTree(), LedgersLayout()
        self.token_file = tmp_path / "token"
        self.keys = tmp_path / "keys"
        self.keys.write_bytes(KEY + b"\n")
        self.bookies: list[Any] = []
        self._start_bookie = start_bookie
        self._begin_s = int(time.time())
        self.expires_at_s = 0.0
        """From when the newest token is refused."""

    def now_s(self) -> float:
        return self._begin_s + self.ahead_s

    def write_token(self) -> None:
        self.expires_at_s = self.now_s() + LIFE_S
        expires_at_s = int(self.expires_at_s - CLOCK_SKEW_S)
        replace(self.token_file, sign(KEY, subject="broker", expires_at_s=expires_at_s) + b"\n")

    async def start(self) -> None:
        store = self.tree.connect()
        await initialize_cluster(store, self.layout, randomness=random.Random(1))
        auth = AuthSettings(provider=AuthProvider.TOKEN, keys_file=str(self.keys))
        for number in range(3):
            bookie = await self._start_bookie(security=load_security(auth, TlsSettings(), now_s=self.now_s))
            self.bookies.append(bookie)
            info = encode(of_bookie(host="127.0.0.1", port=bookie.port))
            await BookieRegistration(store, self.layout, BookieId(f"b-{number}"), info).register(read_only=False)

    async def connect(self, **settings: Any) -> LedgerClient:
        security = load_client_security(token_file=self.token_file)
        settings = {"add_timeout_s": 60.0, "add_quorum_timeout_s": 120.0, "read_timeout_s": 60.0, **settings}
        return await LedgerClient.connect(
            self.tree.connect(),
            randomness=random.Random(2),
            layout=self.layout,
            settings=ClientSettings(**settings),
            security=security,
        )

    def expiries(self) -> set[float | None]:
        """Return when the credentials of the open connections expire."""
        sessions = [bookie.server.security.sessions for bookie in self.bookies]
        return {one.held.expires_at_s for each in sessions for one in each.rechecks._watched}


@pytest.fixture
async def cluster(tmp_path: Path, start_bookie: Any, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(held_credentials, "EXPIRY_CHECK_S_MAX", 0.02)
    monkeypatch.setattr(pool, "RENEWAL_CHECK_S", 0.02)
    made = Cluster(tmp_path, start_bookie)
    await made.start()
    return made


@pytest.mark.parametrize("wire_version", [2, 3])
async def test_no_request_fails_while_tokens_expire(cluster: Cluster, wire_version: int) -> None:
    cluster.write_token()
    client = await cluster.connect(wire_version=wire_version)
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=3)
    counts, done = [0, 0], asyncio.Event()

    async def write() -> None:
        while not done.is_set():
            await asyncio.gather(*(writer.add_many([b"x" * 1000] * 10) for _ in range(5)))
            counts[0] += 50

    async def read() -> None:
        while not done.is_set():
            if writer.last_add_confirmed >= 10:
                assert len(await writer.read(EntryId(0), EntryId(10))) == 11
                counts[1] += 1
            await asyncio.sleep(0)

    async def expire() -> None:
        for _ in range(LIVES):
            before = list(counts)
            async with asyncio.timeout(60):
                while counts[0] == before[0] or counts[1] == before[1]:
                    await asyncio.sleep(0.005)
            old = cluster.expires_at_s
            cluster.ahead_s += old - cluster.now_s() - 100
            assert old in cluster.expiries()
            cluster.write_token()
            async with asyncio.timeout(60):
                while old in cluster.expiries():
                    await asyncio.sleep(0.005)
            cluster.ahead_s += 100
        done.set()

    async with asyncio.TaskGroup() as tasks:
        for work in (write(), read(), expire()):
            tasks.create_task(work)
    assert len(writer.metadata.segments) == 1, "no bookie was replaced"
    assert [bookie.metrics.auth_failures for bookie in cluster.bookies] == [0, 0, 0]
    assert writer.last_add_confirmed == counts[0] - 1
    await client.close()


async def test_a_client_whose_token_has_expired_goes_on_with_the_next(cluster: Cluster) -> None:
    cluster.write_token()
    client = await cluster.connect(reconnect_pause_s=0.01, reconnect_pause_s_max=0.05)
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=3)
    await writer.add_many([b"a", b"b"])
    cluster.ahead_s += LIFE_S
    async with asyncio.timeout(60):
        while any(bookie.server.connection_count for bookie in cluster.bookies):
            await asyncio.sleep(0.005)
    with pytest.raises(BinderyError):
        await writer.read(EntryId(0), EntryId(1))
    cluster.write_token()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(BinderyError):
                assert len(await writer.read(EntryId(0), EntryId(1))) == 2
                break
            await asyncio.sleep(0.01)
    await client.close()

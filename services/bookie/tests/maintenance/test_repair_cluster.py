"""Whole bookies (real disks, real sockets, metadata in memory): one loses its storage, and no entry is lost."""

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, TlsSettings
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_client.client import LedgerClient
from bindery_client.connection.security import NO_SECURITY, load_security
from bindery_client.ledger.replica import Verdict
from bindery_client.settings import ClientSettings
from bindery_core.errors import BinderyError, NotThere, TryAgain
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId, EntryId
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import Status
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, MetadataRollbackSuspected, RollbackReport
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.certificates import CA, certificate, key

WAIT_S = 30.0
NAMES = [BookieId(f"bookie-{n}") for n in range(3)]


class Cluster:
    """Bookies of one test, each with its own directories; they can be restarted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tree = MemoryTree()
        self.bookies: dict[str, BookieProcess] = {}
        self.options: dict[str, Any] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            home = self.directory / name
            settings = BookieSettings(
                bookie_id=name,
                port=0,
                http_port=0,
                journal_dir=str(home / "journal"),
                ledger_dir=",".join(str(home / part) for part in self.options.get("ledger_dirs", ["ledgers"])),
                **self.options.get("settings", {}),
            )

            async def connect() -> Any:
                return self.tree.connect()

            bookie = BookieProcess(
                settings,
                Shutdown(),
                connect=connect,
                clock=time.monotonic,
                wall_clock_ms=lambda: time.time_ns() // 1_000_000,
            )
            self.bookies[name] = bookie
            await bookie.start()

    async def stop(self, *names: str) -> None:
        for name in names:
            await self.bookies.pop(name).stop()

    def wipe(self, name: str, *parts: str) -> None:
        for part in parts:
            shutil.rmtree(self.directory / name / part)

    async def client(self) -> LedgerClient:
        settings = ClientSettings(
            recovery_timeout_s=1.0,
            read_timeout_s=1.0,
            reconnect_pause_s=0.02,
            reconnect_pause_s_max=0.05,
            quarantine_s=0.1,
        )
        return await LedgerClient.connect(
            self.tree.connect(),
            randomness=random.Random(7),
            settings=settings,
            security=self.options.get("security", NO_SECURITY),
        )

    async def recreate(self, **options: Any) -> None:
        """Create the same bookies with other settings and empty storage."""
        await self.stop(*list(self.bookies))
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        self.tree = MemoryTree()
        await initialize_cluster(self.tree.connect(), LedgersLayout(), randomness=random.Random(1))
        self.options = options
        await self.start(*NAMES)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await initialize_cluster(cluster.tree.connect(), LedgersLayout(), randomness=random.Random(1))
    await cluster.start(*NAMES)
    yield cluster
    await cluster.stop(*list(cluster.bookies))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.01)


def is_whole(bookie: BookieProcess) -> bool:
    return all(shard.limbo is None for shard in bookie.shards) and not len(bookie.damage)


async def write(client: LedgerClient, count: int, write_quorum: int, *, is_closed: bool) -> tuple[int, list[bytes]]:
    writer = await client.create(ensemble_size=3, write_quorum=write_quorum, ack_quorum=2, password=b"pw")
    payloads = [b"%d/%d " % (writer.ledger_id, n) * (n % 7 + 1) for n in range(count)]
    for at in range(0, count, 10):
        await writer.add_many(payloads[at : at + 10])
    if is_closed:
        await writer.close()
    else:
        await writer.abandon()
    return writer.ledger_id, payloads


async def should_hold(client: LedgerClient, ledger_id: int, name: str) -> set[int]:
    metadata = await client.metadata(ledger_id)
    (segment,) = metadata.segments
    index = segment.ensemble.index(name)
    return {
        e
        for e in range(metadata.last_entry_id + 1)
        if index in write_set(entry_id=e, ensemble_size=3, write_quorum=metadata.write_quorum)
    }


async def holds(client: LedgerClient, ledger_id: int, name: str) -> set[int]:
    return {e for first, count in await client.entries_on(ledger_id, name) for e in range(first, first + count)}


async def assert_refill_is_in_history(cluster: Cluster, name: str) -> None:
    """Assert that the history contains one event with the figures of the repair."""
    repairer = cluster.bookies[name].repairer
    assert repairer is not None
    records = RecoveryRecords(cluster.tree.connect())
    async with asyncio.timeout(WAIT_S):
        while not (events := await records.history()):
            await asyncio.sleep(0.01)
    (event,) = events
    state = repairer.state
    assert (event.kind, event.fields) == (
        "refilled",
        {
            "bookie": name,
            "ledgers": state.ledgers_done,
            "entries": state.entries_back,
            "entries_copied": state.entries_copied,
            "bytes_copied": state.bytes_copied,
        },
    )
    assert state.entries_back > 0
    assert f"bookie {name} refilled {state.entries_back} entries of {state.ledgers_done} ledgers" in event.text


async def test_lost_storage_is_not_listed_while_a_rollback_of_the_metadata_is_suspected(cluster: Cluster) -> None:
    """If the newer metadata is restored later, the bookie must not deny the entries that it had of newer ledgers."""
    name = NAMES[0]
    client = await cluster.client()
    ledger_id, _ = await write(client, 10, 3, is_closed=True)
    await cluster.stop(name)
    cluster.wipe(name, "journal", "ledgers")
    store = cluster.tree.connect()
    known = KnownLedgersStore(store, instance_id=await CookieStore(store, LedgersLayout()).instance_id())
    report = RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10)
    await known.update(lambda one: one.with_report(NAMES[1], report))
    with pytest.raises(MetadataRollbackSuspected, match="cannot list the ledgers that were on the lost storage"):
        await cluster.start(name)
    await cluster.stop(name)
    await known.accept(version=(await known.read())[1], by="me", at_ms=1)
    await cluster.start(name)
    await until(lambda: is_whole(cluster.bookies[name]))
    assert await holds(client, ledger_id, name) == set(range(10))


@pytest.mark.parametrize(
    ("ledger_dirs", "lost"),
    [(["ledgers"], ["journal", "ledgers"]), (["ledgers"], ["journal"]), (["ledgers", "more"], ["more"])],
    ids=["everything", "journal", "one-of-two-ledger-directories"],
)
async def test_lost_storage_is_refilled_automatically(
    cluster: Cluster, ledger_dirs: list[str], lost: list[str]
) -> None:
    name = NAMES[0]
    if len(ledger_dirs) > 1:
        await cluster.recreate(ledger_dirs=ledger_dirs)
    client = await cluster.client()
    written = dict(
        [
            await write(client, 40, 3, is_closed=True),
            await write(client, 47, 2, is_closed=True),
            await write(client, 30, 3, is_closed=False),
            await write(client, 31, 2, is_closed=False),
            await write(client, 0, 3, is_closed=False),
        ]
    )
    await cluster.stop(name)
    cluster.wipe(name, *lost)
    await cluster.start(name)
    await until(lambda: is_whole(cluster.bookies[name]))
    await assert_refill_is_in_history(cluster, name)
    for ledger_id, payloads in written.items():
        metadata = await client.metadata(ledger_id)
        if payloads and metadata.state is LedgerState.CLOSED:
            assert metadata.last_entry_id == len(payloads) - 1
            assert await holds(client, ledger_id, name) >= await should_hold(client, ledger_id, name)
    for other in NAMES[1:]:
        await cluster.stop(other)
    for ledger_id, payloads in written.items():
        if (await client.metadata(ledger_id)).state is not LedgerState.CLOSED:
            continue
        for entry_id in await should_hold(client, ledger_id, name):
            replica = await client.read_from_bookie(ledger_id, EntryId(entry_id), name)
            assert (replica.verdict, replica.payload) == (Verdict.GOOD, payloads[entry_id])
    await cluster.stop(name)
    assert not list(cluster.directory.rglob("LIMBO"))
    await cluster.start(name)
    assert is_whole(cluster.bookies[name])
    await client.close()


async def test_a_bookie_without_its_storage_does_not_truncate_a_ledger(cluster: Cluster) -> None:
    """Goal: recovery closes a ledger only with two real denials of an entry.

    Two bookies acknowledged the last entries. One of them lost its disks, the other one is down. The third bookie never
    had these entries, and the bookie without its disks must not confirm its denial.
    """
    empty, away, behind = NAMES
    client = await cluster.client()
    writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, password=b"pw")
    payloads = [b"entry %d" % n for n in range(20)]
    await writer.add_many(payloads[:10])
    await cluster.stop(behind)
    await writer.add_many(payloads[10:])
    await writer.abandon()
    ledger_id = writer.ledger_id
    await cluster.stop(empty, away)
    cluster.wipe(empty, "journal", "ledgers")
    await cluster.start(behind, empty)

    statuses = set()
    for entry_id in (0, 9, 10, 19, 20):
        replica = await client.read_from_bookie(ledger_id, EntryId(entry_id), empty)
        statuses.add(replica.status)
    assert statuses == {Status.UNKNOWN_LEDGER_STATE}
    with pytest.raises(BinderyError) as raised:
        await client.entries_on(ledger_id, empty)
    assert not isinstance(raised.value, NotThere)
    with pytest.raises(TryAgain):
        await client.open(ledger_id, password=b"pw")
    metadata = await client.metadata(ledger_id)
    assert metadata.state is not LedgerState.CLOSED
    limbo = cluster.bookies[empty].shards[0].limbo
    assert limbo is not None
    assert limbo.left == 1
    ready, answer = cluster.bookies[empty].health.ready_answer()
    said = f"storage is incomplete and is being refilled from other bookies (ledgers left: 1): {limbo.reason}"
    assert (ready, answer["notes"]) == (200, {"limbo": said})

    await cluster.start(away)
    await until(lambda: is_whole(cluster.bookies[empty]))
    await until(lambda: cluster.bookies[empty].health.ready_answer() == (200, {"status": "ready"}))
    metadata = await client.metadata(ledger_id)
    assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, 19)
    await cluster.stop(away, behind)
    for entry_id, payload in enumerate(payloads):
        assert (await client.read_from_bookie(ledger_id, EntryId(entry_id), empty)).payload == payload
    await client.close()


async def test_a_lost_entry_log_and_a_flipped_bit_are_repaired_from_other_bookies(cluster: Cluster) -> None:
    name = NAMES[0]
    client = await cluster.client()
    first, first_payloads = await write(client, 40, 3, is_closed=True)
    await cluster.stop(name)
    await cluster.start(name)
    second, second_payloads = await write(client, 41, 2, is_closed=True)
    await cluster.stop(name)
    logs = sorted((cluster.directory / name / "ledgers" / "current").glob("*.log"))
    assert len(logs) == 2
    logs[0].unlink()
    data = bytearray(logs[1].read_bytes())
    damaged = max(await should_hold(client, second, name))
    data[data.index(b"%d/%d " % (second, damaged))] ^= 1
    logs[1].write_bytes(data)
    await cluster.start(name)
    await until(lambda: is_whole(cluster.bookies[name]))
    found = (await client.read_from_bookie(second, EntryId(damaged), name)).status  # found by a read
    assert found == Status.IO_ERROR
    await until(lambda: is_whole(cluster.bookies[name]))
    for other in NAMES[1:]:
        await cluster.stop(other)
    for ledger_id, payloads in ((first, first_payloads), (second, second_payloads)):
        for entry_id in await should_hold(client, ledger_id, name):
            assert (await client.read_from_bookie(ledger_id, EntryId(entry_id), name)).payload == payloads[entry_id]
    await client.close()


@pytest.mark.parametrize("is_told_the_authority", [True, False])
async def test_repair_presents_its_own_token_over_tls_or_reports_what_is_missing(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, is_told_the_authority: bool
) -> None:
    secrets = tmp_path_factory.mktemp("secrets") / "secrets"
    secrets.write_text("one of our secrets\n")
    tls = TlsSettings(
        certificate_file=str(certificate("bookie")),
        key_file=str(key("bookie")),
        ca_file=str(CA) if is_told_the_authority else "",
        required=True,
    )
    auth = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=str(secrets))
    await cluster.recreate(
        settings={"auth": auth, "tls": tls}, security=load_security(ca_file=CA, token_file=str(secrets))
    )
    name = NAMES[0]
    client = await cluster.client()
    ledger_id, _ = await write(client, 20, 3, is_closed=True)
    await cluster.stop(name)
    cluster.wipe(name, "journal", "ledgers")
    await cluster.start(name)
    bookie = cluster.bookies[name]
    if is_told_the_authority:
        await until(lambda: is_whole(bookie))
        assert await holds(client, ledger_id, name) == set(range(20))
    else:
        assert bookie.repairer is not None
        state = bookie.repairer.state
        await until(lambda: bool(state.blocked))
        assert "repair.ca_file" in state.blocked
        assert bookie.health.is_ready  # it serves what it has
    await client.close()

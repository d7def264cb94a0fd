"""Complete bookies (real disks, real sockets) on metadata in memory, with workers."""

import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_client.ledger.writer import WriteHandle
from bindery_client.settings import ClientSettings
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from bindery_recovery.budget import MIB, RepairBudget
from bindery_recovery.cluster.cluster_view import ClusterReader
from bindery_recovery.repair.worker import ReplicationWorker
from bindery_recovery.settings import RecoverySettings

LAYOUT = LedgersLayout()
QUICK = ClientSettings(
    recovery_timeout_s=3.0,
    read_timeout_s=1.0,
    add_timeout_s=1.0,
    reconnect_pause_s=0.02,
    reconnect_pause_s_max=0.05,
    quarantine_s=0.1,
    replacement_retry_s=0.1,
)


def clock_ms() -> int:
    return time.time_ns() // 1_000_000


def worker_on(store: MetadataStore, client: LedgerClient, name: str, **settings: Any) -> ReplicationWorker:
    """Return a worker as a process creates it."""
    chance = random.SystemRandom()
    chosen = RecoverySettings(**settings)
    return ReplicationWorker(
        name=name,
        store=store,
        client=client,
        marks=UnderreplicationManager(store, LAYOUT, randomness=chance, clock_ms=clock_ms, worker_name=name),
        records=RecoveryRecords(store),
        read_cluster=ClusterReader(
            client, MembershipStore(store, clock_ms=clock_ms), CookieStore(store, LAYOUT), clock_ms=clock_ms
        ).read,
        budget=RepairBudget(bytes_per_s_max=chosen.bytes_per_s_max, bytes_per_s_min=chosen.bytes_per_s_min),
        settings=chosen,
        clock_ms=clock_ms,
        randomness=chance,
    )


class BookieCluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tree = MemoryTree()
        self.store = self.tree.connect()
        self.bookies: dict[str, BookieProcess] = {}
        self.clients: list[LedgerClient] = []
        self.marks = UnderreplicationManager(self.store, LAYOUT, randomness=random.Random(0), clock_ms=clock_ms)
        self.records = RecoveryRecords(self.store)
        self.memberships = MembershipStore(self.store, clock_ms=clock_ms)

    async def start(self, *names: str) -> None:
        for name in names:
            home = self.directory / name
            settings = BookieSettings(
                bookie_id=name,
                port=0,
                http_port=0,
                journal_dir=str(home / "journal"),
                ledger_dir=str(home / "ledgers"),
            )

            async def connect() -> Any:
                return self.tree.connect()

            self.bookies[name] = BookieProcess(
                settings, Shutdown(), connect=connect, clock=time.monotonic, wall_clock_ms=clock_ms
            )
            await self.bookies[name].start()

    async def stop(self, *names: str) -> None:
        for name in names:
            await self.bookies.pop(name).stop()

    def wipe(self, name: str) -> None:
        for part in ("journal", "ledgers"):
            shutil.rmtree(self.directory / name / part)

    async def client(self) -> LedgerClient:
        client = await LedgerClient.connect(self.tree.connect(), randomness=random.Random(7), settings=QUICK)
        self.clients.append(client)
        return client


@asynccontextmanager
async def bookie_cluster(directory: Path, count: int) -> AsyncIterator[BookieCluster]:
    cluster = BookieCluster(directory)
    await initialize_cluster(cluster.store, LAYOUT, randomness=random.Random(1))
    await cluster.marks.prepare()
    try:
        await cluster.start(*(f"bookie-{n}" for n in range(count)))
        yield cluster
    finally:
        for client in cluster.clients:
            await client.close()
        await cluster.stop(*list(cluster.bookies))


def payload(ledger_id: int, entry_id: int) -> bytes:
    return b"%d/%d " % (ledger_id, entry_id) * (entry_id % 50 + 1)


async def write(
    client: LedgerClient,
    count: int,
    *,
    is_closed: bool = True,
    digest_type: DigestType = DigestType.CRC32C,
    **quorums: int,
) -> WriteHandle:
    writer = await client.create(password=b"pw", digest_type=digest_type, **quorums)
    await add(writer, 0, count)
    if is_closed:
        await writer.close()
    return writer


async def add(writer: WriteHandle, first: int, end: int) -> None:
    for at in range(first, end, 50):
        await writer.add_many([payload(writer.ledger_id, n) for n in range(at, min(at + 50, end))])


async def assert_whole(client: LedgerClient, ledger_id: LedgerId, count: int) -> LedgerMetadata:
    """Read every replica of every entry from its own bookie and check payload, length and digest."""
    metadata = await client.metadata(ledger_id)
    assert metadata.last_entry_id == count - 1
    wanted: dict[BookieId, list[EntryId]] = {}
    for entry_id in range(count):
        segment = metadata.segment_of(EntryId(entry_id))
        for index in write_set(
            entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
        ):
            wanted.setdefault(segment.ensemble[index], []).append(EntryId(entry_id))
    lengths = [0]
    for entry_id in range(count):
        lengths.append(lengths[-1] + len(payload(ledger_id, entry_id)))
    read = 0

    def judge(replica: ReplicaRead) -> None:
        nonlocal read
        read += 1
        assert replica.verdict is Verdict.GOOD, (replica.bookie_id, replica.entry_id, replica.verdict, replica.reason)
        assert replica.payload == payload(ledger_id, replica.entry_id)
        assert replica.length == lengths[replica.entry_id + 1]

    for bookie_id, entry_ids in wanted.items():
        for at in range(0, len(entry_ids), 200):
            await client.read_replicas(ledger_id, metadata, bookie_id, entry_ids[at : at + 200], judge)
    assert read == count * metadata.write_quorum
    assert metadata.length == lengths[count]
    return metadata


__all__ = ["LAYOUT", "MIB", "QUICK", "BookieCluster", "add", "assert_whole", "bookie_cluster", "payload", "write"]

"""A cluster in memory with complete auditors behind their HTTP applications."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from bindery_auditor.app import AuditorApp, AuditorContext
from bindery_auditor.metrics import AuditorMetrics
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.admin.access import Access
from bindery_kit.observability.health import Health, OpsApp
from bindery_kit.observability.process_page import ProcessPage
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.last_audits import LastAudits
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.recovery_admin import RecoveryAdmin
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics
from bindery_recovery.service import RecoveryService
from bindery_recovery.settings import RecoverySettings

LAYOUT = LedgersLayout()
NAMES = tuple(BookieId(f"bookie-{n}") for n in range(4))
START_MS = 1_700_000_000_000


def clock_ms() -> int:
    """The wall clock of these tests follows the clock of the loop."""
    return START_MS + int(asyncio.get_running_loop().time() * 1000)


class AuditorUnderTest:
    """An auditor; `http` is a client of its API."""

    def __init__(self, cluster: "Cluster", name: str, *, access: Access | None, settings: Mapping[str, Any]) -> None:
        self.store: MemoryStore = cluster.tree.connect()
        self.client = MemoryLedgerClient(cluster.ledgers)
        self.exits: list[str] = []
        randomness = random.Random(name)
        self.service = RecoveryService(
            self.store,
            LAYOUT,
            self.client,
            settings=RecoverySettings(**{"lost_bookie_delay_s": 10, **settings}),
            name=name,
            randomness=randomness,
            clock_ms=clock_ms,
            ask_exit=self.exits.append,
        )
        self.admin = RecoveryAdmin(
            self.store, LAYOUT, by=name, ledgers=self._ledgers, randomness=randomness, clock_ms=clock_ms
        )
        self.last_audits = LastAuditsWatch(LastAudits(self.store), clock_ms=clock_ms)
        self.health, self.metrics, self.context = Health(), AuditorMetrics(), AuditorContext()
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(
                app=OpsApp(
                    self.health,
                    ProcessPage("auditor", self.metrics.render),
                    app=AuditorApp(self.context, access=access),
                )
            ),
            base_url="http://auditor",
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def _ledgers(self) -> MemoryLedgerClient:
        return self.client

    async def start(self) -> "AuditorUnderTest":
        await self.service.prepare()
        self.open()
        self.metrics.recovery = RecoveryMetrics(self.service, clock=asyncio.get_running_loop().time)
        self.metrics.last_audits = self.last_audits
        self._tasks = [asyncio.create_task(self.service.run()), asyncio.create_task(self.last_audits.run())]
        return self

    def open(self) -> None:
        """Answer requests without running recovery."""
        self.context.open(self.admin, self.service, self.last_audits, clock_ms=clock_ms)

    async def stop(self) -> None:
        """Stop recovery in order, then end the session."""
        if self._tasks:
            await self.service.stop()
            await self._end()
        await self.store.close()

    async def kill(self) -> None:
        """End the session first, as a crash would."""
        await self.store.close()
        await self._end()

    async def _end(self) -> None:
        await self.admin.close()
        assert self._tasks
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


class Cluster:
    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.store = self.tree.connect()
        self.ledgers = MemoryLedgers(bookies=NAMES)
        self.client = MemoryLedgerClient(self.ledgers)
        self._sessions: dict[BookieId, MemoryStore] = {}
        self.auditors: list[AuditorUnderTest] = []

    async def start(self) -> None:
        await initialize_cluster(self.store, LAYOUT, randomness=random.Random(1))
        cookies = CookieStore(self.store, LAYOUT)
        for bookie_id in NAMES:
            await cookies.write(bookie_id, b"4\n", version=None)
            await self.join(bookie_id)

    async def join(self, bookie_id: BookieId) -> None:
        session = self._sessions[bookie_id] = self.tree.connect()
        await session.create(LAYOUT.bookie(bookie_id, read_only=False), b"", ephemeral=True)
        self.ledgers.bookies[bookie_id] = True

    async def lose(self, bookie_id: BookieId) -> None:
        """Remove the registration of a bookie; its data stays on its disks."""
        await self._sessions.pop(bookie_id).close()
        del self.ledgers.bookies[bookie_id]

    def auditor(self, name: str = "auditor-0", *, access: Access | None = None, **settings: Any) -> AuditorUnderTest:
        made = AuditorUnderTest(self, name, access=access, settings=settings)
        self.auditors.append(made)
        return made

    async def write(self, payloads: Sequence[bytes]) -> LedgerId:
        writer = await self.client.create(password=b"pw")
        await writer.add_many(list(payloads))
        await writer.close()
        return writer.ledger_id

    async def members(self, ledger_id: LedgerId) -> set[BookieId]:
        return {b for segment in (await self.client.metadata(ledger_id)).segments for b in segment.ensemble}


@asynccontextmanager
async def running() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.start()
    try:
        yield cluster
    finally:
        for auditor in cluster.auditors:
            await auditor.stop()


async def until(condition: Callable[[], Any], *, limit_s: float = 600.0) -> None:
    """Wait until `condition` is true; it may be a coroutine function."""
    async with asyncio.timeout(limit_s):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.1)

"""A cluster for auditors: a metadata tree in memory, bookies that come and go, ledgers, and auditors that fail."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.errors import BinderyError, BookieUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.directory import BookieDirectory
from bindery_metadata.bookies.membership import MembershipStore
from bindery_metadata.coordination.election import AuditorElection
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import Mark, UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.parents import make_path
from bindery_recovery.auditor import Auditor, AuditorLimits
from bindery_recovery.settings import RecoverySettings
from scripted import ledger
from simulated import simulate

READ_TIMEOUT_S = 10.0
EPOCH_MS = 1_700_000_000_000
LAYOUT = LedgersLayout()


def clock_ms() -> int:
    return EPOCH_MS + int(asyncio.get_running_loop().time() * 1000)


LEDGERS = {
    1: ledger(("b1", "b2", "b3")),
    2: ledger(("b2", "b3", "b4")),
    3: ledger(("b2", "b3", "b4"), ("b1", "b3", "b4"), firsts=(0, 5), last=None),
    5_000_000_000: ledger(("b4", "b3", "b1")),
}
OF_B1 = {1: ("b1",), 3: ("b1",), 5_000_000_000: ("b1",)}
"""The expected marks when all ledgers of b1 are marked."""


class WorldClient:
    """A ledger client: metadata from the tree; replicas as the test sets them, otherwise all good."""

    def __init__(self, world: "World", store: MemoryStore) -> None:
        self.world = world
        self.manager = LedgerManager(store, LAYOUT, randomness=random.Random(1))

    def list_ledgers(self) -> AsyncIterator[LedgerId]:
        return self.manager.list()

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        return (await self.manager.read(ledger_id)).value

    async def entries_on(
        self, ledger_id: LedgerId, bookie_id: BookieId, *, durable: bool = False
    ) -> Sequence[tuple[int, int]]:
        if durable and bookie_id in self.world.stalled:
            raise await _silent(ledger_id, bookie_id)
        held = self.world.entries.get((ledger_id, bookie_id), [(0, (await self.metadata(ledger_id)).last_entry_id + 1)])
        if held is None:
            raise await _silent(ledger_id, bookie_id)
        if isinstance(held, Exception):
            raise held
        return held

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], Any],
    ) -> list[Any]:
        world = self.world
        world.checked.append((ledger_id, asyncio.get_running_loop().time()))
        await asyncio.sleep(0.01)
        verdict = world.replicas.get((ledger_id, bookie_id), Verdict.GOOD)
        if verdict == "hangs":
            await asyncio.Event().wait()
        if isinstance(verdict, Exception):
            raise verdict
        status = Status.OK
        if verdict == "limbo":
            verdict, status = Verdict.ERROR, Status.UNKNOWN_LEDGER_STATE
        assert isinstance(verdict, Verdict)
        return [take(ReplicaRead(ledger_id, e, bookie_id, int(status), b"x" * 100, verdict)) for e in entry_ids]


async def _silent(ledger_id: LedgerId, bookie_id: BookieId) -> BinderyError:
    await asyncio.sleep(READ_TIMEOUT_S)
    return BookieUnavailable("no answer in time", ledger_id=ledger_id, bookie_id=bookie_id)


class RunningAuditor:
    def __init__(self, world: "World", name: str, store: MemoryStore, auditor: Auditor) -> None:
        self.name = name
        self.store = store
        self.auditor = auditor
        self.election = AuditorElection(store, LAYOUT, name=name)
        self.task = asyncio.create_task(self.election.run(auditor.lead))
        self._world = world

    async def kill(self) -> None:
        """Cancel the auditor, then expire its session."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self._world.tree.expire(self.store)


class World:
    """`await World.make(...)`; bookies b1.. are registered and have cookies."""

    def __init__(self) -> None:
        self.tree = MemoryTree(now_ms=clock_ms)
        self.store = self.tree.connect()
        self.manager = LedgerManager(self.store, LAYOUT, randomness=random.Random(2))
        self.cookies = CookieStore(self.store, LAYOUT)
        self.memberships = MembershipStore(self.store, clock_ms=clock_ms)
        self.records = RecoveryRecords(self.store)
        self.marks = UnderreplicationManager(self.store, LAYOUT, randomness=random.Random(3), clock_ms=clock_ms)
        self.bookies: dict[str, MemoryStore] = {}
        self.replicas: dict[tuple[int, str], Verdict | str | BinderyError | Exception] = {}
        """Verdict, error, `hangs` or `limbo` for reads of a ledger from a bookie. Default: GOOD."""
        self.stalled: set[str] = set()
        """Bookies whose disks do not respond."""
        self.entries: dict[tuple[int, str], Sequence[tuple[int, int]] | Exception | None] = {}
        """Entries that a bookie lists for a ledger; None: no response. Default: all."""
        self.checked: list[tuple[int, float]] = []
        self.auditor: RunningAuditor
        """Set by `with_auditor`."""

    @classmethod
    async def make(cls, bookies: int = 4, ledgers: Mapping[int, LedgerMetadata] | None = None) -> "World":
        world = cls()
        await make_path(world.store, LAYOUT.available_readonly)
        await world.marks.prepare()
        for number in range(1, bookies + 1):
            await world.start_bookie(f"b{number}")
        for ledger_id, metadata in (ledgers or {}).items():
            await world.add_ledger(ledger_id, metadata)
        return world

    async def add_ledger(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        await self.manager.create_with_id(LedgerId(ledger_id), metadata)

    def lacks(self, ledger_id: int, name: str, listed: Sequence[tuple[int, int]] | Exception) -> None:
        """Let the bookie list only these ranges of entries, and answer every read with "no such entry"."""
        self.entries[ledger_id, name] = listed
        self.replicas[ledger_id, name] = Verdict.ABSENT

    async def start_bookie(self, name: str, *, read_only: bool = False, cookie: bool = True) -> None:
        bookie_id = BookieId(name)
        if cookie and await self.cookies.read(bookie_id) is None:
            await self.cookies.write(bookie_id, b"cookie", version=None)
        session = self.bookies[name] = self.tree.connect()
        await session.create(LAYOUT.bookie(bookie_id, read_only=read_only), ephemeral=True)

    async def stop_bookie(self, name: str) -> None:
        await self.bookies.pop(name).close()

    async def move_bookie(self, name: str, *, read_only: bool) -> None:
        """Move a registration as a bookie does: the new node first."""
        session = self.bookies[name]
        await session.create(LAYOUT.bookie(BookieId(name), read_only=read_only), ephemeral=True)
        await session.delete(LAYOUT.bookie(BookieId(name), read_only=not read_only), version=None)

    async def start_auditor(
        self,
        name: str = "auditor-1",
        *,
        delay_s: int = 120,
        settle_s: float = 15.0,
        limits: Mapping[str, Any] | None = None,
        racks: Callable[[], Mapping[BookieId, str]] | None = None,
        **settings: Any,
    ) -> RunningAuditor:
        store = self.tree.connect(latency_s=0.002)
        settings = {"ledger_check_interval_s": 0, "lost_bookie_delay_s": delay_s, **settings}
        auditor = Auditor(
            WorldClient(self, store),
            store,
            LAYOUT,  # type: ignore[arg-type]
            UnderreplicationManager(store, LAYOUT, randomness=random.Random(4), clock_ms=clock_ms),
            RecoveryRecords(store),
            MembershipStore(store, clock_ms=clock_ms),
            settings=RecoverySettings(**settings),
            clock_ms=clock_ms,
            randomness=random.Random(5),
            limits=AuditorLimits(settle_s=settle_s, **(limits or {})),
            racks=racks,
        )
        return RunningAuditor(self, name, store, auditor)

    async def marked(self) -> dict[int, tuple[str, ...]]:
        return {mark.ledger_id: mark.replicas async for mark in self.marks.list()}

    async def mark_list(self) -> list[Mark]:
        return [mark async for mark in self.marks.list()]

    async def wait_for_marks(self, count: int, *, timeout_s: float) -> float:
        """Wait until `count` ledgers are marked. Return the seconds that this took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while len(await self.marked()) < count:
            assert loop.time() - began < timeout_s, f"{await self.marked()} after {timeout_s} s"
            await asyncio.sleep(0.1)
        return loop.time() - began

    async def kinds(self) -> list[str]:
        """Return the kinds of events in the history, the oldest first."""
        return [event.kind for event in reversed(await self.records.history())]

    async def directory(self) -> BookieDirectory:
        directory = BookieDirectory(self.store, LAYOUT)
        await directory.start()
        return directory


def with_auditor(**settings: Any) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Turn a scenario into a test that runs it in a world with LEDGERS and one auditor, after the auditor's quiet
    time."""

    def decorate(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def test() -> None:
            async def run() -> None:
                world = await World.make(ledgers=LEDGERS)
                world.auditor = await world.start_auditor(**settings)
                await asyncio.sleep(60)
                assert await world.marked() == {}
                await scenario(world)
                assert not world.auditor.task.done()

            simulate(run())

        test.__name__ = scenario.__name__
        return test

    return decorate

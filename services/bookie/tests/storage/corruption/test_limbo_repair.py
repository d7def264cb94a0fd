"""Listing and repair over a real engine: entries are fetched, verified and retried until limbo ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance import limbo_listing
from bindery_bookie.maintenance.limbo_listing import LimboListing
from bindery_bookie.maintenance.repair import Repairer
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.corruption.limbo import write_marker
from bindery_client.ledger.replica import judge
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.errors import (
    BadRequest,
    BookieUnavailable,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchLedger,
)
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import ReadResponse, Status
from bindery_kit.process import cluster_wait
from bindery_metadata.stores.versioned import Versioned

US = BookieId("bookie-1")
OTHERS = [BookieId("bookie-0"), BookieId("bookie-2")]
CURRENT = "/ledgers/current"


class Peers(MemoryLedgerClient):
    """The other bookies. Each has all entries of its write sets, except for the faults that a test sets."""

    def __init__(self, ledgers: MemoryLedgers) -> None:
        super().__init__(ledgers)
        self.answers: dict[tuple[BookieId, int], int | bytes] = {}
        """(bookie, entry id) -> the status, or the wrong frame, of its response."""
        self.asked: list[tuple[BookieId, list[int]]] = []
        self.closed = 0

    def frame(self, ledger_id: int, entry_id: int) -> bytes:
        ledger = self.ledgers.find(LedgerId(ledger_id))
        digester = Digester(DigestType.CRC32C, ledger.metadata.password or b"")
        entry = ledger.entries[entry_id]
        return pack(
            digester,
            ledger_id=ledger_id,
            entry_id=entry_id,
            lac=entry_id - 1,
            length=entry.length,
            payload=entry.payload,
        )

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[Any], Any],
    ) -> list[Any]:
        await asyncio.sleep(0)
        assert bookie_id != US
        self.asked.append((bookie_id, list(entry_ids)))
        digester = Digester(DigestType.CRC32C, metadata.password or b"")
        taken = []
        for entry_id in entry_ids:
            answer = self.answers.get((bookie_id, entry_id), Status.OK)
            frame = answer if isinstance(answer, bytes) else self.frame(ledger_id, entry_id)
            status = Status.OK if isinstance(answer, bytes) else answer
            response = ReadResponse(0, status, ledger_id, entry_id, frame if status == Status.OK else None)
            taken.append(take(judge(digester, response, bookie_id=bookie_id, ledger_id=ledger_id, entry_id=entry_id)))
        return taken

    async def close(self) -> None:
        self.closed += 1
        await super().close()


class Manager:
    """Ledger metadata for the listing."""

    def __init__(self, ledgers: MemoryLedgers) -> None:
        self.ledgers = ledgers
        self.errors: dict[int, list[Exception]] = {}
        self.list_errors: list[Exception] = []
        """Errors. Each ends one listing before its third ledger."""
        self.is_fresh = False
        """True if a sync was requested since the last error: without a sync, a read may return an old state."""

    async def sync(self) -> None:
        self.is_fresh = True

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        assert self.is_fresh
        await asyncio.sleep(0)
        if self.errors.get(ledger_id):
            self.is_fresh = False
            raise self.errors[ledger_id].pop()
        return Versioned(self.ledgers.find(ledger_id).metadata, 0)

    async def list(self) -> AsyncIterator[LedgerId]:
        assert self.is_fresh
        for number, ledger_id in enumerate(
            (*sorted(self.ledgers.ledgers), LedgerId(999))
        ):  # the last one was deleted in the meantime
            if number == 2 and self.list_errors:
                self.is_fresh = False
                raise self.list_errors.pop()
            yield ledger_id


class Setting:
    """An engine whose storage was lost, and its cluster."""

    def __init__(self, world: Any, kit: Any) -> None:
        self.world = world
        self.kit = kit
        self.ledgers = MemoryLedgers(bookies=[OTHERS[0], US, OTHERS[1]])
        self.peers = Peers(self.ledgers)
        self.manager = Manager(self.ledgers)
        self.now_s = 0.0
        self.progress: list[int] = []
        self.connected = 0
        self.doubts: list[Exception] = []
        """Errors. Each is raised by one check of whether a ledger was deleted."""

    async def ledger(self, count: int, *, write_quorum: int = 3, is_closed: bool = True, ensemble: int = 3) -> int:
        writer = await self.peers.create(ensemble_size=ensemble, write_quorum=write_quorum, password=b"pw")
        for entry_id in range(count):
            await writer.add(b"payload %d" % entry_id * 20)
        if is_closed:
            await writer.close()
        return writer.ledger_id

    async def start(self) -> Any:
        write_marker(self.world.disk, CURRENT, "a test", 1)
        engine = await self.world.opened()
        listing = LimboListing([engine], self.manager, US, sync=self.manager.sync, progress=self.progress.append)
        await listing.run()
        return engine

    def repairer(self, engine: Any, **changes: Any) -> Repairer:
        async def connect() -> Peers:
            self.connected += 1
            return self.peers

        async def is_gone(ledger_id: int) -> bool:
            if self.doubts:
                raise self.doubts.pop()
            return ledger_id not in self.ledgers.ledgers

        values = {"connect": connect, "is_gone": is_gone, "rate": 1e9, "clock": lambda: self.now_s, **changes}
        return Repairer([engine], engine.damage, US, **values)

    async def run(self, repairer: Repairer, true: Callable[[], bool]) -> None:
        """Run the repair until a condition holds."""
        task = asyncio.create_task(repairer.run())
        try:
            async with asyncio.timeout(30):
                while not true():
                    await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def share(self, ledger_id: int) -> list[int]:
        """Return the entries that this bookie must have."""
        ledger = self.ledgers.find(LedgerId(ledger_id))
        metadata = ledger.metadata
        index = metadata.last_segment.ensemble.index(US)
        sizes = {"ensemble_size": metadata.ensemble_size, "write_quorum": metadata.write_quorum}
        return [e for e in range(len(ledger.entries)) if index in write_set(entry_id=e, **sizes)]

    async def check(self, engine: Any, ledger_id: int) -> None:
        share = self.share(ledger_id)
        answers = await self.kit.read(engine, *((ledger_id, e) for e in share))
        assert answers == [self.peers.frame(ledger_id, e) for e in share]
        runs = await engine.entry_ids(ledger_id)
        assert [e for first, count in runs for e in range(first, first + count)] == share


@pytest.fixture
def setting(world: Any, kit: Any) -> Setting:
    return Setting(world, kit)


async def test_all_entries_of_this_bookie_are_restored(setting: Setting) -> None:
    ids = [
        await setting.ledger(150),
        await setting.ledger(100, write_quorum=2),
        await setting.ledger(30, is_closed=False),
    ]
    await setting.ledger(0)
    engine = await setting.start()
    assert engine.limbo.left == 4
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: engine.limbo is None)
    for ledger_id in ids:
        await setting.check(engine, ledger_id)
        assert setting.ledgers.find(LedgerId(ledger_id)).is_closed  # the open one was recovered
    state = repairer.state
    assert (state.ledgers_done, state.ledgers_left, state.entries_failed) == (4, 0, 0)
    assert state.entries_copied == sum(len(setting.share(ledger_id)) for ledger_id in ids)
    assert state.bytes_copied == sum(len(setting.peers.frame(one, e)) for one in ids for e in setting.share(one))
    assert all(len(entry_ids) <= 64 for _, entry_ids in setting.peers.asked)
    assert setting.peers.closed == 1
    await engine.close()


async def test_entries_stored_by_replication_workers_are_not_counted_as_copied(setting: Setting) -> None:
    """Replication workers may restore some or all of the entries first."""
    some, everything = await setting.ledger(30), await setting.ledger(20)
    engine = await setting.start()
    for ledger_id, entry_ids in ((some, range(25)), (everything, range(20))):
        await engine.repair.store_recovered(ledger_id, [setting.peers.frame(ledger_id, e) for e in entry_ids])
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: engine.limbo is None)
    assert (repairer.state.entries_back, repairer.state.entries_copied) == (50, 5)
    await engine.close()


async def test_a_repair_continues_after_a_restart(setting: Setting) -> None:
    ledger_id = await setting.ledger(200)
    engine = await setting.start()
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: repairer.state.entries_copied >= 50)
    copied = repairer.state.entries_copied
    assert copied < 200
    await engine.close()
    engine = await setting.world.opened()
    assert not engine.limbo.is_listing
    again = setting.repairer(engine)
    await setting.run(again, lambda: engine.limbo is None)
    assert copied + again.state.entries_copied <= 200 + 64
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_entries_missing_or_damaged_on_one_bookie_are_fetched_from_the_next(setting: Setting) -> None:
    ledger_id = await setting.ledger(10)
    for entry_id, answer in enumerate((Status.NO_ENTRY, Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE, b"short")):
        setting.peers.answers[OTHERS[1], entry_id] = answer
    flipped = bytearray(setting.peers.frame(ledger_id, 4))
    flipped[-1] ^= 1
    setting.peers.answers[OTHERS[1], 4] = bytes(flipped)
    setting.peers.answers[OTHERS[1], 5] = setting.peers.frame(ledger_id, 6)
    engine = await setting.start()
    await setting.run(setting.repairer(engine), lambda: engine.limbo is None)
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_a_ledger_with_unavailable_entries_stays_in_limbo_and_is_retried(setting: Setting) -> None:
    bad, good = await setting.ledger(10), await setting.ledger(5)
    for other in OTHERS:
        setting.peers.answers[other, 7] = Status.NO_ENTRY
    engine = await setting.start()
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: bad in engine.limbo.problems and repairer.state.ledgers_done == 1)
    assert "bookie-2: absent; bookie-0: absent" in engine.limbo.problems[bad]
    assert list(await engine.repair.limbo_ledger_ids()) == [bad]
    assert await setting.kit.read(engine, (bad, 7), (bad, -1)) == [Status.UNKNOWN_LEDGER_STATE] * 2
    assert await setting.kit.read(engine, (bad, 6)) == [setting.peers.frame(bad, 6)]  # available entries are stored
    await setting.check(engine, good)
    setting.peers.asked.clear()
    turns = iter(range(300))
    await setting.run(repairer, lambda: next(turns) == 299)
    assert not setting.peers.asked  # not before the retry is due
    setting.peers.answers.clear()
    setting.now_s += 2
    await setting.run(repairer, lambda: engine.limbo is None)
    assert sum(len(entry_ids) for _, entry_ids in setting.peers.asked) == 1
    assert repairer.state.entries_back == repairer.state.entries_copied == 15
    await setting.check(engine, bad)
    await engine.close()


async def test_rounds_without_due_ledgers_do_not_read_the_index(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100,000 ledgers left, reading all their rows every second would use most of the bookie's time."""
    bad, good = await setting.ledger(10), await setting.ledger(5)
    for other in OTHERS:
        setting.peers.answers[other, 7] = Status.NO_ENTRY
    engine = await setting.start()
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: bad in engine.limbo.problems and repairer.state.ledgers_done == 1)
    looks: list[int] = []
    real = engine.parts.index.limbo_ids
    monkeypatch.setattr(engine.parts.index, "limbo_ids", lambda: looks.append(1) or real())
    flushes = engine.stats.flushes
    for _ in range(5):
        await repairer._round()
    assert (looks, engine.stats.flushes) == ([], flushes)
    assert (engine.limbo.left, repairer.state.ledgers_left) == (1, 1)
    setting.peers.answers.clear()
    setting.now_s += 2
    await setting.run(repairer, lambda: engine.limbo is None)
    assert looks  # it reads the index before it reports that nothing is left
    await setting.check(engine, good)
    await engine.close()


async def test_ledgers_that_left_limbo_are_never_listed(setting: Setting) -> None:
    ledger_ids = [await setting.ledger(3) for _ in range(6)]
    engine = await setting.start()
    looking = asyncio.create_task(engine.repair.limbo_ledger_ids(reread=True))
    await asyncio.sleep(0)
    engine.repair.leave_limbo(ledger_ids[0])
    await engine.delete_ledger(ledger_ids[3])
    assert list(await looking) == [*ledger_ids[1:3], *ledger_ids[4:]]
    engine.repair.leave_limbo(ledger_ids[5])
    await engine.delete_ledger(ledger_ids[1])
    assert list(await engine.repair.limbo_ledger_ids()) == [ledger_ids[2], ledger_ids[4]]
    assert list(await engine.repair.limbo_ledger_ids(reread=True)) == [ledger_ids[2], ledger_ids[4]]
    await engine.close()
    engine = await setting.world.opened()
    assert list(await engine.repair.limbo_ledger_ids()) == [ledger_ids[2], ledger_ids[4]]
    await engine.close()


async def test_a_ledger_that_cannot_be_recovered_stays_in_limbo(setting: Setting) -> None:
    ledger_id = await setting.ledger(10, is_closed=False)
    setting.ledgers.fail_next("open", BookieUnavailable("too few bookies answer"))
    engine = await setting.start()
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: ledger_id in engine.limbo.problems)
    assert not setting.peers.asked
    assert not setting.ledgers.find(LedgerId(ledger_id)).is_closed
    repairer.request()
    await setting.run(repairer, lambda: engine.limbo is None)
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_a_ledger_deleted_from_metadata_is_deleted_here(setting: Setting) -> None:
    ledger_id = await setting.ledger(10)
    engine = await setting.start()
    await setting.peers.delete(LedgerId(ledger_id))
    await setting.run(setting.repairer(engine), lambda: engine.limbo is None)
    assert not await engine.list_ledger_ids()
    await engine.close()


async def test_a_ledger_is_not_deleted_unless_its_deletion_is_certain(
    setting: Setting, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lagging metadata server, or one of another cluster, answers once that there is no such ledger."""
    ledger_id = await setting.ledger(20)
    engine = await setting.start()
    frames = [setting.peers.frame(ledger_id, e) for e in range(15)]
    await engine.repair.store_recovered(ledger_id, frames)  # not all entries were lost
    await engine.flush()
    real, wrong = setting.peers.metadata, [NoSuchLedger(ledger_id=ledger_id)] * 2

    async def metadata(asked: LedgerId) -> LedgerMetadata:
        if wrong:
            raise wrong.pop()
        return await real(asked)

    monkeypatch.setattr(setting.peers, "metadata", metadata)
    setting.doubts = [Conflict("this is not the cluster of the bookie's cookie")]
    repairer = setting.repairer(engine)
    for left, problem in ((1, "not the cluster"), (0, "was missing from the metadata and is there again")):
        repairer.request()
        await setting.run(repairer, lambda left=left: len(wrong) == left and bool(engine.limbo.problems))  # type: ignore[misc]
        assert problem in engine.limbo.problems[ledger_id]
        assert await kit.read(engine, *((ledger_id, e) for e in range(15))) == frames
    repairer.request()
    await setting.run(repairer, lambda: engine.limbo is None)
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_the_listing_includes_ledgers_of_this_bookie_and_ledgers_with_unreadable_metadata(
    setting: Setting, kit: Any
) -> None:
    ours = await setting.ledger(3, ensemble=2, write_quorum=2)
    other = await setting.ledger(3)
    unreadable = await setting.ledger(3)
    metadata = setting.ledgers.find(LedgerId(other)).metadata
    moved = tuple(BookieId("bookie-9") if bookie == US else bookie for bookie in metadata.last_segment.ensemble)
    segment = type(metadata.last_segment)(EntryId(0), moved)
    setting.ledgers.find(LedgerId(other)).metadata = metadata.with_changes(segments=(segment,))
    setting.manager.errors = {unreadable: [Corrupt("no metadata")], ours: [MetadataUnavailable("away")]}
    engine = await setting.start()
    assert list(await engine.repair.limbo_ledger_ids()) == [ours, unreadable]
    assert engine.limbo.listed == 4
    key = master_key(b"pw")
    with pytest.raises(Exception, match="another master key"):
        await engine.fence(ours, b"x" * 20)
    await engine.fence(ours, key)
    await engine.fence(unreadable, key)
    assert await kit.read(engine, (other, 0)) == [Status.UNKNOWN_LEDGER_STATE]  # not listed, but the shard is in limbo
    await engine.close()


async def test_limbo_of_a_bookie_without_ledgers_ends_at_once(setting: Setting) -> None:
    engine = await setting.start()
    assert engine.limbo is None
    assert "LIMBO" not in setting.world.disk.list_names(CURRENT)
    await engine.close()


async def test_a_listing_waits_for_unavailable_metadata_and_checks_no_ledger_twice(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the bookie stopped instead, it would replay its journal and begin the listing again."""
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.0)
    monkeypatch.setattr(limbo_listing, "READS_MAX", 2)
    ledger_ids = [await setting.ledger(1) for _ in range(7)]
    setting.manager.errors = {
        ledger_ids[3]: [MetadataUnavailable("away") for _ in range(20)],
        ledger_ids[6]: [MetadataOutcomeUnknown("the session ended")],
    }
    setting.manager.list_errors = [MetadataUnavailable("the list was cut short") for _ in range(3)]
    engine = await setting.start()
    assert list(await engine.repair.limbo_ledger_ids()) == ledger_ids
    assert setting.progress == [2, 4, 6, 8]
    assert engine.limbo.listed == 8
    await engine.close()


async def test_without_a_client_the_reason_is_reported_and_the_repair_retried(setting: Setting) -> None:
    ledger_id = await setting.ledger(5)
    engine = await setting.start()

    async def connect() -> Any:
        raise BadRequest("repair needs a token")

    repairer = setting.repairer(engine, connect=connect)
    await setting.run(repairer, lambda: bool(repairer.state.blocked))
    assert repairer.state.blocked == "repair needs a token"
    await setting.run(setting.repairer(engine), lambda: engine.limbo is None)
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_the_repair_of_a_read_only_bookie_waits(setting: Setting) -> None:
    ledger_id = await setting.ledger(5)
    engine = await setting.start()
    writable = False
    repairer = setting.repairer(engine, accepts=lambda: writable)
    await setting.run(repairer, lambda: bool(repairer.state.blocked))
    assert "read-only" in repairer.state.blocked
    assert not setting.peers.asked
    writable = True
    await setting.run(repairer, lambda: engine.limbo is None)
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_the_repair_is_rate_limited(setting: Setting) -> None:
    ledger_id = await setting.ledger(20)
    engine = await setting.start()
    size = sum(len(setting.peers.frame(ledger_id, e)) for e in range(20))
    loop = asyncio.get_running_loop()
    started = loop.time()
    repairer = setting.repairer(engine, rate=size / 0.3, clock=loop.time)
    await setting.run(repairer, lambda: engine.limbo is None)
    assert loop.time() - started >= 0.3
    await engine.close()


async def test_a_damaged_entry_is_fetched_and_the_index_refers_to_the_new_copy(setting: Setting, kit: Any) -> None:
    ledger_id = await setting.ledger(20)
    engine = await setting.start()
    await setting.run(setting.repairer(engine), lambda: engine.limbo is None)
    await engine.close()
    (path,) = [path for path in setting.world.disk.paths() if path.endswith("1.log")]
    setting.world.disk.corrupt(path, setting.world.disk.contents(path).index(setting.peers.frame(ledger_id, 9)) + 60)
    engine = await setting.world.opened()
    repairer = setting.repairer(engine)
    task = asyncio.create_task(repairer.run())
    await asyncio.sleep(0)
    assert await kit.read(engine, (ledger_id, 9)) == [Status.IO_ERROR]
    assert [damage.key for damage in engine.damage.items()] == [(ledger_id, 9)]
    async with asyncio.timeout(30):
        while len(engine.damage):
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert setting.peers.asked[-1][1] == [9]
    assert await kit.read(engine, (ledger_id, 9)) == [setting.peers.frame(ledger_id, 9)]
    await engine.close()
    engine = await setting.world.opened()
    await setting.check(engine, ledger_id)
    await engine.close()


async def test_damage_that_cannot_be_healed_stays_reported(setting: Setting, kit: Any) -> None:
    ledger_id = await setting.ledger(3)
    engine = await setting.start()
    await setting.run(setting.repairer(engine), lambda: engine.limbo is None)
    for other in OTHERS:
        setting.peers.answers[other, 1] = Status.IO_ERROR
    engine.damage.report(Damage("/ledgers/current/1.log", 5, "bad", ledger_id, 1))
    engine.damage.report(Damage("/ledgers/current/1.log", 5, "bad", 77, 1))  # of a ledger that was deleted
    engine.damage.report(Damage("/ledgers/current/index", 0, "bad block"))  # repaired by a restart
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: bool(repairer.state.problems) and len(engine.damage) == 2)
    assert "bookie answers IO_ERROR" in repairer.state.problems[ledger_id, 1]
    with pytest.raises(NoSuchLedger):
        await setting.peers.metadata(LedgerId(77))
    setting.peers.answers.clear()
    repairer.request()
    await setting.run(repairer, lambda: len(engine.damage) == 1)
    assert not repairer.state.problems
    await engine.close()


async def test_problems_of_a_ledger_deleted_by_garbage_collection_are_removed(setting: Setting) -> None:
    ledger_id, other = await setting.ledger(3), await setting.ledger(3)
    for bookie_id in OTHERS:
        setting.peers.answers[bookie_id, 1] = Status.IO_ERROR
    engine = await setting.start()
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: len(engine.limbo.problems) == 2)
    await engine.delete_ledger(ledger_id)
    repairer.request()
    await setting.run(repairer, lambda: list(engine.limbo.problems) == [other] and other in repairer._retries)
    await engine.delete_ledger(other)
    closed = setting.peers.closed
    task = asyncio.create_task(repairer.run())
    async with asyncio.timeout(30):
        while setting.peers.closed == closed:  # it has nothing to do and needs no connection
            await asyncio.sleep(0.01)
    assert engine.limbo is None
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.close()


async def test_damage_of_a_ledger_that_moved_away_is_removed_with_the_ledger(setting: Setting, kit: Any) -> None:
    """Its metadata still exists, because the ledger only moved away, so nothing else would remove its damage."""
    ledger_id = await setting.ledger(5)
    engine = await setting.start()
    repairer = setting.repairer(engine)
    await setting.run(repairer, lambda: engine.limbo is None)
    for other in OTHERS:
        setting.peers.answers[other, 2] = Status.IO_ERROR
    engine.damage.report(Damage("/ledgers/current/1.log", 1024, "entry digest mismatch", ledger_id, 2))
    await setting.run(repairer, lambda: bool(repairer.state.problems))
    await engine.delete_ledger(ledger_id, is_closed=True)
    assert not len(engine.damage)
    assert not repairer.state.problems
    setting.peers.answers.clear()
    engine.damage.report(Damage("/ledgers/current/1.log", 1024, "entry digest mismatch", ledger_id, 2))  # a late reader
    repairer.request()
    await setting.run(repairer, lambda: not len(engine.damage))
    assert not repairer.state.problems
    assert await kit.read(engine, (ledger_id, 2)) == [Status.NO_LEDGER]
    await engine.close()

"""The scrub verifies everything, reports only damage, changes nothing, and continues after a restart."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.scrub import scrub
from bindery_bookie.storage.scrub.scrub_state import Region, ScrubRecord, read_scrub_record
from bindery_bookie.storage.scrub.scrub_walk import (
    STEP_ENTRIES,
    STEP_SIZE,
    ScrubCursor,
    ScrubPhase,
    ScrubStep,
    ScrubWalk,
)
from bindery_core.wire.messages import Status
from bindery_simulation.disk import CrashableDisk

CURRENT = "/ledgers/current"
GOLDEN = Path(__file__).parents[2] / "golden"
FAST = 100 * 1024**3


def walk(disk: Any, kv: Any, directory: str = CURRENT) -> tuple[list[ScrubStep], list[Damage]]:
    """Run a complete round."""
    one = ScrubWalk(disk, directory, Index(kv))
    steps: list[ScrubStep] = []
    cursor: ScrubCursor | None = ScrubCursor()
    while cursor is not None:
        steps.append(one.step(cursor))
        assert steps[-1].cursor != cursor, "a round must end"
        cursor = steps[-1].cursor
    return steps, [damage for step in steps for damage, _ in step.damage]


async def stored(kit: Any, *, ledgers: Sequence[int] = (3, 5), count: int = 300, **settings: Any) -> Any:
    """Return a cleanly stopped bookie with `count` entries per ledger, over several flushes and logs."""
    world = kit.World(**settings)
    engine = await world.opened()
    for first in range(0, count, 100):
        for ledger_id in ledgers:
            await kit.fill(engine, ledger_id, min(100, count - first), first=first)
        await engine.flush()
    await engine.close()
    return world


def place(world: Any, ledger_id: int, entry_id: int) -> tuple[str, int, int]:
    """Return (path, offset, size) of an entry."""
    run = Index(world.kv).run_before(ledger_id, entry_id)
    assert run is not None
    found = run.find(entry_id)
    assert found is not None
    return f"{CURRENT}/{fmt.file_name(found[0] >> 32)}", found[0] & fmt.OFFSET_MASK, found[1]


def snapshot(world: Any) -> tuple[dict[str, bytes], list[tuple[bytes, bytes]]]:
    return (
        {path: world.disk.contents(path) for path in world.disk.paths()},
        list(world.kv.scan(start=b"", stop=b"\xff" * 40)),
    )


async def test_a_round_over_intact_storage_verifies_everything_and_changes_nothing(kit: Any) -> None:
    world = await stored(kit)
    before = snapshot(world)
    steps, damage = walk(world.disk, world.kv)
    assert damage == []
    assert sum(step.entries for step in steps) == 600
    assert sum(step.size for step in steps) >= 600 * 140
    assert all(step.entries <= STEP_ENTRIES and step.size <= 2 * STEP_SIZE for step in steps)
    assert snapshot(world) == before


@pytest.mark.parametrize("payload_size", [0, 100, 40_000])
async def test_every_damaged_entry_is_found_with_its_location(kit: Any, payload_size: int) -> None:
    world = kit.World()
    engine = await world.opened()
    await kit.fill(engine, 5, 30, size=payload_size)
    await engine.close()
    for entry_id in range(0, 30, 7):
        path, offset, size = place(world, 5, entry_id)
        for at in (offset - 8, offset - 4, offset, offset + 8, offset + size - 1):
            world.disk.corrupt(path, at, 0x10)
            _, (damage,) = walk(world.disk, world.kv)
            assert (damage.path, damage.offset, damage.ledger_id, damage.entry_id) == (path, offset, 5, entry_id)
            world.disk.corrupt(path, at, 0x10)
    assert walk(world.disk, world.kv)[1] == []


async def test_a_missing_log_is_reported_once(kit: Any) -> None:
    world = await stored(kit)
    path, _, _ = place(world, 3, 0)
    world.disk.remove(path)
    _, (damage,) = walk(world.disk, world.kv)
    assert (damage.path, damage.offset, damage.entry_id, damage.reason) == (path, 0, None, "entry log is missing")


async def test_a_truncated_log_loses_the_entries_after_its_end(kit: Any) -> None:
    world = await stored(kit, ledgers=(5,), count=100)
    path, offset, _ = place(world, 5, 90)
    world.disk.truncate(path, offset + 10)
    _, damage = walk(world.disk, world.kv)
    assert [one.entry_id for one in damage] == list(range(90, 100))
    assert {one.path for one in damage} == {path}


@pytest.mark.parametrize(("at", "reason"), [(9, "entry log header is damaged"), (-30, "entry digest mismatch")])
async def test_header_and_ledgers_map_are_verified(kit: Any, at: int, reason: str) -> None:
    world = await stored(kit)
    path, _, _ = place(world, 3, 0)
    size = len(world.disk.contents(path))
    world.disk.corrupt(path, at % size)
    _, (damage,) = walk(world.disk, world.kv)
    assert (damage.path, damage.reason, damage.ledger_id) == (path, reason, None)
    assert damage.offset == 0 if at > 0 else damage.offset > place(world, 3, 99)[1]


async def test_missing_index_rows_are_detected(kit: Any) -> None:
    world = await stored(kit, ledgers=(3, 5, 7), count=100)
    last = Index(world.kv).run_before(3, 99)
    assert last is not None
    world.kv.write_batch([], [index_format.run_key(3, last.first_entry_id), index_format.ledger_key(5)])
    _, damage = walk(world.disk, world.kv)
    assert [(one.reason, one.ledger_id, one.entry_id) for one in damage] == [
        ("entry is missing from the index", 3, 99),
        ("entries without a ledger row", 5, None),
    ]
    assert {one.path for one in damage} == {f"{CURRENT}/index"}


async def test_damaged_rows_are_detected_and_the_others_verified(kit: Any) -> None:
    world = await stored(kit, ledgers=(3, 5, 7), count=300)
    good = world.kv.get(index_format.run_key(5, 100))
    world.kv.write_batch(
        [
            (index_format.run_key(3, 100), b"short"),
            (index_format.ledger_key(4), b""),
            (index_format.run_key(5, 50), good),
            (index_format.RUN_KEY_START + b"odd", b""),
        ]
    )
    steps, damage = walk(world.disk, world.kv)
    told = [(one.reason, one.ledger_id, one.entry_id) for one in damage]
    assert ("ledger row is short", 4, None) in told
    assert ("index row is damaged", 3, 100) in told
    assert ("index row is damaged", None, None) in told
    assert ("index rows overlap", 5, 50) in told
    hidden = {(5, e) for e in range(300) if (run := Index(world.kv).run_before(5, e)) and run.first_entry_id == 50}
    assert {one[1:] for one in told if one[0] == "the record's ledger id or entry id differs from the index"} == hidden
    assert len(hidden) > 10
    assert sum(step.entries for step in steps) >= 700


@pytest.mark.parametrize("size", [100, 128], ids=["step ends in a run", "step ends with a run"])
@pytest.mark.parametrize("first", [0, 1, 150, 255, 256, 290])
async def test_overlapping_rows_are_detected_wherever_a_step_ends(kit: Any, first: int, size: int) -> None:
    world = kit.World(write_cache_size_max=2**20)
    engine = await world.opened()
    for start in range(0, 300, size):
        await kit.fill(engine, 5, min(size, 300 - start), first=start)
        await engine.flush()
    await engine.close()
    body = kit.entry(5, first, bytes([first % 251]) * 100, lac=first - 1)
    found = place(world, 5, first)
    outer = Index(world.kv).run_before(5, first)
    assert outer is not None
    if outer.first_entry_id == first:
        first += 1
        found, body = place(world, 5, first), kit.entry(5, first, bytes([first % 251]) * 100, lac=first - 1)
    row = index_format.pack_run(1 << 32 | found[1], [len(body)])
    world.kv.write_batch([(index_format.run_key(5, first), row)])
    _, damage = walk(world.disk, world.kv)
    assert ("index rows overlap", 5, first) in [(one.reason, one.ledger_id, one.entry_id) for one in damage]


async def test_a_round_ends_after_the_maximum_ids(kit: Any) -> None:
    top = 2**63 - 1
    world = kit.World()
    engine = await world.opened()
    for key in ((5, top), (5, top - 1), (top, 0), (top, top)):
        assert await kit.add(engine, kit.add_request(kit.entry(*key, b"x" * STEP_SIZE))) == [Status.OK]
    await engine.close()
    steps, damage = walk(world.disk, world.kv)
    assert (sum(step.entries for step in steps), damage) == (4, [])


async def test_entries_moved_or_deleted_during_a_round_are_not_damage(kit: Any) -> None:
    """Between steps entries are overwritten, ledgers deleted and logs filled; half of the steps see outdated rows."""
    for seed in range(12):
        lots = random.Random(seed)
        world = kit.World(seed, entry_log_size_max=64 * 1024)
        engine = await world.opened()
        for ledger_id in range(4):
            await kit.fill(engine, ledger_id, 400)
        await engine.flush()
        mark = partial(getattr, engine.parts.flusher, "mark")
        one = ScrubWalk(world.disk, CURRENT, engine.parts.index, durable_log_id=lambda mark=mark: mark().log_id)
        cursor: ScrubCursor | None = ScrubCursor()
        while cursor is not None:
            step = one.step(cursor)
            assert step.damage == [], seed
            cursor = step.cursor
            kind = lots.random()
            ledger_id = lots.randrange(5)
            if kind < 0.6:
                first = lots.randrange(400)
                bodies = [
                    kit.entry(ledger_id, e, lots.randbytes(50)) for e in range(first, first + lots.randint(1, 200))
                ]
                await kit.add(engine, *map(kit.add_request, bodies))
            elif kind < 0.8:
                await engine.delete_ledger(ledger_id)
            if lots.random() < 0.7:
                await engine.flush()
        await engine.close()


class Moving:
    """An index that returns outdated runs, as a long scan does."""

    def __init__(self, index: Index, old: dict[bytes, bytes]) -> None:
        self.index, self.old = index, old

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def rows(self, *, start: bytes, stop: bytes) -> Any:
        return ((key, value) for key, value in sorted(self.old.items()) if start <= key < stop)


async def test_outdated_rows_are_looked_up_again(kit: Any) -> None:
    world = await stored(kit, ledgers=(5,), count=200)
    index = Index(world.kv)
    old = dict(index.rows(start=b"", stop=b"\xff" * 20))
    body = kit.entry(5, 50, b"moved")
    disk = CrashableDisk()
    for path in world.disk.paths():
        disk.create(path).write_at(world.disk.contents(path), 0)
    file = disk.create(f"{CURRENT}/ff.log")
    file.write_at(fmt.pack_file_header(0xFF) + fmt.pack_record(body), 0)
    location = 0xFF << 32 | fmt.HEADER_SIZE + fmt.RECORD_HEADER_SIZE
    index.commit(runs=[], merges={5: [(50, location, len(body))]}, ledgers={}, deleted=(), generation=None)
    path, offset, _ = place(world, 5, 49)
    disk.corrupt(path, offset + 200)  # in the old location of entry 50
    one = ScrubWalk(disk, CURRENT, Moving(index, old))  # type: ignore[arg-type]
    step = one.step(ScrubCursor(ScrubPhase.ENTRIES))
    assert step.damage == []
    assert step.entries >= 128
    index.commit(runs=[], merges={}, ledgers={}, deleted=[5], generation=None)
    disk.remove(path)
    assert one.step(ScrubCursor(ScrubPhase.ENTRIES)).damage == []


# --- in a bookie


async def scrubbed(engine: StorageEngine, **how: Any) -> Any:
    """Request a round and wait for its end."""
    rounds = engine.scrubber.state().rounds
    engine.scrubber.request(**how)
    async with asyncio.timeout(30):
        while engine.scrubber.state().rounds == rounds:
            await asyncio.sleep(0.002)
    return engine.scrubber.state()


async def test_a_bookie_scrubs_on_request_and_saves_the_result(kit: Any) -> None:
    world = await stored(kit, scrub_rate=FAST)
    engine = await world.opened()
    before = engine.scrubber.state()
    assert (before.is_running, before.rounds, before.oldest_verified_ms, before.percent) == (False, 0, 0, 0)
    world.now_ms = 5000
    state = await scrubbed(engine)
    assert (state.rounds, state.entries, state.last_start_ms, state.last_end_ms) == (1, 600, 5000, 5000)
    assert (state.is_running, state.oldest_verified_ms, state.regions, state.error) == (False, 5000, 0, "")
    assert abs(state.next_ms - (5000 + 3 * 86400 * 1000)) < 1000
    await engine.close()
    again = await world.opened()
    assert replace(again.scrubber.state(), next_ms=0) == replace(state, next_ms=0)
    await again.close()


async def test_damage_is_reported_and_quarantined_until_it_is_healed(kit: Any) -> None:
    world = await stored(kit, scrub_rate=FAST)
    for entry_id in (40, 41, 42, 60):
        path, offset, size = place(world, 5, entry_id)
        world.disk.corrupt(path, offset + size - 1)
    engine = await world.opened()
    heard: list[Damage] = []
    engine.damage.on_report(heard.append)
    world.now_ms = 7000
    state = await scrubbed(engine)
    assert [(one.ledger_id, one.entry_id) for one in heard] == [(5, 40), (5, 41), (5, 42), (5, 60)]
    assert state.regions == 2
    first, second = engine.scrubber.regions()
    (path, start, _), (_, last, size) = place(world, 5, 40), place(world, 5, 42)
    assert first == Region(path, start, last + size - start, "entry digest mismatch", 5, 40, 3, 7000)
    assert (second.first_entry_id, second.entries) == (60, 1)
    await engine.close()
    engine = await world.opened()
    assert list(engine.scrubber.regions()) == [first, second]
    for entry_id in (40, 41, 42):
        body = kit.entry(5, entry_id, bytes([entry_id]) * 100, lac=entry_id - 1)
        assert await kit.add(engine, kit.add_request(body, recovery=True)) == [Status.OK]
    await engine.flush()
    await scrubbed(engine)
    assert [region.first_entry_id for region in engine.scrubber.regions()] == [60]
    assert await kit.read(engine, (5, 60)) == [Status.IO_ERROR]
    await engine.close()


async def test_a_region_stays_quarantined_until_it_is_healed(kit: Any) -> None:
    world = await stored(kit, scrub_rate=FAST)
    for entry_id in (40, 41, 42, 60):
        path, offset, size = place(world, 5, entry_id)
        world.disk.corrupt(path, offset + size - 1)
    path, offset, size = place(world, 3, 7)
    world.disk.corrupt(path, offset + size - 1)
    engine = await world.opened()
    await scrubbed(engine)

    def quarantined(one: StorageEngine) -> list[tuple[int | None, int | None, int]]:
        return [(region.ledger_id, region.first_entry_id, region.entries) for region in one.scrubber.regions()]

    everything = [(3, 7, 1), (5, 40, 3), (5, 60, 1)]
    assert quarantined(engine) == everything
    for entry_id in (40, 42, 42, 43, 39):
        engine.damage.healed(5, entry_id)
        assert quarantined(engine) == everything
    engine.damage.healed(5, 41)
    assert quarantined(engine) == [(3, 7, 1), (5, 60, 1)]
    engine.damage.ledger_deleted(3)
    assert quarantined(engine) == [(5, 60, 1)]
    assert engine.scrubber.state().regions == 1
    await engine.close()
    engine = await world.opened()
    assert quarantined(engine) == [(5, 60, 1)]
    engine.damage.healed(5, 60)  # without a round since the start
    await engine.close()
    engine = await world.opened()
    assert quarantined(engine) == []
    await engine.close()


async def test_a_healed_region_leaves_quarantine(kit: Any) -> None:
    world = await stored(kit, scrub_rate=FAST)
    lost, _, _ = place(world, 3, 0)
    engine = await world.opened()
    world.disk.remove(lost)
    await scrubbed(engine)
    assert [region.path for region in engine.scrubber.regions()] == [lost]
    engine.damage.healed_region(lost, 1)
    engine.damage.healed_region(lost + "x", 0)
    assert len(engine.scrubber.regions()) == 1
    engine.damage.healed_region(lost, 0)
    assert list(engine.scrubber.regions()) == []
    await engine.close()


async def test_the_old_location_of_an_entry_stored_again_is_not_damage(kit: Any) -> None:
    """The entry is healed but not flushed yet: reads get it from a write cache."""
    world = await stored(kit, scrub_rate=FAST)
    for entry_id in (40, 41, 60):
        path, offset, size = place(world, 5, entry_id)
        world.disk.corrupt(path, offset + size - 1)
    engine = await world.opened()
    heard: list[Damage] = []
    engine.damage.on_report(heard.append)
    body = kit.entry(5, 40, b"healed", lac=39)
    assert await kit.add(engine, kit.add_request(body, recovery=True)) == [Status.OK]
    engine.parts.caches.swap()  # as a flush does
    body = kit.entry(5, 41, b"healed", lac=40)
    assert await kit.add(engine, kit.add_request(body, recovery=True)) == [Status.OK]
    assert (await scrubbed(engine)).regions == 1
    assert [one.entry_id for one in heard] == [60]
    engine.parts.caches.flushing = None
    await engine.close()


async def test_an_entry_flushed_during_a_scrub_step_is_not_damage(kit: Any) -> None:
    """The entry leaves the write caches after the index has its new location, so the index must be checked last."""
    world = await stored(kit, ledgers=(5,), count=100)
    path, offset, size = place(world, 5, 40)
    world.disk.corrupt(path, offset + size - 1)
    index, body = Index(world.kv), kit.entry(5, 40, b"healed")
    file = world.disk.create(f"{CURRENT}/ff.log")
    file.write_at(fmt.pack_file_header(0xFF) + fmt.pack_record(body), 0)
    location = 0xFF << 32 | fmt.HEADER_SIZE + fmt.RECORD_HEADER_SIZE
    asked: list[tuple[int, int]] = []

    def is_cached(ledger_id: int, entry_id: int) -> bool:
        asked.append((ledger_id, entry_id))
        index.commit(runs=[], merges={5: [(40, location, len(body))]}, ledgers={}, deleted=(), generation=None)
        return False

    one = ScrubWalk(world.disk, CURRENT, index, is_cached=is_cached)
    assert one.step(ScrubCursor(ScrubPhase.ENTRIES)).damage == []
    assert asked == [(5, 40)]


async def test_a_round_continues_after_a_restart(kit: Any) -> None:
    world = await stored(kit, ledgers=range(6), count=300, scrub_rate=400_000)
    path, offset, _ = place(world, 0, 7)
    world.disk.corrupt(path, offset)
    engine = await world.opened()
    assert engine.scrubber.request()
    async with asyncio.timeout(30):
        while engine.scrubber.state().entries < 600:
            await asyncio.sleep(0.002)
    assert not engine.scrubber.request(), "a round is running"
    await engine.close()
    kept = read_scrub_record(world.disk, CURRENT)
    assert kept.start_ms
    assert kept.cursor.phase is ScrubPhase.ENTRIES
    assert 600 <= kept.entries < 1800
    engine = await world.opened()
    state = engine.scrubber.state()
    assert (state.is_running, state.phase, state.entries) == (True, "entries", kept.entries)
    assert 0 < state.percent < 100
    state = await scrubbed(engine, rate=FAST)
    assert (state.entries, state.regions) == (1800, 1), "each entry once, and the finding of the first part"
    await engine.close()


async def test_the_scrub_is_rate_limited(kit: Any) -> None:
    world = await stored(kit, ledgers=(5,), count=300, scrub_rate=200_000)
    engine = await world.opened()
    began = asyncio.get_running_loop().time()
    state = await scrubbed(engine)
    seconds = asyncio.get_running_loop().time() - began
    assert 300 * 140 <= state.size <= 60_000
    assert seconds >= state.size / 200_000
    await engine.close()


@pytest.mark.parametrize("delay_s", [600.0, 0.0])
async def test_the_first_round_is_delayed_after_a_start(
    kit: Any, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """With the delay no round begins; without it, a complete round runs in the same time."""
    assert scrub.START_DELAY_S == 600
    monkeypatch.setattr(scrub, "START_DELAY_S", delay_s)
    world = await stored(kit, scrub_rate=FAST)
    engine = await world.opened()
    assert abs(engine.scrubber.state().next_ms - (world.now_ms + delay_s * 1000)) < 5000
    reference = await kit.World(scrub_rate=FAST).opened()
    await scrubbed(reference)
    async with asyncio.timeout(30):
        while not delay_s and engine.scrubber.state().rounds == 0:
            await asyncio.sleep(0.002)
    state = engine.scrubber.state()
    assert (state.rounds, state.is_running) == ((0, False) if delay_s else (1, False))
    await reference.close()
    await engine.close()


async def test_a_scrub_continues_on_a_full_disk(kit: Any) -> None:
    control = DrillControl(sleep=lambda seconds: None)
    world = kit.World(wrap=control.wrap_disk, scrub_rate=FAST)
    engine = await world.opened()
    await kit.fill(engine, 5, 10)
    await engine.flush()
    control.set_rules(["create */scrub.new fail ENOSPC"])
    assert (await scrubbed(engine)).entries == 10
    control.clear()
    assert (await scrubbed(engine)).rounds == 2
    await engine.close()


# --- the file


RECORD = ScrubRecord(
    rounds=2,
    last_start_ms=1_000,
    last_end_ms=2_000,
    start_ms=3_000,
    cursor=ScrubCursor(ScrubPhase.ENTRIES, 5, 128),
    entries=384,
    size=40_000,
    total_size=1_000_000,
    regions=(
        Region("/ledgers/current/1.log", 4096, 300, "entry digest mismatch", 5, 17, 2, 3_500),
        Region("/ledgers/current/2.log", 0, 0, "entry log is missing", None, None, 0, 3_600),
    ),
)


def test_the_golden_scrub_state_is_read_and_written_byte_for_byte() -> None:
    stored = (GOLDEN / "scrub-v1").read_bytes()
    assert ScrubRecord.unpack(stored) == RECORD
    assert RECORD.pack() == stored


def test_every_flipped_byte_and_every_truncation_of_the_state_is_detected() -> None:
    packed = RECORD.pack()
    for at in range(len(packed)):
        for damaged in (packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :], packed[:at]):
            with pytest.raises(ValueError, match="scrub state"):
                ScrubRecord.unpack(damaged)


async def test_a_damaged_state_counts_as_missing(kit: Any) -> None:
    world = await stored(kit, scrub_rate=FAST)
    engine = await world.opened()
    await scrubbed(engine)
    await engine.close()
    world.disk.corrupt(f"{CURRENT}/scrub", 40)
    engine = await world.opened()
    assert engine.scrubber.state().rounds == 0
    assert (await scrubbed(engine)).rounds == 1
    await engine.close()


async def test_a_copied_directory_can_be_verified_without_a_bookie(kit: Any, tmp_path: Path) -> None:
    settings = kit.small_settings(journal_directory=f"{tmp_path}/j", ledger_directory=f"{tmp_path}/l")
    engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 1)
    await engine.open()
    await kit.fill(engine, 5, 300)
    await engine.close()
    (tmp_path / "l").rename(tmp_path / "copy")
    directory = f"{tmp_path}/copy/current"
    kv = LevelDbKV(f"{directory}/index")
    steps, damage = walk(RealDisk(), kv, directory)
    assert (sum(step.entries for step in steps), damage) == (300, [])
    path = tmp_path / "copy/current/1.log"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    _, (found,) = walk(RealDisk(), kv, directory)
    assert (found.path, found.ledger_id) == (str(path), 5)
    kv.close()


def test_an_empty_ledger_is_not_damage(world: Any) -> None:
    row = LedgerRow(b"k", True, -1, -1, None)
    world.kv.write_batch([(index_format.ledger_key(9), index_format.pack_ledger_row(row))])
    assert walk(world.disk, world.kv)[1] == []

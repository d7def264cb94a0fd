"""Replay: every record of the journal after the mark takes effect again, also on a full disk or in limbo."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.memory.ledgers import LedgerState
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.opening.replay import Replay
from bindery_bookie.storage.store import ReplayProgress
from bindery_core.errors import DamagedStorage
from flush_scene import FlushScene

START = JournalPosition(2, 512, 7)
"""The mark of a FlushScene: the first group of journal 2."""
OVERHEAD = 160
"""Bytes that a write cache counts per entry in addition to its body."""


class ReplayScene:
    """The files of a crashed shard, whose journal a test writes group by group."""

    def __init__(self, kit: Any, *, cache_size: int = 2**20) -> None:
        self.kit = kit
        self.shard = FlushScene(kit)
        self.disk, self.ledgers, self.stats = self.shard.disk, self.shard.ledgers, self.shard.stats
        self.caches = WriteCaches(cache_size)
        self.journals: dict[int, bytearray] = {2: bytearray(journal_format.pack_file_header(2, file_size=0))}
        self.sequence = 7
        self.room = 0
        """Number of times that a reserve can be released."""
        self.asked_for_room = 0

    def group(self, *bodies: bytes, journal_id: int = 2) -> int:
        """Append a group; return its size."""
        records = b"".join(part for body in bodies for part in journal_format.record_parts(body))
        group = journal_format.pack_group(records, journal_id=journal_id, sequence=self.sequence)
        self.sequence += 1
        self.journals[journal_id] += group
        return len(group)

    def link(self, journal_id: int) -> None:
        """Continue the journal in another file."""
        last = max(self.journals)
        self.journals[last] += journal_format.pack_link(
            journal_id=last, sequence=self.sequence, next_journal_id=journal_id
        )
        self.sequence += 1
        self.journals[journal_id] = bytearray(journal_format.pack_file_header(journal_id, file_size=0))

    def entry(self, ledger_id: int, entry_id: int, *, lac: int = -1) -> bytes:
        body: bytes = self.kit.entry(ledger_id, entry_id, b"x" * 68, lac=lac)
        return body

    def key(self, ledger_id: int) -> bytes:
        return control.pack_master_key(ledger_id, self.kit.KEY)

    def indexed(self, ledger_id: int, *, key: bytes = b"indexed", last: int = 3) -> None:
        """Store the row of a ledger that was flushed before."""
        row = LedgerRow(key, False, 1, last, None)
        self.shard.index.commit(runs=[], merges={}, ledgers={ledger_id: row}, deleted=(), generation=3)

    def replay(self, *, is_lenient: bool = False) -> Replay:
        for journal_id, data in self.journals.items():
            self.disk.create(f"/j/{journal_id:x}.txn").write_at(bytes(data), 0)
        self.disk.log.clear()
        return Replay(
            disk=FaultyDisk(self.disk, lambda operation, path: self.shard.faults(operation, path)),
            journal_directory="/j",
            ledgers=self.ledgers,
            caches=self.caches,
            flusher=self.shard.flusher,
            worker=self.shard.worker,
            stats=self.stats,
            make_room=self._make_room,
            is_lenient=is_lenient,
        )

    def _make_room(self) -> bool:
        self.asked_for_room += 1
        self.room -= 1
        return self.room >= 0

    async def run(self, **how: Any) -> JournalPosition:
        return await self.replay(**how).run(None)

    def state(self, ledger_id: int) -> LedgerState:
        return self.ledgers.states[ledger_id]


@pytest.fixture
def scene(kit: Any) -> ReplayScene:
    return ReplayScene(kit)


def no_space(operation: str, path_end: str, *, times: int = 10**6) -> Callable[[str, str], OSError | None]:
    left = [times]

    def fault(found: str, path: str) -> OSError | None:
        if found != operation or not path.endswith(path_end) or not left[0]:
            return None
        left[0] -= 1
        return OSError(errno.ENOSPC, "No space left on device")

    return fault


# --- records ----------------------------------------------------------------------------------------------------------


async def test_entries_are_in_the_active_cache_again(scene: ReplayScene) -> None:
    bodies = [scene.entry(5, 0), scene.entry(5, 2, lac=1), scene.entry(6, 4, lac=3)]
    size = scene.group(scene.key(5), bodies[0])
    size += scene.group(bodies[1], scene.key(6), bodies[2])
    assert await scene.run() == JournalPosition(2, 512 + size, 9)
    assert scene.caches.active.ledgers == {5: {0: bodies[0], 2: bodies[1]}, 6: {4: bodies[2]}}
    assert scene.caches.active.size == 3 * (100 + OVERHEAD)
    assert [(state.last_entry_id, state.lac) for state in map(scene.state, (5, 6))] == [(2, 1), (4, 3)]
    assert scene.stats.replay_entries == 3
    assert scene.disk.log == []  # nothing is written unless a cache is full


async def test_an_empty_journal_ends_at_the_mark(scene: ReplayScene) -> None:
    progress: list[ReplayProgress] = []
    assert await scene.replay().run(progress.append) == START
    assert progress == []


async def test_the_progress_is_told_after_each_group(scene: ReplayScene) -> None:
    first = scene.group(scene.key(5), *(scene.entry(5, entry_id) for entry_id in range(8)))
    second = scene.group(scene.entry(5, 8))
    progress: list[ReplayProgress] = []
    await scene.replay().run(progress.append)
    total = 512 + first + second
    assert progress == [ReplayProgress(first, total, 8), ReplayProgress(first + second, total, 9)]


async def test_the_journal_continues_in_the_next_file(scene: ReplayScene) -> None:
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.link(3)
    size = scene.group(scene.entry(5, 1), journal_id=3)
    assert await scene.run() == JournalPosition(3, 512 + size, 10)
    assert sorted(scene.caches.active.ledgers[5]) == [0, 1]
    assert scene.stats.replay_entries == 2


async def test_lac_and_last_entry_never_decrease(scene: ReplayScene) -> None:
    scene.group(scene.key(5), scene.entry(5, 7, lac=6), scene.entry(5, 2, lac=1))
    await scene.run()
    assert (scene.state(5).last_entry_id, scene.state(5).lac) == (7, 6)
    assert sorted(scene.caches.active.ledgers[5]) == [2, 7]


async def test_a_new_ledger_has_the_key_of_its_record(scene: ReplayScene) -> None:
    scene.group(scene.key(5))
    await scene.run()
    state = scene.state(5)
    assert (state.master_key, state.has_new_key, state.is_fenced) == (scene.kit.KEY, True, False)
    assert scene.ledgers.changed == {5: state}


async def test_a_known_ledger_keeps_its_key_and_stores_it_again(scene: ReplayScene) -> None:
    """The flush that wrote the row may not have finished, and the end of its entry log was truncated."""
    scene.indexed(5)
    scene.group(scene.key(5))
    await scene.run()
    state = scene.state(5)
    assert (state.master_key, state.has_new_key) == (b"indexed", True)
    assert scene.ledgers.changed == {5: state}


async def test_a_ledger_that_lost_its_key_learns_it(scene: ReplayScene) -> None:
    scene.indexed(5, key=b"")
    scene.group(scene.key(5))
    await scene.run()
    assert (scene.state(5).master_key, scene.state(5).has_new_key) == (scene.kit.KEY, True)


async def test_entries_of_an_indexed_ledger_need_no_key_record(scene: ReplayScene) -> None:
    scene.indexed(5)
    scene.group(scene.entry(5, 4))
    await scene.run()
    state = scene.state(5)
    assert (state.last_entry_id, state.indexed_entry_id, state.has_new_key) == (4, 3, False)
    assert scene.ledgers.changed == {}


async def test_a_fence_is_restored(scene: ReplayScene) -> None:
    scene.indexed(5)
    scene.group(control.pack_fence(5))
    await scene.run()
    state = scene.state(5)
    assert (state.is_fenced, state.has_new_fence, state.has_new_key) == (True, True, False)
    assert scene.ledgers.changed == {5: state}
    assert scene.stats.replay_entries == 0


async def test_an_explicit_lac_is_restored(scene: ReplayScene) -> None:
    scene.indexed(5)
    packet = scene.kit.lac_packet(5, 3)
    scene.group(control.pack_explicit_lac(5, packet))
    await scene.run()
    state = scene.state(5)
    assert (state.explicit_lac, state.lac, state.has_new_lac) == (packet, 3, True)
    assert scene.ledgers.changed == {5: state}


async def test_records_of_unknown_ledgers_are_skipped(scene: ReplayScene) -> None:
    """The ledger was deleted, and a flush has removed its row."""
    packet = scene.kit.lac_packet(5, 3)
    scene.group(scene.entry(5, 0), control.pack_fence(5), control.pack_explicit_lac(5, packet))
    size = scene.group(scene.key(6), scene.entry(6, 0))
    assert await scene.run() == JournalPosition(2, 512 + 512 + size, 9)
    assert list(scene.ledgers.states) == [6]
    assert list(scene.caches.active.ledgers) == [6]
    assert scene.stats.replay_entries == 1


async def test_unknown_control_records_are_skipped(scene: ReplayScene) -> None:
    scene.group(scene.key(5), scene.entry(5, -5), scene.entry(5, -1), scene.entry(5, 0))
    await scene.run()
    assert list(scene.caches.active.ledgers[5]) == [0]


async def test_a_record_without_ids_is_refused(scene: ReplayScene) -> None:
    scene.group(scene.key(5))
    scene.group(control.pack_fence(5), bytes(15))
    with pytest.raises(DamagedStorage, match="journal record is short") as raised:
        await scene.run()
    assert raised.value.facts == {"offset": 1024, "size": 15}


async def test_a_damaged_journal_is_refused_with_advice(scene: ReplayScene) -> None:
    scene.group(scene.key(5))
    scene.group(scene.entry(5, 0))
    scene.journals[2][512 + 60] ^= 1
    with pytest.raises(DamagedStorage, match=r"^journal group is damaged; .*bindery bookie salvage") as raised:
        await scene.run()
    assert raised.value.facts == {"path": "/j/2.txn", "offset": 512, "next_group": 1024}


# --- limbo ------------------------------------------------------------------------------------------------------------


async def test_in_limbo_all_readable_groups_are_replayed(scene: ReplayScene) -> None:
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.group(scene.entry(5, 1))
    scene.group(scene.entry(5, 2))
    scene.journals[2][1024 + 60] ^= 1
    assert await scene.run(is_lenient=True) == JournalPosition(2, 512 + 3 * 512, 10)
    assert sorted(scene.caches.active.ledgers[5]) == [0, 2]
    state = scene.state(5)
    assert (state.master_key, state.is_fenced) == (scene.kit.KEY, False)


async def test_in_limbo_a_ledger_whose_key_was_lost_is_created_and_fenced(scene: ReplayScene) -> None:
    body = scene.entry(5, 1, lac=0)
    scene.group(body)
    await scene.run(is_lenient=True)
    state = scene.state(5)
    assert (state.master_key, state.is_fenced, state.has_new_fence) == (b"", True, True)
    assert (state.last_entry_id, state.lac) == (1, 0)
    assert scene.caches.active.ledgers == {5: {1: body}}


async def test_in_limbo_a_key_may_follow_the_first_entry(scene: ReplayScene) -> None:
    scene.group(scene.entry(5, 1))
    scene.group(scene.key(5))
    await scene.run(is_lenient=True)
    assert (scene.state(5).master_key, scene.state(5).is_fenced) == (scene.kit.KEY, True)


async def test_in_limbo_an_indexed_ledger_is_not_fenced_by_an_entry(scene: ReplayScene) -> None:
    scene.indexed(5)
    scene.group(scene.entry(5, 4))
    await scene.run(is_lenient=True)
    assert (scene.state(5).master_key, scene.state(5).is_fenced) == (b"indexed", False)


# --- flushes ----------------------------------------------------------------------------------------------------------


async def test_a_full_cache_is_flushed_after_its_group(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=2 * (100 + OVERHEAD))
    scene.group(scene.key(5), scene.entry(5, 0))
    size = scene.group(*(scene.entry(5, entry_id) for entry_id in (1, 2)))
    scene.group(scene.entry(5, 3))
    end = JournalPosition(2, 1024 + size + 512, 10)
    assert await scene.run() == end
    assert scene.shard.flusher.mark.journal == JournalPosition(2, 1024 + size, 9)
    assert scene.shard.flusher.mark.generation == 4
    assert sorted(scene.shard.located(5)) == [0, 1, 2]
    assert scene.shard.log(5)[32:].startswith(scene.shard.key_record(5))
    assert scene.caches.active.ledgers == {5: {3: scene.entry(5, 3)}}
    assert scene.caches.flushing is None
    assert (scene.stats.flushes, scene.stats.replay_entries) == (1, 4)
    assert scene.state(5).indexed_entry_id == 2


async def test_journals_before_a_flush_are_removed(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=100)
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.link(3)
    scene.group(scene.entry(5, 1), journal_id=3)
    await scene.run()
    assert [path for path in scene.disk.paths() if path.startswith("/j/")] == ["/j/3.txn"]
    assert sorted(scene.shard.located(5)) == [0, 1]


async def test_a_flush_of_nothing_advances_the_mark_only(scene: ReplayScene) -> None:
    replay = scene.replay()
    await replay.flush(JournalPosition(2, 2048, 9))
    mark = scene.shard.flusher.mark
    assert (mark.generation, mark.journal) == (3, JournalPosition(2, 2048, 9))
    assert scene.stats.flushes == 0


async def test_the_remaining_entries_can_be_flushed_after_the_replay(scene: ReplayScene) -> None:
    scene.group(scene.key(5), scene.entry(5, 0))
    replay = scene.replay()
    end = await replay.run(None)
    await replay.flush(end)
    assert scene.shard.flusher.mark.journal == end
    assert scene.shard.flusher.mark.generation == 4
    assert list(scene.shard.located(5)) == [0]
    assert (scene.caches.active.ledgers, scene.caches.flushing, replay.unfinished) == ({}, None, None)


async def test_a_flush_without_space_uses_the_reserve(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=100)
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.room = 2
    scene.shard.faults = no_space("write_at", ".log", times=2)
    told: list[str] = []
    scene.stats.no_space = told.append
    replay = scene.replay()
    end = await replay.run(None)
    assert (scene.asked_for_room, replay.unfinished) == (2, None)
    assert told == ["[Errno 28] No space left on device"] * 2
    assert scene.shard.flusher.mark.journal == end
    assert list(scene.shard.located(5)) == [0]


async def test_without_a_reserve_the_entries_stay_in_memory(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=100)
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.group(scene.entry(5, 1))
    scene.group(scene.entry(5, 2))
    scene.shard.faults = no_space("write_at", ".log")
    replay = scene.replay()
    assert await replay.run(None) == JournalPosition(2, 2048, 10)
    assert replay.unfinished is not None
    assert replay.unfinished.cache is scene.caches.flushing
    assert replay.unfinished.position == JournalPosition(2, 1024, 8)
    assert scene.caches.flushing.ledgers == {5: {0: scene.entry(5, 0)}}
    assert scene.caches.active.ledgers == {5: {1: scene.entry(5, 1), 2: scene.entry(5, 2)}}
    assert scene.shard.flusher.mark.journal == START
    assert scene.asked_for_room == 3  # once per attempt
    assert scene.stats.replay_entries == 3


async def test_an_unfinished_flush_and_the_entries_after_it_are_flushed_once_there_is_space(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=100)
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.group(scene.entry(5, 1))
    scene.group(scene.entry(5, 2))
    scene.shard.faults = no_space("write_at", ".log", times=2)
    replay = scene.replay()
    end = await replay.run(None)
    assert end == JournalPosition(2, 2048, 10)
    assert (replay.unfinished, scene.caches.flushing, scene.caches.active.ledgers) == (None, None, {})
    assert scene.shard.flusher.mark.journal == end
    assert scene.shard.flusher.mark.generation == 5  # two flushes
    assert sorted(scene.shard.located(5)) == [0, 1, 2]


async def test_a_stored_flush_is_not_stored_again_if_only_its_mark_found_no_space(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=100)
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.room = 1
    scene.shard.faults = no_space("create", "LastLogMark.new", times=1)
    await scene.run()
    assert scene.asked_for_room == 1
    assert scene.stats.flushes == 1
    assert scene.shard.flusher.mark.generation == 4
    assert scene.caches.flushing is None


async def test_a_broken_disk_ends_the_replay(kit: Any) -> None:
    scene = ReplayScene(kit, cache_size=100)
    scene.group(scene.key(5), scene.entry(5, 0))
    scene.room = 1
    scene.shard.faults = lambda operation, path: OSError(errno.EIO, "broken") if operation == "write_at" else None
    with pytest.raises(OSError, match="broken"):
        await scene.run()
    assert scene.asked_for_room == 0


async def test_without_a_release_function_there_is_no_reserve(scene: ReplayScene) -> None:
    scene.ledgers.create(5, b"k")
    scene.caches.active.put(5, 0, scene.entry(5, 0))
    scene.shard.faults = no_space("write_at", ".log")
    replay = Replay(
        disk=scene.disk,
        journal_directory="/j",
        ledgers=scene.ledgers,
        caches=scene.caches,
        flusher=scene.shard.flusher,
        worker=scene.shard.worker,
        stats=scene.stats,
    )
    await replay.flush(JournalPosition(2, 1024, 8))
    assert replay.unfinished is not None

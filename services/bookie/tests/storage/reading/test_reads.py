"""Reads: which cache or job answers, what jobs may leave in the cache, and when windows are read in advance."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboPhase, LimboState
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.io.worker import Done
from bindery_bookie.storage.memory.ledgers import LedgerState, LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.reading.cold_reads import ColdRead, ColdReader
from bindery_bookie.storage.reading.reads import Reads
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_core.wire.messages import Status

OVERHEAD = 160
"""Bytes that the read cache counts per entry in addition to its body."""
Key = tuple[int, int]


class HeldWorker:
    """A worker whose jobs run when a test says so."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], Any], Done]] = deque()

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self.jobs.append((job, done))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        callback(*args)

    def close(self) -> None:
        assert not self.jobs

    def run(self) -> None:
        """Run the oldest job, which must be the only one."""
        (held,) = self.jobs
        self.jobs.clear()
        job, done = held
        try:
            result, error = job(), None
        except Exception as raised:
            result, error = None, raised
        done(result, error)

    def run_all(self) -> int:
        count = 0
        while self.jobs:
            self.run()
            count += 1
        return count


class ScriptedReader:
    """A disk with the entries of `stored`. The next job also returns what a test puts into `extra`."""

    def __init__(self) -> None:
        self.stored: dict[Key, bytes | int] = {}
        self.extra = ColdRead()
        self.error: Exception | None = None
        self.reads: list[list[Key]] = []
        self.windows: list[list[Key]] = []
        self.listed: list[int] = []

    def read(self, keys: Sequence[Key]) -> ColdRead:
        self.reads.append(list(keys))
        return self._result([self.stored.get(key, Status.NO_ENTRY) for key in keys], keys)

    def read_ahead(self, starts: Sequence[Key]) -> ColdRead:
        self.windows.append(list(starts))
        return self._result([], [])

    def entry_ids(self, ledger_id: int) -> list[int]:
        self.listed.append(ledger_id)
        return sorted(entry_id for found, entry_id in self.stored if found == ledger_id)

    def _result(self, answers: list[bytes | int], keys: Iterable[Key]) -> ColdRead:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        result, self.extra = self.extra, ColdRead()
        result.answers = answers
        requested = {key: body for key, body in zip(keys, answers, strict=False) if isinstance(body, bytes)}
        result.ahead = [*requested.items(), *result.ahead]
        return result


class ReadScene:
    """The read path of a shard with scripted disk and worker."""

    def __init__(self, **settings: Any) -> None:
        self.index = Index(MemoryKV())
        self.ledgers = LedgerTable(self.index, ledgers_max=1000, tombstones_max=16)
        self.caches = WriteCaches(2**20)
        self.reader, self.worker = ScriptedReader(), HeldWorker()
        self.stats = StorageStats()
        self.damage = DamageRegister()
        self.limbo: LimboState | None = None
        self.reads = Reads(
            ledgers=self.ledgers,
            caches=self.caches,
            reader=cast(ColdReader, self.reader),
            worker=self.worker,
            settings=StorageSettings(**{"read_cache_size_max": 80_000, "read_ahead_size_max": 10_000, **settings}),
            stats=self.stats,
            damage=self.damage,
            limbo=lambda: self.limbo,
        )

    def state(self, ledger_id: int, *, last: int = -1, indexed: int | None = None, is_limbo: bool = False) -> None:
        """Put the state of a ledger into memory. All its entries are in the index unless `indexed` is given."""
        state = LedgerState(ledger_id, b"k")
        state.last_entry_id = last
        state.indexed_entry_id = last if indexed is None else indexed
        state.is_limbo = is_limbo
        self.ledgers.states[ledger_id] = state

    def enter_limbo(self, phase: LimboPhase) -> None:
        self.limbo = LimboState("lost", 1, phase)

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger that is in the index."""
        row = LedgerRow(b"k", False, -1, 9, None)
        self.index.commit(runs=[], merges={}, ledgers={ledger_id: row}, deleted=(), generation=1)
        assert self.ledgers.delete(ledger_id) is not None

    def begin(self, *keys: Key) -> list[list[bytes | int]]:
        """Begin one read; return the list that receives its answers."""
        answers: list[list[bytes | int]] = []
        self.reads.read_many(keys, lambda found: answers.append(list(found)))
        return answers

    def at_once(self, *keys: Key) -> list[bytes | int]:
        """Read what must not need the disk."""
        (answers,) = self.begin(*keys)
        return answers

    def read(self, *keys: Key) -> list[bytes | int]:
        """Read with one job."""
        answers = self.begin(*keys)
        assert answers == []
        self.worker.run()
        (found,) = answers
        return found

    def keep(self, *keys: Key, body: bytes = b"kept") -> None:
        """Put entries into the read cache."""
        self.reads.cache.put_many([(key, body) for key in keys])

    def cached(self, ledger_id: int) -> list[int]:
        return sorted(self.reads.cache.ledgers.get(ledger_id, ()))

    def note_windows(self, *windows: tuple[int, int, int]) -> None:
        """Let a job record (ledger id, start of the next window, entry that triggers it)."""
        self.reader.extra.next_windows = {(ledger_id, start): due_at for ledger_id, start, due_at in windows}
        self.reader.stored[999, 0] = b"other"
        self.read((999, 0))
        self.reads.cache.drop([(999, 0)])


@pytest.fixture
def scene() -> ReadScene:
    return ReadScene()


# --- answers from memory ----------------------------------------------------------------------------------------------


def test_the_active_cache_is_asked_first_and_the_read_cache_last(scene: ReadScene) -> None:
    for entry_id in (0, 1):
        scene.caches.active.put(5, entry_id, b"flushing")
    scene.caches.swap()
    scene.caches.active.put(5, 0, b"active")
    scene.keep((5, 0), (5, 1), (5, 2))
    scene.state(5, last=9)
    assert scene.at_once((5, 2), (5, 0), (5, 1), (5, 0)) == [b"kept", b"active", b"flushing", b"active"]
    stats = scene.stats
    assert (stats.reads_active_cache, stats.reads_flushing_cache, stats.reads_read_cache) == (2, 1, 1)
    assert (stats.reads_absent, stats.read_jobs, stats.read_queue_entries) == (0, 0, 0)
    assert not scene.worker.jobs


def test_an_empty_read_is_answered(scene: ReadScene) -> None:
    assert scene.at_once() == []


def test_an_empty_body_in_a_cache_is_an_answer(scene: ReadScene) -> None:
    scene.caches.active.put(5, 0, b"")
    scene.keep((5, 1), body=b"")
    assert scene.at_once((5, 0), (5, 1)) == [b"", b""]


def test_the_last_entry_is_read_with_a_negative_id(scene: ReadScene) -> None:
    scene.state(5, last=7, indexed=3)
    scene.caches.active.put(5, 7, b"last")
    scene.state(6, last=4)
    scene.keep((6, 4))
    assert scene.at_once((5, -1), (6, -1)) == [b"last", b"kept"]


def test_the_last_entry_of_a_ledger_in_memory_is_read_from_the_disk_by_its_id(scene: ReadScene) -> None:
    scene.state(5, last=7)
    scene.reader.stored[5, 7] = b"last"
    assert scene.read((5, -1)) == [b"last"]
    assert scene.reader.reads == [[(5, 7)]]


def test_the_last_entry_of_a_ledger_that_is_not_in_memory_is_found_by_the_job(scene: ReadScene) -> None:
    scene.reader.stored[5, -1] = b"last"
    assert scene.read((5, -1)) == [b"last"]


def test_entries_above_the_indexed_ones_do_not_exist(scene: ReadScene) -> None:
    scene.state(5, last=7, indexed=3)
    assert scene.at_once((5, 4), (5, 100)) == [Status.NO_ENTRY, Status.NO_ENTRY]
    assert scene.stats.reads_absent == 2
    scene.reader.stored[5, 3] = b"indexed"
    assert scene.read((5, 3)) == [b"indexed"]


def test_a_ledger_without_entries_has_no_last_entry(scene: ReadScene) -> None:
    scene.state(5)
    assert scene.at_once((5, -1), (5, 0)) == [Status.NO_ENTRY, Status.NO_ENTRY]
    assert scene.stats.reads_absent == 2


def test_a_deleted_ledger_is_not_looked_up(scene: ReadScene) -> None:
    scene.delete(5)
    assert scene.at_once((5, 0), (5, -1)) == [Status.NO_LEDGER, Status.NO_LEDGER]
    assert scene.stats.reads_absent == 2
    scene.state(5, last=3)  # created again and flushed
    assert scene.at_once((5, 2)) == [Status.NO_ENTRY]
    assert scene.stats.reads_absent == 3


def test_missing_entries_of_a_ledger_in_limbo_are_unknown(scene: ReadScene) -> None:
    scene.enter_limbo(LimboPhase.REPAIRING)
    scene.state(5, last=3, is_limbo=True)
    scene.state(6, last=3)
    scene.caches.active.put(5, 3, b"here")
    assert scene.at_once((5, 4), (5, -1), (6, 4), (5, 3)) == [
        Status.UNKNOWN_LEDGER_STATE,
        Status.UNKNOWN_LEDGER_STATE,
        Status.NO_ENTRY,
        b"here",
    ]
    assert scene.stats.reads_absent == 3


def test_before_the_ledgers_in_limbo_are_listed_every_missing_entry_is_unknown(scene: ReadScene) -> None:
    scene.enter_limbo(LimboPhase.LISTING)
    scene.state(6, last=3)
    scene.caches.active.put(6, 3, b"here")
    assert scene.at_once((6, 4), (6, -1), (7, -1), (6, 3)) == [
        Status.UNKNOWN_LEDGER_STATE,
        Status.UNKNOWN_LEDGER_STATE,
        Status.UNKNOWN_LEDGER_STATE,
        b"here",
    ]
    assert scene.stats.reads_absent == 3


# --- answers from the disk --------------------------------------------------------------------------------------------


def test_answers_are_in_the_order_of_the_request(scene: ReadScene) -> None:
    scene.state(5, last=9, indexed=8)
    scene.caches.active.put(5, 9, b"active")
    scene.reader.stored = {(5, 1): b"one", (5, 3): b"three"}
    assert scene.read((5, 3), (5, 9), (5, 2), (5, 10), (5, 1)) == [
        b"three",
        b"active",
        Status.NO_ENTRY,
        Status.NO_ENTRY,
        b"one",
    ]
    stats = scene.stats
    assert (stats.reads_active_cache, stats.reads_disk, stats.reads_absent) == (1, 2, 2)
    assert (stats.read_jobs, stats.reads_failed, stats.read_queue_entries) == (1, 0, 0)


def test_what_was_read_is_kept(scene: ReadScene) -> None:
    scene.reader.stored[5, 1] = b"12345"
    scene.read((5, 1))
    assert scene.stats.read_cache_size == OVERHEAD + 5
    assert scene.at_once((5, 1)) == [b"12345"]


def test_reads_that_arrive_during_a_job_form_the_next_one(scene: ReadScene) -> None:
    scene.reader.stored = {(5, entry_id): bytes([entry_id]) for entry_id in range(9)}
    first = scene.begin((5, 0))
    second, third = scene.begin((5, 1), (5, 2)), scene.begin((5, 3))
    assert scene.stats.read_queue_entries == 4
    assert len(scene.worker.jobs) == 1
    scene.worker.run()
    assert (first, second, third) == ([[b"\0"]], [], [])
    assert scene.stats.read_queue_entries == 3
    scene.worker.run()
    assert (second, third) == ([[b"\1", b"\2"]], [[b"\3"]])
    assert scene.reader.reads == [[(5, 0)], [(5, 1), (5, 2), (5, 3)]]
    assert (scene.stats.read_jobs, scene.stats.read_queue_entries, scene.stats.reads_disk) == (2, 0, 4)
    assert not scene.worker.jobs


def test_the_next_job_is_submitted_before_the_callbacks_of_the_finished_one(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): b"a", (5, 1): b"b"}
    waiting: list[int] = []
    scene.reads.read_many([(5, 0)], lambda found: waiting.append(len(scene.worker.jobs)))
    scene.begin((5, 1))
    scene.worker.run()
    assert waiting == [1]


def test_too_many_waiting_reads_are_refused() -> None:
    scene = ReadScene(read_queue_entries_max=3)
    scene.keep((6, 0))
    waiting = scene.begin((5, 0), (5, 1))
    assert scene.at_once((5, 2), (6, 0), (5, 3)) == [Status.TOO_MANY_REQUESTS, b"kept", Status.TOO_MANY_REQUESTS]
    assert scene.stats.read_queue_entries == 2
    fits = scene.begin((5, 4))
    assert fits == []
    assert scene.stats.read_queue_entries == 3
    scene.worker.run_all()
    assert (waiting, fits) == ([[Status.NO_ENTRY, Status.NO_ENTRY]], [[Status.NO_ENTRY]])
    assert scene.stats.read_queue_entries == 0


def test_the_reads_of_a_failed_job_are_answered_with_an_error(scene: ReadScene) -> None:
    scene.keep((5, 9))
    scene.reader.error = OSError(5, "broken")
    failed, kept = scene.begin((5, 0), (5, 9), (5, 1)), scene.begin((5, 2))
    scene.worker.run()
    assert failed == [[Status.IO_ERROR, b"kept", Status.IO_ERROR]]
    scene.reader.stored[5, 2] = b"good"
    scene.worker.run()
    assert kept == [[b"good"]]
    assert scene.stats.read_queue_entries == 0


def test_damage_is_reported_and_counted(scene: ReadScene) -> None:
    damage = [Damage("/d/1.log", 40, "entry digest mismatch", 5, 0), Damage("/d/1.log", 140, "short", 5, 1)]
    scene.reader.extra.damage = damage
    scene.reader.stored = {(5, 0): Status.IO_ERROR, (5, 1): Status.IO_ERROR, (5, 2): b"good"}
    assert scene.read((5, 0), (5, 1), (5, 2), (5, 3)) == [
        Status.IO_ERROR,
        Status.IO_ERROR,
        b"good",
        Status.NO_ENTRY,
    ]
    assert list(scene.damage.items()) == damage
    stats = scene.stats
    assert (stats.damage_found, stats.reads_failed, stats.reads_disk, stats.reads_absent) == (2, 2, 1, 1)


def test_reads_above_the_size_limit_of_a_job_are_not_counted_as_absent(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): Status.TOO_MANY_REQUESTS}
    assert scene.read((5, 0), (5, 1)) == [Status.TOO_MANY_REQUESTS, Status.NO_ENTRY]
    assert (scene.stats.reads_absent, scene.stats.reads_failed) == (1, 0)


def test_a_ledger_created_while_it_was_looked_up_exists(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): Status.NO_LEDGER, (6, 0): Status.NO_LEDGER}
    answers = scene.begin((5, 0), (6, 0))
    scene.state(5, last=3, indexed=-1)
    scene.worker.run()
    assert answers == [[Status.NO_ENTRY, Status.NO_LEDGER]]


@pytest.mark.parametrize(
    ("phase", "answers"),
    [
        (None, [Status.NO_ENTRY, Status.UNKNOWN_LEDGER_STATE, Status.NO_LEDGER, Status.NO_ENTRY]),
        (
            LimboPhase.REPAIRING,
            [Status.NO_ENTRY, Status.UNKNOWN_LEDGER_STATE, Status.UNKNOWN_LEDGER_STATE, Status.NO_ENTRY],
        ),
        (LimboPhase.LISTING, [Status.UNKNOWN_LEDGER_STATE] * 4),
    ],
)
def test_limbo_decides_about_entries_that_are_not_on_the_disk(
    scene: ReadScene, phase: LimboPhase | None, answers: list[int]
) -> None:
    scene.state(5, last=9)
    scene.state(6, last=9, is_limbo=True)
    scene.reader.stored = {(7, 0): Status.NO_LEDGER}
    if phase is not None:
        scene.enter_limbo(phase)
    assert scene.read((5, 0), (6, 0), (7, 0), (8, 0)) == answers


def test_a_failed_read_in_limbo_stays_an_error(scene: ReadScene) -> None:
    scene.enter_limbo(LimboPhase.LISTING)
    scene.reader.stored = {(5, 0): Status.IO_ERROR, (5, 1): b"good"}
    assert scene.read((5, 0), (5, 1)) == [Status.IO_ERROR, b"good"]


def test_a_failing_callback_does_not_prevent_the_others(scene: ReadScene) -> None:
    def broken(found: Sequence[bytes | int]) -> None:
        raise RuntimeError("a bug")

    scene.begin((9, 9))
    scene.reads.read_many([(5, 0)], broken)
    good = scene.begin((5, 1))
    assert scene.worker.run_all() == 2
    assert good == [[Status.NO_ENTRY]]


# --- waiting reads that a job answers ---------------------------------------------------------------------------------


def test_waiting_reads_are_answered_by_what_a_job_read_ahead(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): b"a", (5, 3): b"d"}
    scene.reader.extra.ahead = [((5, 1), b"b"), ((5, 2), b"c")]
    scene.begin((5, 0))
    complete, partly, none = scene.begin((5, 2), (5, 1)), scene.begin((5, 1), (5, 3), (5, 2)), scene.begin((5, 3))
    scene.worker.run()
    assert (complete, partly, none) == ([[b"c", b"b"]], [], [])
    assert (scene.stats.read_queue_entries, scene.stats.reads_read_cache) == (2, 4)
    scene.worker.run()
    assert (partly, none) == ([[b"b", b"d", b"c"]], [[b"d"]])
    assert scene.reader.reads == [[(5, 0)], [(5, 3), (5, 3)]]
    assert (scene.stats.read_queue_entries, scene.stats.reads_read_cache) == (0, 4)


def test_no_job_is_needed_if_all_waiting_reads_are_answered(scene: ReadScene) -> None:
    scene.reader.extra.ahead = [((5, 1), b"b")]
    scene.begin((5, 0))
    waiting = scene.begin((5, 1))
    scene.worker.run()
    assert waiting == [[b"b"]]
    assert not scene.worker.jobs
    assert scene.stats.read_jobs == 1


def test_entries_read_ahead_are_counted(scene: ReadScene) -> None:
    observed: list[float] = []
    scene.stats.observe_read_ahead = observed.append
    scene.reader.stored = {(5, 0): b"a"}
    scene.reader.extra.ahead = [((5, 1), b"b"), ((5, 2), b"c")]
    scene.read((5, 0), (5, 0))  # both answers are of one entry
    scene.read((5, 3))
    assert observed == [1, 0]
    assert scene.stats.read_ahead_entries == 1


# --- deleted and overwritten meanwhile --------------------------------------------------------------------------------


def test_a_ledger_deleted_during_a_job_leaves_nothing_in_the_cache(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): b"a", (6, 0): b"b"}
    scene.reader.extra.ahead = [((5, 1), b"c")]
    answers = scene.begin((5, 0), (6, 0))
    scene.reads.drop_ledger(5)
    scene.worker.run()
    assert answers == [[b"a", b"b"]]
    assert (scene.cached(5), scene.cached(6)) == ([], [0])


def test_a_ledger_deleted_while_its_read_waits_leaves_nothing_in_the_cache(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): b"a", (6, 0): b"b"}
    scene.begin((6, 0))
    scene.begin((5, 0))
    scene.reads.drop_ledger(5)
    scene.worker.run_all()
    assert (scene.cached(5), scene.cached(6)) == ([], [0])


def test_a_deletion_is_forgotten_when_a_job_without_the_ledger_begins(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): b"a"}
    scene.begin((6, 0))
    scene.begin((6, 1))
    scene.reads.drop_ledger(5)
    scene.worker.run()
    scene.begin((5, 0))  # the ledger was created again
    scene.worker.run_all()
    assert scene.cached(5) == [0]


def test_a_deletion_while_no_job_runs_concerns_the_cache_only(scene: ReadScene) -> None:
    scene.keep((5, 0), (5, 1), (6, 0))
    scene.reads.drop_ledger(5)
    assert (scene.cached(5), scene.cached(6)) == ([], [0])
    scene.reader.stored = {(5, 0): b"a"}
    scene.read((5, 0))
    assert scene.cached(5) == [0]


def test_an_entry_overwritten_during_a_job_is_not_kept(scene: ReadScene) -> None:
    scene.reader.stored = {(5, 0): b"old", (5, 1): b"b"}
    scene.begin((5, 0), (5, 1))
    scene.reads.drop([(5, 0)])
    scene.worker.run()
    assert scene.cached(5) == [1]
    scene.reader.stored[5, 0] = b"new"
    assert scene.read((5, 0)) == [b"new"]
    assert scene.cached(5) == [0, 1]


def test_an_entry_overwritten_while_no_job_runs_concerns_the_cache_only(scene: ReadScene) -> None:
    scene.keep((5, 0), (5, 1))
    scene.reads.drop([(5, 0)])
    assert scene.cached(5) == [1]
    scene.reader.stored = {(5, 0): b"new"}
    scene.read((5, 0))
    assert scene.cached(5) == [0, 1]


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry_id", "is_due"), [(9, False), (10, True), (19, True), (20, False)])
def test_a_cached_read_in_the_second_half_of_a_window_triggers_the_next_one(
    scene: ReadScene, entry_id: int, is_due: bool
) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, entry_id))
    scene.at_once((5, entry_id))
    assert scene.worker.run_all() == is_due
    assert scene.reader.windows == ([[(5, 20)]] if is_due else [])


def test_the_last_read_of_a_batch_triggers_the_window(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10), (5, 1))
    scene.at_once((5, 10), (5, 1))
    assert not scene.worker.jobs
    scene.at_once((5, 1), (5, 10))
    assert len(scene.worker.jobs) == 1


def test_a_read_that_no_read_cache_answers_triggers_no_window(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.caches.active.put(5, 10, b"active")
    scene.at_once((5, 10))
    assert not scene.worker.jobs


def test_a_window_is_triggered_once(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10), (5, 11))
    scene.at_once((5, 10))
    scene.at_once((5, 11))
    assert scene.worker.run_all() == 1
    scene.at_once((5, 11))
    assert not scene.worker.jobs


def test_each_reader_of_a_ledger_has_its_own_window(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10), (5, 220, 210), (6, 20, 10))
    scene.keep((5, 10), (5, 210), (6, 10))
    for key in ((5, 210), (6, 10), (5, 10)):
        scene.at_once(key)
        scene.worker.run()
    assert scene.reader.windows == [[(5, 220)], [(6, 20)], [(5, 20)]]


def test_a_window_that_was_read_for_another_reader_is_not_read_again(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10), (5, 20))
    scene.at_once((5, 10))
    assert not scene.worker.jobs
    scene.reads.drop([(5, 20)])
    scene.at_once((5, 10))
    assert not scene.worker.jobs


def test_a_window_is_kept_and_counted_and_names_its_successor(scene: ReadScene) -> None:
    observed: list[float] = []
    scene.note_windows((5, 20, 10))
    scene.stats.observe_read_ahead = observed.append
    scene.keep((5, 10))
    scene.at_once((5, 10))
    scene.reader.extra = ColdRead(ahead=[((5, 20), b"x"), ((5, 21), b"y")], next_windows={(5, 52): 36})
    scene.worker.run()
    assert scene.cached(5) == [10, 20, 21]
    assert (scene.stats.read_ahead_entries, observed, scene.stats.read_jobs) == (2, [2], 1)
    assert scene.stats.read_cache_size == 3 * OVERHEAD + 4 + 1 + 1
    scene.keep((5, 36))
    scene.at_once((5, 36))
    scene.worker.run()
    assert scene.reader.windows == [[(5, 20)], [(5, 52)]]


def test_waiting_reads_go_before_windows_and_windows_are_read_four_at_a_time(scene: ReadScene) -> None:
    scene.note_windows(*((ledger_id, 20, 10) for ledger_id in range(6)))
    for ledger_id in range(6):
        scene.keep((ledger_id, 10))
    scene.reader.stored = {(7, 0): b"cold", (7, 1): b"cold"}
    scene.begin((7, 0))
    for ledger_id in range(6):
        scene.at_once((ledger_id, 10))
    assert len(scene.worker.jobs) == 1
    waiting = scene.begin((7, 1))
    scene.worker.run()
    assert scene.reader.windows == []
    scene.worker.run()
    assert waiting == [[b"cold"]]
    scene.worker.run()
    assert scene.reader.windows == [[(ledger_id, 20) for ledger_id in range(4)]]
    scene.worker.run()
    assert scene.reader.windows[1:] == [[(4, 20), (5, 20)]]
    assert not scene.worker.jobs


def test_a_read_waits_for_a_running_window_and_is_answered_by_it(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10))
    scene.at_once((5, 10))
    waiting = scene.begin((5, 20))
    assert len(scene.worker.jobs) == 1
    scene.reader.extra.ahead = [((5, 20), b"x")]
    scene.worker.run()
    assert waiting == [[b"x"]]
    assert not scene.worker.jobs


def test_a_window_that_cannot_be_read_is_ignored(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10))
    scene.at_once((5, 10))
    scene.reader.error = OSError(5, "broken")
    waiting = scene.begin((5, 20))
    scene.reader.stored[5, 20] = b"x"
    assert scene.worker.run_all() == 2
    assert waiting == [[b"x"]]
    assert scene.stats.read_ahead_entries == 0


def test_entries_deleted_or_overwritten_while_their_window_is_read_are_not_kept(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10), (6, 20, 10))
    scene.keep((5, 10), (6, 10), (8, 0))
    scene.begin((8, 1))
    scene.reads.drop([(6, 22)])  # before the windows are read
    scene.at_once((5, 10))
    scene.at_once((6, 10))
    scene.worker.run()
    scene.reads.drop_ledger(5)
    scene.reads.drop([(6, 21)])
    scene.reader.extra.ahead = [((5, 20), b"x"), ((6, 20), b"x"), ((6, 21), b"x"), ((6, 22), b"x")]
    scene.worker.run()
    assert (scene.cached(5), scene.cached(6)) == ([], [10, 20, 22])


def test_a_deletion_before_a_window_is_read_does_not_concern_its_entries(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10))
    scene.begin((8, 1))
    scene.at_once((5, 10))
    scene.reads.drop_ledger(5)  # created again before the job
    scene.worker.run()
    scene.reader.extra.ahead = [((5, 20), b"x")]
    scene.worker.run()
    assert scene.cached(5) == [20]


def test_windows_of_deleted_ledgers_are_not_read(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10), (6, 20, 10), (7, 20, 10))
    scene.keep((5, 10), (6, 10), (7, 10))
    scene.begin((8, 1))
    scene.at_once((5, 10))
    scene.at_once((6, 10))
    scene.delete(5)
    scene.worker.run()
    scene.worker.run()
    assert scene.reader.windows == [[(6, 20)]]
    scene.begin((8, 2))
    scene.at_once((7, 10))
    scene.delete(7)
    assert scene.worker.run_all() == 1
    assert scene.reader.windows == [[(6, 20)]]


def test_a_deleted_ledger_has_no_next_windows(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10))
    scene.reads.drop_ledger(5)
    scene.keep((5, 10))
    scene.at_once((5, 10))
    assert not scene.worker.jobs


@pytest.mark.parametrize(("windows", "jobs"), [(7.9, 0), (8, 1)])
def test_windows_are_not_read_in_advance_into_a_small_cache(windows: float, jobs: int) -> None:
    scene = ReadScene(read_cache_size_max=int(10_000 * windows), read_ahead_size_max=10_000)
    scene.note_windows((5, 20, 10))
    scene.keep((5, 10))
    scene.at_once((5, 10))
    assert len(scene.worker.jobs) == jobs


def test_no_window_is_read_after_the_stop(scene: ReadScene) -> None:
    scene.note_windows((5, 20, 10), (6, 20, 10))
    scene.keep((5, 10), (6, 10))
    scene.begin((8, 1))
    scene.at_once((5, 10))
    scene.reads.stop_reading_ahead()
    scene.at_once((6, 10))
    assert scene.worker.run_all() == 1
    assert scene.reader.windows == []


def test_a_ledger_has_at_most_16_next_windows(scene: ReadScene) -> None:
    scene.note_windows(*((5, 100 * number + 20, 100 * number + 10) for number in range(17)))
    for number in (0, 1):
        scene.keep((5, 100 * number + 10))
        scene.at_once((5, 100 * number + 10))
        scene.worker.run_all()
    assert scene.reader.windows == [[(5, 120)]]  # the oldest was dropped


def test_next_windows_of_at_most_1024_ledgers_are_recorded(scene: ReadScene) -> None:
    scene.note_windows(*((ledger_id, 20, 10) for ledger_id in range(1024)))
    scene.note_windows((0, 220, 210), (2000, 20, 10))
    for ledger_id in (1, 2, 0, 2000):
        scene.keep((ledger_id, 10))
        scene.at_once((ledger_id, 10))
        scene.worker.run_all()
    assert scene.reader.windows == [[(2, 20)], [(0, 20)], [(2000, 20)]]  # the ledger without news was dropped


# --- entry ids --------------------------------------------------------------------------------------------------------


async def listed(scene: ReadScene, ledger_id: int) -> list[tuple[int, int]]:
    task = asyncio.ensure_future(scene.reads.entry_ids(ledger_id))
    await asyncio.sleep(0)
    scene.worker.run()
    return await task


async def test_entry_ids_are_those_of_the_write_caches_and_the_index(scene: ReadScene) -> None:
    scene.caches.active.put(5, 4, b"x")
    scene.caches.active.put(6, 5, b"x")
    scene.reader.stored = {(5, 0): b"x", (5, 1): b"x", (5, 9): b"x"}
    assert await listed(scene, 5) == [(0, 2), (4, 1), (9, 1)]
    scene.caches.swap()
    scene.caches.active.put(5, 2, b"x")
    scene.caches.active.put(5, 3, b"x")
    assert await listed(scene, 5) == [(0, 5), (9, 1)]
    assert await listed(scene, 6) == [(5, 1)]
    assert await listed(scene, 7) == []


async def test_the_entries_of_a_deleted_ledger_are_not_listed(scene: ReadScene) -> None:
    scene.delete(5)
    scene.reader.stored = {(5, 0): b"x"}
    assert await listed(scene, 5) == []
    scene.caches.active.put(5, 1, b"x")  # created again
    assert await listed(scene, 5) == [(1, 1)]
    assert scene.reader.listed == []

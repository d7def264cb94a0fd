"""Log replacement: the order of its steps, and what an error at any of them leaves to be finished."""

from collections.abc import Callable
from typing import Any

import pytest
from bindery_bookie.storage.collection.log_replacement import CollectionEnvironment, LogReplacement
from bindery_bookie.storage.collection.rewrite import Rewrite
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogIds, LogManifest, ManifestFile, read_manifest
from bindery_bookie.storage.stats import StorageStats
from bindery_core.errors import Conflict
from direct_worker import DirectWorker
from entry_log_source import HEADER, KEY_RECORD, PATH, TEMPORARY, LogSource, at

TARGET = "/d/9.log"
MANIFEST = "/d/entry-logs"
MIB = 1024 * 1024

WRITE_MANIFEST = [
    f"create {MANIFEST}.new",
    f"write {MANIFEST}.new",
    f"sync {MANIFEST}.new",
    f"rename {MANIFEST}.new {MANIFEST}",
    "sync_directory /d",
]
RENAME = [f"rename {TEMPORARY} {TARGET}", "sync_directory /d"]


class Shard:
    """Log 5, which replaced log 2, in a shard after three compactions, and its replacement by log 9."""

    def __init__(self, kit: Any) -> None:
        self.source = LogSource(kit)
        self.disk = self.source.disk
        self.index = self.source.index
        self.stats = StorageStats()
        self.flush_worker, self.worker = DirectWorker(), DirectWorker()
        self.reserves = 0
        """Number of reserves of a mebibyte left."""
        self.manifest = ManifestFile(
            self.source.faulty_disk, "/d", LogManifest(absent=((1, 4), (6, 8)), compacted={5: 2}, switches=3)
        )
        self.replacement = LogReplacement(
            CollectionEnvironment(
                disk=self.source.faulty_disk,
                directory="/d",
                index=self.index,
                closed_below=lambda: 9,
                log_end=lambda log_id: LogEnd(),
                open_ledgers=self._unused,
                flush_deletions=self._unused,
                roll=self._unused,
                forget_log=self._forget,
                make_room=self._make_room,
                damaged=lambda damage: None,
                flush_worker=self.flush_worker,
                worker=self.worker,
                clock=lambda: 0.0,
                wall_clock_ms=lambda: 0,
            ),
            self.manifest,
            LogIds(9),
            self.stats,
        )

    async def copied(self) -> Rewrite:
        """Return the complete copy of log 5, with two entries of ledger 3."""
        assert await self.replacement.new_log_id() == 9
        self.source.put_many(3, range(2))
        copy = self.source.rewrite([3])
        list(copy.steps())
        self.disk.log.clear()
        return copy

    def fail(self, operation: str, path: str, *, times: int = 2**30) -> None:
        """Let this operation fail the next `times` times."""
        left = [times]

        def fault(found: str, at: str) -> OSError | None:
            if (found, at) != (operation, path) or not left[0]:
                return None
            left[0] -= 1
            return OSError(5, f"{operation} failed", path)

        self.source.faults = fault

    def heal(self) -> None:
        self.source.faults = lambda operation, path: None

    def locations(self) -> list[int]:
        return [location for run in self.index.runs(3) for _, location, _ in run.entries()]

    def check_replaced(self) -> None:
        assert self.manifest.manifest == LogManifest(absent=((1, 8),), compacted={9: 2}, switches=4)
        assert read_manifest(self.disk, "/d") == self.manifest.manifest
        assert self.disk.paths() == [TARGET, MANIFEST]
        assert self.locations() == [at(HEADER + KEY_RECORD), at(HEADER + KEY_RECORD + 100)]
        assert self.index.switches() == 4
        assert not self.replacement.is_blocked

    def check_kept(self) -> None:
        """Check that log 5 is still used, and that the new log was given up."""
        assert self.manifest.manifest == LogManifest(absent=((1, 4), (6, 9)), compacted={5: 2}, switches=3)
        assert read_manifest(self.disk, "/d") == self.manifest.manifest
        assert self.disk.paths() == [PATH, MANIFEST]
        assert self.locations() == [at(HEADER, log_id=5), at(HEADER + 100, log_id=5)]
        assert self.index.switches() == 0
        assert not self.replacement.is_blocked

    async def _forget(self, log_id: int) -> None:
        self.disk.log.append(f"forget {log_id}")

    def _make_room(self) -> bool:
        if not self.reserves:
            return False
        self.reserves -= 1
        self.disk.taken -= MIB
        return True

    async def _unused(self) -> Any:
        raise AssertionError("not used by a replacement")


@pytest.fixture
def shard(kit: Any) -> Shard:
    return Shard(kit)


# --- ids of new logs --------------------------------------------------------------------------------------------------


async def test_a_new_log_is_listed_as_absent_until_it_is_used(shard: Shard) -> None:
    assert await shard.replacement.new_log_id() == 9
    assert read_manifest(shard.disk, "/d").absent == ((1, 4), (6, 9))
    assert shard.disk.log == WRITE_MANIFEST
    assert shard.flush_worker.jobs == 1
    assert await shard.replacement.new_log_id() == 9
    assert shard.disk.log == WRITE_MANIFEST, "an id that is listed already needs no write"
    assert shard.replacement.manifest is shard.manifest.manifest


async def test_an_id_that_could_not_be_listed_is_used_later(shard: Shard) -> None:
    shard.fail("rename", f"{MANIFEST}.new", times=1)
    with pytest.raises(OSError, match="rename failed"):
        await shard.replacement.new_log_id()
    assert await shard.replacement.new_log_id() == 9
    assert read_manifest(shard.disk, "/d").absent == ((1, 4), (6, 9))


async def test_the_next_log_has_the_next_id(shard: Shard) -> None:
    await shard.replacement.install(await shard.copied())
    assert await shard.replacement.new_log_id() == 10


# --- removal of dead logs ---------------------------------------------------------------------------------------------


async def test_logs_are_listed_as_absent_before_they_are_closed_and_removed(shard: Shard) -> None:
    for name in ("a", "b", "c"):
        shard.disk.create(f"/d/{name}.log")
    shard.disk.log.clear()
    await shard.replacement.remove_logs([10, 11])
    assert shard.disk.log == [*WRITE_MANIFEST, "forget 10", "remove /d/a.log", "forget 11", "remove /d/b.log"]
    assert shard.manifest.manifest.absent == ((1, 4), (6, 8), (10, 11))
    assert shard.disk.paths() == ["/d/c.log", MANIFEST]


async def test_no_log_is_removed_if_the_manifest_cannot_be_written(shard: Shard) -> None:
    shard.disk.create("/d/a.log")
    shard.fail("create", f"{MANIFEST}.new", times=1)
    with pytest.raises(OSError, match="create failed"):
        await shard.replacement.remove_logs([10])
    assert shard.disk.paths() == ["/d/a.log"]
    await shard.replacement.remove_logs([10])
    assert shard.disk.paths() == [MANIFEST]


async def test_a_file_that_cannot_be_removed_is_counted_and_removed_later(shard: Shard) -> None:
    shard.disk.create("/d/a.log")
    shard.fail("remove", "/d/a.log", times=2)
    await shard.replacement.remove_logs([10])
    assert shard.stats.log_removals_failed == 1
    assert not shard.replacement.is_blocked
    await shard.replacement.finish()
    assert shard.stats.log_removals_failed == 2
    assert "/d/a.log" in shard.disk.paths()
    await shard.replacement.finish()
    assert "/d/a.log" not in shard.disk.paths()
    shard.disk.log.clear()
    await shard.replacement.finish()
    assert shard.disk.log == []
    assert shard.stats.log_removals_failed == 2


async def test_a_file_that_was_removed_meanwhile_is_not_removed_again(shard: Shard) -> None:
    shard.disk.create("/d/a.log")
    shard.fail("remove", "/d/a.log", times=1)
    await shard.replacement.remove_logs([10])
    shard.disk.remove("/d/a.log")
    tried: list[str] = []

    def note(operation: str, path: str) -> None:
        tried.append(f"{operation} {path}")

    shard.source.faults = note
    await shard.replacement.finish()
    await shard.replacement.finish()
    assert tried == ["remove /d/a.log"]
    assert shard.stats.log_removals_failed == 1


async def test_the_id_of_a_file_that_cannot_be_removed_is_not_used_again(shard: Shard) -> None:
    copy = await shard.copied()
    shard.source.faults = (
        lambda operation, path: OSError(5, "no") if (operation, path) in [("sync_directory", "/d"), ("remove", TARGET)]
        else None
    )  # fmt: skip
    with pytest.raises(OSError, match="no"):
        await shard.replacement.install(copy)
    shard.heal()
    assert await shard.replacement.new_log_id() == 10
    assert shard.manifest.manifest.absent == ((1, 4), (6, 10))


# --- replacement ------------------------------------------------------------------------------------------------------


async def test_the_steps_of_a_replacement_are_in_order(shard: Shard) -> None:
    copy = await shard.copied()
    switch, switched = shard.index.switch, shard.disk.log
    jobs = shard.flush_worker.jobs

    def noted(*args: Any, **others: Any) -> None:
        switch(*args, **others)
        switched.append("switch")

    shard.index.switch = noted  # type: ignore[method-assign]
    await shard.replacement.install(copy)
    assert shard.disk.log == [
        *RENAME,
        *WRITE_MANIFEST,
        "switch",
        f"create {MANIFEST}.new",
        f"write {MANIFEST}.new",
        f"sync {MANIFEST}.new",
        f"rename {MANIFEST}.new {MANIFEST}",
        "sync_directory /d",
        "forget 5",
        f"remove {PATH}",
    ]
    shard.check_replaced()
    assert (shard.flush_worker.jobs - jobs, shard.worker.jobs) == (5, 0)
    await shard.replacement.finish()
    assert shard.disk.log[-1] == f"remove {PATH}"


async def test_between_the_manifest_and_the_switch_both_logs_are_listed(shard: Shard) -> None:
    copy = await shard.copied()
    found: list[LogManifest] = []

    def look(*args: Any, **others: Any) -> None:
        found.append(read_manifest(shard.disk, "/d"))
        raise OSError(5, "refused")

    shard.index.switch = look  # type: ignore[method-assign]
    with pytest.raises(OSError, match="refused"):
        await shard.replacement.install(copy)
    assert found == [LogManifest(absent=((1, 4), (6, 8)), compacted={5: 2, 9: 2}, switches=3)]


@pytest.mark.parametrize(
    ("operation", "path"), [("rename", TEMPORARY), ("sync_directory", "/d")], ids=["rename", "sync of the directory"]
)
async def test_after_a_failed_rename_the_new_log_is_removed(shard: Shard, operation: str, path: str) -> None:
    copy = await shard.copied()
    shard.fail(operation, path, times=1)
    with pytest.raises(OSError, match=f"{operation} failed"):
        await shard.replacement.install(copy)
    shard.check_kept()
    assert shard.stats.log_removals_failed == 0
    assert await shard.replacement.new_log_id() == 9, "no log used the id"


async def test_a_new_log_that_could_not_be_listed_is_listed_as_absent_and_removed(shard: Shard) -> None:
    copy = await shard.copied()
    shard.fail("create", f"{MANIFEST}.new", times=1)
    with pytest.raises(OSError, match="create failed"):
        await shard.replacement.install(copy)
    assert shard.disk.log == [*RENAME, *WRITE_MANIFEST, f"remove {TARGET}"]
    shard.check_kept()


async def test_if_the_new_log_cannot_be_given_up_either_it_is_later(shard: Shard) -> None:
    """The manifest on disk may list the log, so its file must stay until the manifest is written again."""
    copy = await shard.copied()
    shard.fail("create", f"{MANIFEST}.new")
    with pytest.raises(OSError, match="create failed"):
        await shard.replacement.install(copy)
    assert shard.replacement.is_blocked
    with pytest.raises(OSError, match="create failed"):
        await shard.replacement.finish()
    assert shard.replacement.is_blocked
    assert TARGET in shard.disk.paths()
    shard.heal()
    await shard.replacement.finish()
    shard.check_kept()


async def test_a_failed_switch_is_repeated(shard: Shard) -> None:
    copy = await shard.copied()
    switch: Callable[..., None] = shard.index.switch
    tried: list[int] = []

    def refuse(*args: Any, switches: int) -> None:
        tried.append(switches)
        if len(tried) == 1:
            raise OSError(5, "refused")
        switch(*args, switches=switches)
        if len(tried) == 2:
            raise OSError(5, "written, but the answer was lost")

    shard.index.switch = refuse  # type: ignore[method-assign]
    for reason in ("refused", "written"):
        with pytest.raises(OSError, match=reason):
            await (shard.replacement.finish() if tried else shard.replacement.install(copy))
        assert shard.replacement.is_blocked
        assert {PATH, TARGET} <= set(shard.disk.paths())
    await shard.replacement.finish()
    assert tried == [4, 4, 4]
    shard.check_replaced()


async def test_the_old_log_is_removed_only_once_the_manifest_lists_it_as_absent(shard: Shard) -> None:
    copy = await shard.copied()
    renames: list[str] = []

    def refuse_second(operation: str, path: str) -> OSError | None:
        if operation == "rename" and path == f"{MANIFEST}.new":
            renames.append(path)
            if len(renames) == 2:
                return OSError(5, "refused")
        return None

    shard.source.faults = refuse_second
    with pytest.raises(OSError, match="refused"):
        await shard.replacement.install(copy)
    assert shard.replacement.is_blocked
    assert PATH in shard.disk.paths()
    await shard.replacement.finish()
    shard.check_replaced()


async def test_an_old_log_that_cannot_be_removed_does_not_block(shard: Shard) -> None:
    copy = await shard.copied()
    shard.fail("remove", PATH, times=2)
    await shard.replacement.install(copy)
    assert not shard.replacement.is_blocked
    assert PATH in shard.disk.paths()
    await shard.replacement.finish()
    shard.check_replaced()


async def test_a_log_with_an_entry_that_was_not_copied_is_kept(shard: Shard) -> None:
    copy = await shard.copied()
    copy.ledgers[0] = (3, 0, 1)
    copy.moved = lambda offset, size: None  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        await shard.replacement.install(copy)
    assert shard.replacement.is_blocked
    assert {PATH, TARGET} <= set(shard.disk.paths())
    await shard.replacement.finish()
    shard.check_kept()


# --- space ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "reserves", "expected", "left"),
    [
        (1_600_000 + 100_000 + MIB, 3, True, 3),
        (1_600_000 + 100_000 + MIB - 1, 0, False, 0),
        (1_600_000 + 100_000 - 1, 3, True, 1),
        (0, 2, False, 0),
    ],
    ids=["enough", "a byte short", "with two reserves", "not enough with all reserves"],
)
async def test_a_copy_needs_its_size_and_a_sixteenth_and_a_mebibyte(
    shard: Shard, free: int, reserves: int, expected: bool, left: int
) -> None:
    shard.disk.taken = shard.disk.capacity - free
    shard.reserves = reserves
    assert await shard.replacement.has_room(1_600_000) is expected
    assert shard.reserves == left
    assert (shard.worker.jobs, shard.flush_worker.jobs) == (1, 0)

"""The record of the last scheduled backup, its metrics, and how it is read again after an outage."""

import asyncio

from bindery_core.errors import MetadataUnavailable
from bindery_kit.observability.metrics_page import Page
from bindery_metadata.recovery.last_backup import REASON_SIZE_MAX, LastBackup, LastBackupStore
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.last_backup_watch import READ_INTERVAL_S, LastBackupWatch
from simulated import simulate

NOW_MS = 1_000_000
BACKUP = LastBackup(ended_ms=NOW_MS - 20_000, name="a", size=300, nodes=7, ledgers=2, settled=True)


def samples(watch: LastBackupWatch) -> dict[str, float]:
    page = Page()
    watch.add_to(page)
    lines = [line for line in page.render().decode().splitlines() if line and not line.startswith("#")]
    return {
        name.removeprefix("bindery_last_backup_"): float(value) for name, value in (x.rsplit(" ", 1) for x in lines)
    }


def test_the_metrics_follow_the_record_also_after_an_outage() -> None:
    async def scenario() -> None:
        store = MemoryTree().connect()
        backups = LastBackupStore(store)
        watch = LastBackupWatch(backups, clock_ms=lambda: NOW_MS)
        assert samples(watch) == {}, "nothing is known before the first read"
        store.fail_next(MetadataUnavailable("outage"))
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(READ_INTERVAL_S / 2)
        assert samples(watch) == {}
        await asyncio.sleep(READ_INTERVAL_S)
        assert samples(watch) == {"recorded": 0, "failed": 0}
        await backups.failed(NOW_MS - 30_000, "no space")
        await asyncio.sleep(READ_INTERVAL_S)
        assert samples(watch) == {"recorded": 0, "failed": 1}
        await backups.succeeded(BACKUP)
        await asyncio.sleep(READ_INTERVAL_S)
        assert samples(watch) == {"recorded": 1, "failed": 0, "age_seconds": 20, "size_bytes": 300, "nodes": 7}
        await backups.failed(NOW_MS, "no space")
        await asyncio.sleep(READ_INTERVAL_S)
        assert samples(watch) == {"recorded": 1, "failed": 1, "age_seconds": 20, "size_bytes": 300, "nodes": 7}
        running.cancel()
        await asyncio.wait([running])

    simulate(scenario())


async def test_a_failure_keeps_the_backup_and_a_backup_keeps_the_failure() -> None:
    backups = LastBackupStore(MemoryTree().connect())
    assert await backups.get() is None
    await backups.succeeded(BACKUP)
    assert await backups.get() == BACKUP
    await backups.failed(NOW_MS, "x" * 5000)
    found = await backups.get()
    assert found is not None
    assert (found.name, found.has_failed, len(found.failure)) == ("a", True, REASON_SIZE_MAX)
    await backups.succeeded(LastBackup(ended_ms=NOW_MS + 1, name="b"))
    found = await backups.get()
    assert found is not None
    assert (found.name, found.has_failed, found.failed_ms) == ("b", False, NOW_MS)
    assert found.to_json(NOW_MS + 2001)["age_s"] == 2.0


async def test_an_unreadable_record_counts_as_missing_and_is_replaced() -> None:
    store = MemoryTree().connect()
    await store.create("/bindery/backup/last", b"not JSON", make_parents=True)
    backups = LastBackupStore(store)
    assert await backups.get() is None
    await backups.succeeded(BACKUP)
    assert await backups.get() == BACKUP

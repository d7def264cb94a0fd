"""Recovery inside a bookie: it runs only with the setting, and releases leadership when the bookie stops."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bindery_kit.configuration.settings import WrongSettings
from bindery_kit.process.runtime import EXIT_ERROR
from bindery_metadata.coordination.election import current_auditor
from bookie_world import LAYOUT, BookieWorld, running, until


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[BookieWorld]:
    world = BookieWorld(tmp_path, wall_clock_ms=now_ms, autorecovery_embedded=True)
    async with running(world):
        yield world


async def test_a_bookie_takes_part_in_the_election_under_its_id_and_releases_leadership(
    world: BookieWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKIE_RECOVERY_LOST_BOOKIE_DELAY_S", "77")
    await world.process.start()
    recovery = world.process.recovery
    assert recovery is not None
    await until(lambda: recovery.service is not None and recovery.service.is_leader)
    assert await current_auditor(world.observer, LAYOUT) == "b0"
    assert (await world.get("/api/v1/autorecovery/who_is_auditor")).text == "Auditor: b0"
    await until(lambda: recovery.service is not None and recovery.service.auditor.watch is not None)
    async with asyncio.timeout(30):
        while await world.observer.exists(LAYOUT.lost_bookie_delay) is None:
            await asyncio.sleep(0.01)
    assert (await world.observer.get(LAYOUT.lost_bookie_delay)).data == b"77"
    metrics = (await world.get("/metrics")).text
    assert "\nbindery_recovery_this_leads 1\n" in metrics
    assert "\nbookie_SERVER_STATUS 1\n" in metrics
    assert 'bindery_last_audit_recorded{level="deep"} 0\n' in metrics, "an overdue audit must be visible here, too"
    await world.process.stop()
    assert await current_auditor(world.observer, LAYOUT) is None
    assert world.shutdown.exit_code == 0


async def test_marks_in_an_unknown_format_end_the_bookie_with_the_reason(world: BookieWorld) -> None:
    await world.observer.create(LAYOUT.underreplication_layout, b'type: "OTHER"\nversion: 9\n', make_parents=True)
    await world.process.start()
    async with asyncio.timeout(30):
        await world.process.life.until_shutdown()
    assert world.shutdown.exit_code == EXIT_ERROR
    assert "recovery of the cluster cannot start" in world.shutdown.reason


async def test_a_wrong_setting_ends_the_start(world: BookieWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKIE_RECOVERY_WORKERS", "many")
    with pytest.raises(WrongSettings, match="workers"):
        await world.process.start()


def test_a_bookie_without_the_setting_imports_no_recovery() -> None:
    code = (
        "import sys, bindery_bookie.main, bindery_bookie.admin.app;"
        "heavy = ('bindery_recovery.service', 'bindery_recovery.admin.recovery_admin', 'bindery_client.client',"
        " 'bindery_metadata.bookies.membership');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

"""The metrics of the last audits, and how they are read again after an outage."""

import asyncio

from bindery_core.errors import MetadataUnavailable
from bindery_kit.observability.metrics_page import Page
from bindery_metadata.ledgers.verified_records import LEVELS
from bindery_metadata.recovery.last_audits import SEVERITIES, VERDICTS, LastAudit, LastAudits
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from simulated import simulate

NOW_MS = 1_000_000


def audit(**facts: object) -> LastAudit:
    given: dict[str, object] = {
        "level": LEVELS[0],
        "run_id": "run",
        "verdict": VERDICTS[0],
        "began_ms": NOW_MS - 30_000,
        "ended_ms": NOW_MS - 20_000,
        "oldest_verified_ms": NOW_MS - 90_500,
        "exit_code": 0,
        "copies_expected": 10,
        "copies_verified": 5,
        "bytes_read": 1000,
        "severities": {SEVERITIES[1]: 3},
    }
    return LastAudit(**(given | facts))  # type: ignore[arg-type]


def samples(watch: LastAuditsWatch) -> dict[str, float]:
    page = Page()
    watch.add_to(page)
    lines = [line for line in page.render().decode().splitlines() if line and not line.startswith("#")]
    return {name.removeprefix("bindery_last_audit_"): float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


async def test_the_metrics_of_each_level_are_those_of_its_last_audit() -> None:
    audits = LastAudits(MemoryTree().connect())
    watch = LastAuditsWatch(audits, clock_ms=lambda: NOW_MS)
    assert samples(watch) == {}, "nothing is known before the first read"
    await audits.put(audit())
    assert await watch.get() == [audit()]
    level = f'level="{LEVELS[0]}"'
    found = samples(watch)
    assert {name: value for name, value in found.items() if name.startswith("recorded")} == {
        f'recorded{{level="{other}"}}': float(other == LEVELS[0]) for other in LEVELS
    }
    del found[f"recorded{{{level}}}"]
    assert {name: value for name, value in found.items() if level in name} == {
        f"age_seconds{{{level}}}": 20.0,
        f"coverage_ratio{{{level}}}": 0.5,
        f"oldest_verification_seconds{{{level}}}": 90.5,
        **{f'verdict{{{level},verdict="{one}"}}': float(one == VERDICTS[0]) for one in VERDICTS},
        **{f'findings{{{level},severity="{one}"}}': 3.0 if one == SEVERITIES[1] else 0.0 for one in SEVERITIES},
    }


async def test_a_verification_after_this_clock_has_age_zero() -> None:
    audits = LastAudits(MemoryTree().connect())
    watch = LastAuditsWatch(audits, clock_ms=lambda: NOW_MS)
    await audits.put(audit(oldest_verified_ms=NOW_MS + 5000))
    await watch.get()
    assert samples(watch)[f'oldest_verification_seconds{{level="{LEVELS[0]}"}}'] == 0


def test_records_are_read_again_after_an_outage() -> None:
    async def scenario() -> None:
        store = MemoryTree().connect()
        audits = LastAudits(store)
        watch = LastAuditsWatch(audits, clock_ms=lambda: NOW_MS)
        await audits.put(audit())
        store.fail_next(MetadataUnavailable("outage"))
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(20)
        assert samples(watch) == {}
        await asyncio.sleep(20)
        assert samples(watch)[f'recorded{{level="{LEVELS[0]}"}}'] == 1
        running.cancel()
        await asyncio.wait([running])

    simulate(scenario())

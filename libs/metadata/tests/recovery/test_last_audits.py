"""Each audit level has one record. A later run replaces an earlier one, and an unreadable record counts as missing."""

import asyncio
import json
from dataclasses import replace

import pytest
from bindery_core.errors import Conflict
from bindery_metadata.recovery.last_audits import AHEAD_MS_MAX, LastAudit, LastAudits, findings_text
from bindery_metadata.stores.store import MetadataStore

DEEP = LastAudit(
    level="deep",
    run_id="20260301T020000Z-1f2e3d",
    verdict="CORRUPT",
    exit_code=2,
    began_ms=1_000,
    ended_ms=61_000,
    copies_expected=400,
    copies_verified=300,
    bytes_read=5_000,
    oldest_verified_ms=500,
    kinds={"DIGEST_MISMATCH": 2, "ORPHAN_DATA": 1},
    severities={"corrupt": 2, "warning": 1},
)
QUICK = replace(DEEP, level="quick", verdict="HEALTHY", exit_code=0, kinds={}, severities={})


@pytest.fixture
def audits(store: MetadataStore) -> LastAudits:
    return LastAudits(store)


async def test_each_level_has_its_own_record_and_the_deepest_comes_first(audits: LastAudits) -> None:
    assert await audits.all() == []
    await audits.put(QUICK)
    await audits.put(DEEP)
    assert await audits.all() == [DEEP, QUICK]
    later = replace(QUICK, run_id="r2", verdict="INCOMPLETE", exit_code=3)
    await audits.put(later)
    assert await audits.all() == [DEEP, later]


async def test_the_node_is_json_that_others_may_read(store: MetadataStore, audits: LastAudits) -> None:
    await audits.put(DEEP)
    assert json.loads((await store.get("/bindery/audit/last/deep")).data) == {
        "run_id": "20260301T020000Z-1f2e3d",
        "verdict": "CORRUPT",
        "exit_code": 2,
        "began_ms": 1_000,
        "ended_ms": 61_000,
        "copies_expected": 400,
        "copies_verified": 300,
        "bytes_read": 5_000,
        "oldest_verified_ms": 500,
        "kinds": {"DIGEST_MISMATCH": 2, "ORPHAN_DATA": 1},
        "severities": {"corrupt": 2, "warning": 1},
    }


async def test_of_two_concurrent_writes_one_is_stored_completely(audits: LastAudits, other: MetadataStore) -> None:
    runs = [replace(DEEP, run_id=f"r{n}") for n in range(8)]
    await asyncio.gather(*(audits.put(one) for one in runs[:4]), *(LastAudits(other).put(one) for one in runs[4:]))
    [standing] = await audits.all()
    assert standing in runs


async def test_a_run_that_ends_late_does_not_replace_a_newer_one(audits: LastAudits) -> None:
    newer = replace(DEEP, run_id="newer", began_ms=10_000, ended_ms=20_000)
    await audits.put(newer)
    late = replace(DEEP, run_id="late", verdict="HEALTHY", exit_code=0, began_ms=9_999, ended_ms=30_000)
    with pytest.raises(Conflict, match="run_id=newer"):
        await audits.put(late)
    await audits.put(replace(late, level="quick"))
    assert await audits.all() == [newer, replace(late, level="quick")]
    again = replace(newer, ended_ms=40_000)
    await audits.put(again)
    assert await audits.all() == [again, replace(late, level="quick")], "a run may replace its own record"


async def test_the_newest_of_concurrent_runs_is_kept(audits: LastAudits, other: MetadataStore) -> None:
    runs = [replace(DEEP, run_id=f"r{n}", began_ms=1_000 + n) for n in range(8)]
    await asyncio.gather(
        *(audits.put(one) for one in runs[4:]),
        *(LastAudits(other).put(one) for one in runs[:4]),
        return_exceptions=True,
    )
    assert await audits.all() == [runs[-1]]


async def test_a_record_of_a_clock_far_ahead_is_replaced(audits: LastAudits) -> None:
    await audits.put(replace(DEEP, run_id="of tomorrow", began_ms=DEEP.ended_ms + AHEAD_MS_MAX + 1))
    await audits.put(DEEP)
    assert await audits.all() == [DEEP]


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"{}", b'{"run_id": 7}', None], ids=["cut", "a list", "empty", "wrong type", "a new verdict"]
)
async def test_an_unreadable_node_counts_as_empty_and_is_overwritten(
    store: MetadataStore, audits: LastAudits, data: bytes | None
) -> None:
    if data is None:
        await audits.put(DEEP)
        node = await store.get("/bindery/audit/last/deep")
        data = node.data.replace(b"CORRUPT", b"PERFECT")
        await store.set("/bindery/audit/last/deep", data, version=node.stat.version)
    else:
        await store.create("/bindery/audit/last/deep", data, make_parents=True)
    assert await audits.all() == []
    await audits.put(DEEP)
    assert await audits.all() == [DEEP]


async def test_a_member_of_a_later_version_is_ignored(store: MetadataStore, audits: LastAudits) -> None:
    await audits.put(DEEP)
    node = await store.get("/bindery/audit/last/deep")
    await store.set("/bindery/audit/last/deep", b'{"added_later": 1, ' + node.data[1:], version=node.stat.version)
    assert await audits.all() == [DEEP]


def test_json_contains_coverage_and_age() -> None:
    facts = DEEP.to_json(now_ms=64_000)
    assert (facts["level"], facts["coverage"], facts["age_s"]) == ("deep", 0.75, 3.0)
    assert replace(DEEP, copies_expected=0, copies_verified=0).coverage == 1.0
    assert DEEP.age_s(0) == 0.0, "the age is 0 if the clock is behind"


def test_findings_are_listed_worst_first_without_empty_ones() -> None:
    assert findings_text({"warning": 3, "under_replicated": 2, "corrupt": 0}) == "2 under-replicated, 3 warning"
    assert findings_text({}) == "none"

"""Routes for journal, logs, index and garbage collection with BookKeeper's responses."""

import asyncio
import json
from pathlib import Path

import pytest
from bindery_bookie.storage.collection.collection_interface import CollectionKind
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark, write_mark

API = "/api/v1/bookie"
JSON = {"content-type": "application/json"}


async def test_each_journal_has_its_last_log_mark(sharded, engines) -> None:
    disk = RealDisk()
    for engine, journal_id in zip(engines, (12, 0x1F), strict=True):
        directory = f"{engine.settings.ledger_directory}/current"
        write_mark(disk, directory, LastLogMark(1, JournalPosition(journal_id, 512, 1), 1, 0))
    assert (await sharded.http.get(f"{API}/last_log_mark")).json() == {
        "LastLogMark: Journal Id - 12(c.txn)": "Pos - 512",
        "LastLogMark: Journal Id - 31(1f.txn)": "Pos - 512",
    }


async def test_two_journals_with_the_same_mark_are_both_listed(sharded, engines) -> None:
    for engine in engines:
        directory = f"{engine.settings.ledger_directory}/current"
        write_mark(RealDisk(), directory, LastLogMark(1, JournalPosition(3, 512, 1), 1, 0))
    assert len((await sharded.http.get(f"{API}/last_log_mark")).json()) == 2


async def test_files_are_listed_by_kind(sharded, engines) -> None:
    for at, engine in enumerate(engines):
        (Path(engine.settings.journal_directory) / "current" / f"{at + 1:x}.txn").touch()
        ledgers = Path(engine.settings.ledger_directory) / "current"
        (ledgers / f"{at + 1:x}.log").touch()
        (ledgers / "LastLogMark").touch()
        (ledgers / "index" / f"00000{at}.ldb").touch()
    everything = {
        "journal files": "1.txn\t2.txn\t",
        "entrylog files": "1.log\t2.log\t",
        "index files": "000000.ldb\t000001.ldb\t",
    }
    assert (await sharded.http.get(f"{API}/list_disk_file")).json() == everything
    assert (await sharded.http.get(f"{API}/list_disk_file?file_type=entrylog")).json() == {
        "entrylog files": "1.log\t2.log\t"
    }


async def test_expanding_the_storage_is_refused_with_the_cause(sharded) -> None:
    answer = await sharded.http.put(f"{API}/expand_storage")
    assert answer.status_code == 501
    assert "another bookie" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "minor", "major"),
    [
        (b"", True, True),
        (b"{}", True, True),
        (b'{"forceMajor": false}', True, False),
        (b'{"forceMinor": false, "forceMajor": true}', False, True),
        (b'{"forceMinor": null, "forceMajor": false}', True, False),
    ],
)
async def test_garbage_collection_is_requested_in_every_shard(sharded, gc, engines, body, minor, major) -> None:
    assert (await sharded.http.get(f"{API}/gc")).json() == {"is_in_force_gc": "false"}
    answer = await sharded.http.put(f"{API}/gc", content=body, headers=JSON if body else {})
    assert answer.json() == "Triggered GC on BookieServer: bookie-0"
    assert [one.asked for one in gc] == [[("force", minor, major)]] * 2
    assert (await sharded.http.get(f"{API}/gc")).json() == {"is_in_force_gc": "true"}
    for engine in engines:
        engine.stats.gc_runs += 1
    assert (await sharded.http.get(f"{API}/gc")).json() == {"is_in_force_gc": "false"}


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"forceMajr": False}, "forceMajr"),
        ({"forceMinor": True, "major": False}, "major"),
        ({"forceMajor": "false"}, "forceMajor"),
        ({"forceMajor": True, "forceMinor": 0}, "forceMinor"),
    ],
    ids=["misspelt", "one-of-two", "text", "number"],
)
async def test_a_wrong_member_forces_nothing_and_is_reported(sharded, gc, body, wrong) -> None:
    answer = await sharded.http.put(f"{API}/gc", json=body)
    assert answer.status_code == 400
    assert answer.json()["facts"] == {"member": wrong, "known": "forceMajor, forceMinor"}
    assert wrong in answer.json()["detail"]
    assert [one.asked for one in gc] == [[], []]


async def test_a_suspended_kind_is_forced_only_if_it_is_requested(sharded, gc) -> None:
    gc[0].major_suspended = True
    await sharded.http.put(f"{API}/gc")
    await sharded.http.put(f"{API}/gc", json={"forceMajor": True})
    assert gc[0].asked == [("force", True, False), ("force", True, True)]


async def test_a_run_in_progress_is_not_the_requested_run(sharded, gc, engines) -> None:
    gc[0].running = CollectionKind.MINOR
    await sharded.http.put(f"{API}/gc")
    for engine in engines:
        engine.stats.gc_runs += 1
    assert (await sharded.http.get(f"{API}/gc")).json() == {"is_in_force_gc": "true"}


async def test_gc_details_have_bookkeepers_nine_members(sharded, gc, engines) -> None:
    gc[1].running = CollectionKind.MAJOR
    engines[1].stats.compactions_major = 4
    details = (await sharded.http.get(f"{API}/gc_details")).json()
    assert len(details) == 2
    assert details[1] == {
        "forceCompacting": False,
        "majorCompacting": True,
        "minorCompacting": False,
        "lastMajorCompactionTime": 7,
        "lastMinorCompactionTime": 6,
        "lastEntryLocationCompactionTime": 0,
        "majorCompactionCounter": 4,
        "minorCompactionCounter": 0,
        "entryLocationCompactionCounter": 0,
    }


async def test_compaction_is_suspended_and_resumed(sharded) -> None:
    path = f"{API}/gc/suspend_compaction"
    answer = await sharded.http.put(path, json={"suspendMajor": True, "suspendMinor": True})
    assert answer.json() == "Suspend majorGC on BookieServer: bookie-0, Suspend minorGC on BookieServer: bookie-0"
    assert (await sharded.http.get(path)).json() == {"isMajorGcSuspended": "true", "isMinorGcSuspended": "true"}
    await sharded.http.put(f"{API}/gc/resume_compaction", json={"resumeMajor": True})
    assert (await sharded.http.get(path)).json() == {"isMajorGcSuspended": "false", "isMinorGcSuspended": "true"}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"suspendMajor": 1}', b"[]", b'{"resumeMajor": true}'])
async def test_a_suspension_without_members_is_a_bad_request(sharded, body) -> None:
    assert (await sharded.http.put(f"{API}/gc/suspend_compaction", content=body, headers=JSON)).status_code == 400


async def test_indexes_are_compacted_by_path_in_the_background(sharded, engines) -> None:
    paths = [f"{engine.settings.ledger_directory}/current/index" for engine in engines]
    path = f"{API}/entry_location_compact"
    assert (await sharded.http.get(path)).json() == dict.fromkeys(paths, False)
    answer = await sharded.http.put(path, json={"entryLocationRocksDBCompact": True, "entryLocations": paths[1]})
    assert answer.json() == f"Triggered entry Location RocksDB: {paths[1]} compact on bookie:bookie-0."
    async with asyncio.timeout(30):
        while [engine.compactions for engine in engines] != [0, 1]:
            await asyncio.sleep(0.001)
    details = (await sharded.http.get(f"{API}/gc_details")).json()
    assert [one["entryLocationCompactionCounter"] for one in details] == [0, 1]
    assert [one["lastEntryLocationCompactionTime"] for one in details] == [0, 99]
    engines[0].fails = True
    await sharded.http.put(path, json={"entryLocationRocksDBCompact": True})
    async with asyncio.timeout(30):
        while [engine.stats.index_compactions for engine in engines] != [0, 2]:
            await asyncio.sleep(0.001)
    assert (await sharded.http.put(path, json={"entryLocationRocksDBCompact": False})).status_code == 200
    assert [engine.compactions for engine in engines] == [1, 2]


async def test_one_compaction_of_an_index_runs_at_a_time_and_is_reported(sharded, engines) -> None:
    path = f"{API}/entry_location_compact"
    go_on = asyncio.Event()

    async def slow() -> None:
        engines[0].compactions += 1
        await go_on.wait()

    engines[0].compact_index = slow
    for _ in range(3):
        await sharded.http.put(path, json={"entryLocationRocksDBCompact": True})
        await asyncio.sleep(0.005)
    assert list((await sharded.http.get(path)).json().values()) == [True, False]
    go_on.set()
    async with asyncio.timeout(30):
        while list((await sharded.http.get(path)).json().values()) != [False, False]:
            await asyncio.sleep(0.001)
    assert engines[0].compactions == 1


@pytest.mark.parametrize("body", [b"", b"{", b'{"entryLocationRocksDBCompact": true, "entryLocations": "/elsewhere"}'])
async def test_a_wrong_index_path_is_a_bad_request(sharded, body) -> None:
    assert (await sharded.http.put(f"{API}/entry_location_compact", content=body, headers=JSON)).status_code == 400
    assert (await sharded.http.post(f"{API}/entry_location_compact", content=body, headers=JSON)).status_code == 405


async def test_errors_name_the_missing_parts_of_a_bookie(make_admin, engines) -> None:
    from bindery_bookie.admin.shard import EngineShard

    bare = EngineShard(engines[0], wall_clock_ms=lambda: 0, collector=lambda: None, scrubber=lambda: None)
    http = make_admin(shards=lambda: [bare]).http
    for path in ("gc", "gc_details", "gc/suspend_compaction", "gc/logs", "gc/state", "gc/explain?log=1", "scrub"):
        assert (await http.get(f"{API}/{path}")).status_code == 404, path
    assert json.loads((await http.get(f"{API}/damage")).text)["count"] == 0

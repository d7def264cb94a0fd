"""Routes for journal, logs, index and garbage collection with BookKeeper's responses, and routes of our own."""

import asyncio
import json
from pathlib import Path

import pytest
from bindery_bookie.maintenance.storage_watch import DirectoryState, DirectoryStatus
from bindery_bookie.storage.collection.collection_interface import CollectionKind
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboPhase, LimboState
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark, write_mark

API = "/api/v1/bookie"


# --- BookKeeper's ---------------------------------------------------------------------------------------------------


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
    answer = await sharded.http.put(f"{API}/gc", content=body)
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
    assert (await sharded.http.put(f"{API}/gc/suspend_compaction", content=body)).status_code == 400


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
    assert (await sharded.http.put(f"{API}/entry_location_compact", content=body)).status_code == 400
    assert (await sharded.http.post(f"{API}/entry_location_compact", content=body)).status_code == 405


# --- ours -----------------------------------------------------------------------------------------------------------


async def test_disks_are_listed_with_their_state_and_its_cause(make_admin) -> None:
    full = DirectoryState(
        path="/data/ledgers",
        holds=("ledgers",),
        status=DirectoryStatus.FULL,
        reason="98 % in use",
        total=100,
        free=2,
        usage=0.98,
        reserve_size=1,
        reserve_held=0,
        since_ms=5,
        last_check_ms=6,
    )
    made = make_admin(directories=lambda: [full])
    made.state.set_read_only("disk", "98 % in use")
    assert (await made.http.get(f"{API}/disks")).json() == {
        "directories": [
            {
                "path": "/data/ledgers",
                "holds": ["ledgers"],
                "status": "full",
                "reason": "98 % in use",
                "total": 100,
                "free": 2,
                "usage": 0.98,
                "reserveSize": 1,
                "reserveHeld": 0,
                "sinceMs": 5,
                "lastCheckMs": 6,
                "isWritable": False,
            }
        ],
        "readOnly": True,
        "reasons": {"disk": "98 % in use"},
    }


async def test_logs_are_listed_for_all_shards_or_for_one(sharded, gc) -> None:
    logs = (await sharded.http.get(f"{API}/gc/logs")).json()["logs"]
    assert [(one["shard"], one["logId"], one["file"], one["liveRatio"]) for one in logs] == [
        (0, 31, "1f.log", 0.25),
        (0, 32, "20.log", 1.0),
        (1, 31, "1f.log", 0.25),
        (1, 32, "20.log", 1.0),
    ]
    logs = (await sharded.http.get(f"{API}/gc/logs?shard=1&look=true")).json()["logs"]
    assert [(one["shard"], one["logId"]) for one in logs] == [(1, 31)]
    assert (await sharded.http.get(f"{API}/gc/logs?shard=2")).status_code == 400
    state = (await sharded.http.get(f"{API}/gc/state")).json()["shards"]
    assert [one["shard"] for one in state] == [0, 1]
    assert state[0]["majorDueInS"] == 9.0


@pytest.mark.parametrize("log", ["31", "0x1f", "1f.log"])
async def test_a_log_is_found_by_decimal_hex_and_file_name(sharded, gc, log) -> None:
    gc[0].infos = []
    answer = (await sharded.http.get(f"{API}/gc/explain", params={"log": log})).json()
    assert (answer["shard"], answer["logId"], answer["file"], answer["state"]) == (1, 31, "1f.log", "sealed")
    assert answer["sentences"] == ["a quarter of it is alive"]
    assert answer["nextKind"] == "major"
    assert answer["liveLedgerIds"] == [3, 4]


async def test_a_log_id_in_several_shards_is_ambiguous(sharded) -> None:
    """Each shard numbers its logs from one, so most ids exist several times."""
    answer = await sharded.http.get(f"{API}/gc/explain?log=1f.log")
    assert (answer.status_code, answer.json()["facts"]) == (400, {"log": "1f.log", "shards": "0,1"})
    for shard in (0, 1):
        answer = await sharded.http.get(f"{API}/gc/explain?log=1f.log&shard={shard}")
        assert (answer.status_code, answer.json()["shard"]) == (200, shard)


async def test_a_missing_log_is_an_error(sharded) -> None:
    answer = await sharded.http.get(f"{API}/gc/explain?log=99")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_such_log")
    for log in ("", "x", "zz.log"):
        assert (await sharded.http.get(f"{API}/gc/explain", params={"log": log})).status_code == 400


async def test_ledgers_are_listed_as_runs_of_ids(admin) -> None:
    assert (await admin.http.get(f"{API}/ledgers")).json() == {"ledgers": []}
    admin.store.ledgers.update(dict.fromkeys((0, 1, 2, 7, 9, 10)))
    assert (await admin.http.get(f"{API}/ledgers")).json() == {"ledgers": [[0, 2], [7, 7], [9, 10]]}


async def test_limbo_is_listed_by_shard_with_the_ledgers_left(sharded, engines) -> None:
    assert (await sharded.http.get(f"{API}/limbo")).json() == {
        "inLimbo": False,
        "shards": [{"shard": 0, "inLimbo": False}, {"shard": 1, "inLimbo": False}],
        "repair": None,
    }
    engines[1].limbo = LimboState("the disk is empty", 5, LimboPhase.REPAIRING, 3, 10, {7: "nobody has it"})
    answer = (await sharded.http.get(f"{API}/limbo")).json()
    assert answer["inLimbo"] is True
    assert answer["shards"][1] == {
        "shard": 1,
        "inLimbo": True,
        "reason": "the disk is empty",
        "phase": "repairing",
        "sinceMs": 5,
        "ledgersLeft": 3,
        "ledgersListed": 10,
        "problems": [{"ledgerId": 7, "reason": "nobody has it"}],
    }


async def test_limbo_includes_the_progress_of_the_repair(make_admin) -> None:
    from bindery_bookie.maintenance.repair import RepairState

    state = RepairState(is_running=True, entries_copied=5, problems={(7, 1): "no peer has it"})
    answer = (await make_admin(repair=lambda: state).http.get(f"{API}/limbo")).json()["repair"]
    assert (answer["isRunning"], answer["entriesCopied"]) == (True, 5)
    assert answer["problems"] == [{"ledgerId": 7, "entryId": 1, "reason": "no peer has it"}]
    assert state.problems, "the answer must not change what it shows"


async def test_damage_is_listed_up_to_a_limit(make_admin) -> None:
    register = DamageRegister()
    for at in range(5):
        register.report(Damage("/l/1.log", 64 * at, "digest differs", 7, at))
    register.healed(7, 0)
    http = make_admin(damage=register).http
    answer = (await http.get(f"{API}/damage?limit=2")).json()
    assert {name: answer[name] for name in ("count", "found", "healed", "notKept")} == {
        "count": 4,
        "found": 5,
        "healed": 1,
        "notKept": 0,
    }
    assert answer["damage"] == [
        {"path": "/l/1.log", "offset": 64 * at, "reason": "digest differs", "ledgerId": 7, "entryId": at}
        for at in (1, 2)
    ]
    assert (await http.get(f"{API}/damage?limit=100000000")).status_code == 400


async def test_a_scrub_is_listed_and_started(sharded, scrubs) -> None:
    shards = (await sharded.http.get(f"{API}/scrub")).json()["shards"]
    assert [(one["shard"], one["phase"], one["percent"]) for one in shards] == [
        (0, "entries", 12.5),
        (1, "entries", 12.5),
    ]
    assert shards[0]["quarantined"][0]["path"] == "/l/1f.log"
    assert (await sharded.http.put(f"{API}/scrub")).status_code == 200
    assert (await sharded.http.put(f"{API}/scrub", json={"shard": 1, "rate": 5000})).status_code == 200
    assert [one.asked for one in scrubs] == [[None], [None, 5000]]
    for body in ({"shard": 2}, {"shard": True}, {"rate": 0}, {"rate": "x"}, {"shards": 1}):
        assert (await sharded.http.put(f"{API}/scrub", json=body)).status_code == 400
    assert [one.asked for one in scrubs] == [[None], [None, 5000]], "an invalid request starts nothing"


async def test_fault_injection_is_served_only_if_it_is_enabled(make_admin) -> None:
    closed = make_admin().http
    for method in ("GET", "PUT", "DELETE"):
        answer = await closed.request(method, f"{API}/drill", json={"rules": []})
        assert (answer.status_code, answer.json()["code"]) == (404, "no_drills")
        assert "start the bookie with --storage-drills (BOOKIE_STORAGE_DRILLS)" in answer.json()["detail"]
    control = DrillControl(sleep=lambda seconds: None)
    http = make_admin(drills=control).http
    assert (await http.get(f"{API}/drill")).json() == {"drills": []}
    rule = "datasync *.txn delay 0.2"
    answer = (await http.put(f"{API}/drill", json={"rules": [rule]})).json()
    assert answer == {"drills": [{"rule": rule, "matched": 0, "acted": 0, "isSpent": False}]}
    for body in ({"rules": rule}, {"rules": [1]}, {"rules": ["datasync"]}, {}, {"rules": [], "rule": 1}):
        assert (await http.put(f"{API}/drill", json=body)).status_code == 400
    assert len(control.states()) == 1, "a wrong rule must change nothing"
    assert (await http.delete(f"{API}/drill")).json() == {"drills": []}
    assert not control.states()


async def test_errors_name_the_missing_parts_of_a_bookie(make_admin, engines) -> None:
    from bindery_bookie.admin.shard import EngineShard

    bare = EngineShard(engines[0], wall_clock_ms=lambda: 0, collector=lambda: None, scrubber=lambda: None)
    http = make_admin(shards=lambda: [bare]).http
    for path in ("gc", "gc_details", "gc/suspend_compaction", "gc/logs", "gc/state", "gc/explain?log=1", "scrub"):
        assert (await http.get(f"{API}/{path}")).status_code == 404, path
    assert json.loads((await http.get(f"{API}/damage")).text)["count"] == 0

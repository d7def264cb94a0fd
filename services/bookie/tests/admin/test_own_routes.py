"""Routes that BookKeeper does not have: disks, entry logs, limbo, damage, scrub, fault injection."""

import pytest
from bindery_bookie.admin.shard import EngineShard
from bindery_bookie.maintenance.repair import RepairState
from bindery_bookie.maintenance.storage_watch import DirectoryState, DirectoryStatus
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboPhase, LimboState
from bindery_bookie.storage.io.fault_injection import DrillControl

API = "/api/v1/bookie"


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
    engines[1].limbo = LimboState("the disk is empty", 5, LimboPhase.REPAIRING, 3, 10, {7: "no bookie has it"})
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
        "problems": [{"ledgerId": 7, "reason": "no bookie has it"}],
    }


async def test_limbo_includes_the_progress_of_the_repair(make_admin) -> None:
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


async def test_a_limit_of_the_damage_may_be_zero_or_the_maximum(make_admin) -> None:
    register = DamageRegister()
    register.report(Damage("/l/1.log", 64, "digest differs", 7, 1))
    http = make_admin(damage=register).http
    assert (await http.get(f"{API}/damage?limit=0")).json()["damage"] == []
    assert len((await http.get(f"{API}/damage?limit=10000")).json()["damage"]) == 1
    assert (await http.get(f"{API}/damage?limit=10001")).status_code == 400
    assert (await http.get(f"{API}/damage?limit=-1")).status_code == 400


async def test_up_to_a_thousand_damaged_places_are_listed_by_default(make_admin) -> None:
    register = DamageRegister()
    for at in range(1001):
        register.report(Damage("/l/1.log", 64 * at, "digest differs", 7, at))
    answer = (await make_admin(damage=register).http.get(f"{API}/damage")).json()
    assert (answer["count"], len(answer["damage"])) == (1001, 1000)


async def test_without_a_register_there_is_no_damage(make_admin) -> None:
    assert (await make_admin().http.get(f"{API}/damage")).json() == {
        "count": 0,
        "found": 0,
        "healed": 0,
        "notKept": 0,
        "damage": [],
    }


async def test_the_rate_of_a_scrub_has_bounds(sharded, scrubs) -> None:
    for rate in (1, 100 * 2**30):
        assert (await sharded.http.put(f"{API}/scrub", json={"shard": 0, "rate": rate})).status_code == 200
    assert scrubs[0].asked == [1, 100 * 2**30]
    for body in ({"rate": 100 * 2**30 + 1}, {"rate": True}, {"shard": -1}, {"shard": "0"}):
        answer = await sharded.http.put(f"{API}/scrub", json=body)
        assert (answer.status_code, answer.json()["facts"]["member"]) == (400, next(iter(body)))
    assert scrubs[1].asked == []


async def test_one_shard_is_selected_by_its_number(sharded, engines) -> None:
    engines[1].limbo = LimboState("the disk is empty", 5, LimboPhase.LISTING)
    for shard, in_limbo in ((0, False), (1, True)):
        answer = (await sharded.http.get(f"{API}/limbo?shard={shard}")).json()
        assert (answer["inLimbo"], [one["shard"] for one in answer["shards"]]) == (in_limbo, [shard])
        assert [one["shard"] for one in (await sharded.http.get(f"{API}/scrub?shard={shard}")).json()["shards"]] == [
            shard
        ]
        state = (await sharded.http.get(f"{API}/gc/state?shard={shard}")).json()["shards"]
        assert [one["shard"] for one in state] == [shard]
    assert (await sharded.http.get(f"{API}/limbo?shard=2")).status_code == 400


async def test_the_problems_of_a_repair_and_of_limbo_are_sorted(make_admin, engines) -> None:
    engines[0].limbo = LimboState("lost", 5, LimboPhase.REPAIRING, 2, 2, {9: "b", 7: "a"})
    shard = EngineShard(engines[0], wall_clock_ms=lambda: 0, collector=lambda: None, scrubber=lambda: None)
    state = RepairState(problems={(7, 2): "b", (7, 1): "a"})
    answer = (await make_admin(repair=lambda: state, shards=lambda: [shard]).http.get(f"{API}/limbo")).json()
    assert [one["entryId"] for one in answer["repair"]["problems"]] == [1, 2]
    assert [one["ledgerId"] for one in answer["shards"][0]["problems"]] == [7, 9]


async def test_a_bookie_without_shards_has_no_shard_0(make_admin) -> None:
    http = make_admin().http
    assert (await http.get(f"{API}/gc/logs")).json() == {"logs": []}
    assert (await http.get(f"{API}/gc/logs?shard=1")).status_code == 400


async def test_errors_name_the_parts_that_do_not_run(make_admin, engines) -> None:
    bare = EngineShard(engines[0], wall_clock_ms=lambda: 0, collector=lambda: None, scrubber=lambda: None)
    http = make_admin(shards=lambda: [bare]).http
    for path, code in (
        ("gc/logs", "no_garbage_collection"),
        ("gc/state", "no_garbage_collection"),
        ("gc/explain?log=1", "no_garbage_collection"),
        ("scrub", "no_scrub"),
    ):
        answer = await http.get(f"{API}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, code)
    assert (await http.put(f"{API}/scrub")).json()["code"] == "no_scrub"


async def test_which_routes_are_served_during_the_start(make_admin) -> None:
    http = make_admin(is_open=lambda: False, metadata=lambda: None).http
    early = {"disks": 200, "limbo": 200, "damage": 200, "drill": 404}
    for path in ("disks", "limbo", "damage", "drill", "gc/state", "gc/logs", "gc/explain", "ledgers", "scrub"):
        assert (await http.get(f"{API}/{path}")).status_code == early.get(path, 503), path
    assert (await http.put(f"{API}/scrub")).status_code == 503
    assert (await http.put(f"{API}/drill", json={"rules": []})).status_code == 404
    assert (await http.delete(f"{API}/drill")).status_code == 404


def test_routes_that_read_much_are_limited() -> None:
    from bindery_bookie.admin.own_routes import ROUTES

    heavy = [route.path.removeprefix(f"{API}/") for route in ROUTES if route.is_heavy]
    assert heavy == ["gc/logs", "gc/explain", "ledgers"]

"""`bindery bookie` on a running bookie: its requests, its output and its exit codes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.common import tables
from bindery.main import app
from bindery_bookie.admin.plain import plain
from bindery_bookie.maintenance.storage_watch import DirectoryState, DirectoryStatus
from bindery_bookie.storage.collection.collection_interface import GarbageState, LogExplanation, LogInfo, LogState
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.scrub.scrub import ScrubState
from bindery_core.errors import BinderyError
from typer.testing import CliRunner, Result

LOG = LogInfo(
    log_id=31,
    file="1f.log",
    state=LogState.SEALED,
    size=2048,
    live_bytes=1024,
    live_ratio=0.5,
    live_ledgers=1,
    dead_ledgers=2,
    order=31,
    looked_at_ms=1_700_000_000_000,
)
EXPLANATION = LogExplanation(LOG, [7], [8, 9], None, None, ["Half of it is alive, so it stays."])
GARBAGE = GarbageState(
    None, None, 0, 0, False, True, 1_700_000_000_000, 0, 0, 9.5, None, None, "", 3, 4096, 2048, 2048, 3000
)


def directory(path: str, holds: str, status: DirectoryStatus, reason: str, free: int) -> Any:
    return plain(
        DirectoryState(
            path=path,
            holds=(holds,),
            status=status,
            reason=reason,
            total=2**30,
            free=free,
            usage=1 - free / 2**30,
            reserve_size=4096,
            reserve_held=4096,
            since_ms=1,
            last_check_ms=2,
        )
    )


DISKS: dict[str, Any] = {
    "directories": [
        directory("/l", "ledgers", DirectoryStatus.FULL, "97 % in use", 2**20),
        directory("/j", "journal", DirectoryStatus.OK, "", 2**29),
    ],
    "readOnly": True,
    "reasons": {"disk": "/l is full"},
}
LIMBO = {
    "inLimbo": True,
    "repair": None,
    "shards": [
        {
            "shard": 0,
            "inLimbo": True,
            "reason": "storage lost: /l",
            "phase": "repairing",
            "sinceMs": 5_000,
            "ledgersLeft": 2,
            "problems": [{"ledgerId": 7, "reason": "no other copy"}],
        }
    ],
}
WELL: dict[str, Any] = {
    "state": {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True},
    "state/readonly": {"readOnly": False, "reasons": {}},
    "disks": {"directories": [DISKS["directories"][1]], "readOnly": False, "reasons": {}},
    "limbo": {"inLimbo": False, "shards": [{"shard": 0, "inLimbo": False}], "repair": None},
    "damage": {"count": 0, "damage": []},
    "scrub": {"shards": [{"shard": 0, "running": False, "lastVerifiedMs": 0}]},
    "gc": "Triggered GC on BookieServer: b",
    "gc/state": {"shards": [{"shard": 0, **plain(GARBAGE)}]},
    "gc/logs": {"logs": [{"shard": 0, **plain(LOG)}]},
    "gc/explain": {"shard": 0, **plain(LOG), **{k: v for k, v in plain(EXPLANATION).items() if k != "log"}},
    "gc/suspend_compaction": "done",
    "gc/resume_compaction": "done",
    "drill": {"drills": [{"rule": "datasync *.txn delay 0.2", "matched": 3, "acted": 1, "isSpent": False}]},
}


class Bookie:
    """Responds as a bookie does, and records the requests."""

    def __init__(self) -> None:
        self.answers = dict(WELL)
        self.asked: list[tuple[str, str, Any]] = []
        self.authorizations: set[str | None] = set()

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/bookie/")
        body = json.loads(request.content) if request.content else dict(request.url.params)
        self.asked.append((request.method, path, body))
        self.authorizations.add(request.headers.get("authorization"))
        found = self.answers.get(path)
        if isinstance(found, httpx.Response):
            return found
        if found is None:
            return httpx.Response(404, json={"detail": "fault injection is disabled", "code": "no_drills"})
        return httpx.Response(200, json=found)


@pytest.fixture
def bookie(monkeypatch: pytest.MonkeyPatch) -> Bookie:
    bookie = Bookie()
    make: Callable[..., httpx.Client] = httpx.Client

    def client(**options: Any) -> httpx.Client:
        return make(**options, transport=httpx.MockTransport(bookie.answer))

    monkeypatch.setattr(httpx, "Client", client)
    return bookie


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bookie", *arguments])


def test_state_of_a_healthy_bookie_exits_with_0(bookie: Bookie) -> None:
    result = run("state")
    assert result.exit_code == 0, result.output
    first, heading, disk, *rest = result.stdout.splitlines()
    assert first == "running, writable"
    assert heading.split() == ["path", "holds", "status", "usage", "free", "total", "reserve", "held", "reason"]
    assert disk.split() == ["/j", "journal", "ok", "50.0", "%", "512.0", "MiB", "1.0", "GiB", "4.0", "KiB"]
    assert rest[:2] == ["not in limbo", "damage: none"]
    assert json.loads(run("state", "--json").stdout)["damage"] == {"count": 0, "damage": []}


def test_the_state_shows_why_a_bookie_is_read_only_and_in_limbo(bookie: Bookie) -> None:
    bookie.answers["state"] = {**WELL["state"], "readOnly": True}
    bookie.answers["state/readonly"] = {"readOnly": True, "reasons": {"disk": "/l is full"}}
    bookie.answers |= {"disks": DISKS, "limbo": LIMBO, "damage": {"count": 4, "damage": []}}
    del bookie.answers["scrub"]
    result = run("state")
    assert result.exit_code == 1
    assert "running, READ-ONLY\n  disk: /l is full\n" in result.stdout
    assert "IN LIMBO: shard 0, repairing: storage lost: /l\n" in result.stdout
    assert "damage: 4\n" in result.stdout


def test_the_state_shows_a_suspected_rollback_of_the_metadata(bookie: Bookie) -> None:
    assert "ROLLBACK" not in run("state").stdout, "a bookie of an older version does not serve that path"
    bookie.answers["gc/rollback"] = {"state": "ok", "reports": {}}
    result = run("state")
    assert (result.exit_code, "ROLLBACK" in result.stdout) == (0, False)
    reports = {"b2": {"unknown": 3}, "b1": {"unknown": 0}}
    bookie.answers["gc/rollback"] = {"state": "metadata_rollback_suspected", "reports": reports}
    result = run("state")
    assert result.exit_code == 1
    assert "METADATA ROLLBACK SUSPECTED: 3 replicas on b1, b2 are of ledgers unknown to ZooKeeper" in result.stdout
    assert json.loads(run("state", "--json").stdout)["rollback"]["state"] == "metadata_rollback_suspected"


def test_the_state_of_a_draining_bookie_reports_the_drain_once(bookie: Bookie) -> None:
    why = "draining: its ledgers move to other bookies (by ann)"
    bookie.answers["state/readonly"] = {"readOnly": True, "reasons": {"draining": why}}
    assert f"\n  {why}\n" in run("state").stdout
    bookie.answers["disks"] = {**DISKS, "reasons": {"draining": why}}
    assert f"read-only: {why}\n" in run("disks").stdout


def test_a_scrub_that_is_not_running_shows_no_start(bookie: Bookie) -> None:
    state = ScrubState(
        is_running=False,
        phase="",
        position=(0, 0),
        percent=0.0,
        rounds=1,
        start_ms=0,
        last_start_ms=1,
        last_end_ms=2,
        oldest_verified_ms=1,
        next_ms=0,
        entries=3,
        size=4,
        rate=0.0,
        regions=0,
        error="",
    )
    for start_ms, is_shown in ((0, False), (5_000, True)):
        bookie.answers["scrub"] = {"shards": [{"shard": 0, **plain(replace(state, start_ms=start_ms))}]}
        for verb in (("state",), ("scrub", "state")):
            shown = run(*verb).stdout
            assert "rounds" in shown
            assert "last start" in shown
            assert any(line.strip().startswith("start ") for line in shown.splitlines()) is is_shown
            assert "never" not in shown


@pytest.mark.parametrize("part", ["state", "limbo", "damage"])
def test_state_exits_with_1_for_each_problem(bookie: Bookie, part: str) -> None:
    worse = {"state": {**WELL["state"], "readOnly": True}, "limbo": LIMBO, "damage": {"count": 1, "damage": []}}
    bookie.answers[part] = worse[part]
    assert run("state").exit_code == 1


def test_disks_lists_directories_and_exits_with_1_if_one_is_full(bookie: Bookie) -> None:
    assert run("disks").exit_code == 0
    bookie.answers["disks"] = DISKS
    result = run("disks")
    assert result.exit_code == 1
    assert "97 % in use" in result.stdout
    assert "read-only: disk: /l is full" in result.stdout


def test_limbo_and_damage_are_shown(bookie: Bookie) -> None:
    assert run("limbo").exit_code == 0
    assert run("damage").stdout == "no damaged places\n"
    bookie.answers["limbo"] = LIMBO
    found = plain(Damage("/l/current/1.log", 4096, "entry digest mismatch", 7, 42))
    bookie.answers["damage"] = {"count": 1, "damage": [found]}
    limbo = run("limbo")
    assert limbo.exit_code == 1
    assert "storage lost: /l" in limbo.stdout
    assert "no other copy" in limbo.stdout
    damage = run("damage", "--limit", "5")
    assert damage.exit_code == 3
    assert damage.stdout.splitlines()[1].split()[:2] == ["/l/current/1.log", "4096"]
    assert bookie.asked[-1] == ("GET", "damage", {"limit": "5"})


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("gc", "run"), ("PUT", "gc", {"forceMinor": False, "forceMajor": False})),
        (("gc", "suspend"), ("PUT", "gc/suspend_compaction", {"suspendMinor": True, "suspendMajor": True})),
        (("gc", "suspend", "--minor"), ("PUT", "gc/suspend_compaction", {"suspendMinor": True, "suspendMajor": False})),
        (("gc", "resume", "--major"), ("PUT", "gc/resume_compaction", {"resumeMinor": False, "resumeMajor": True})),
        (("gc", "state"), ("GET", "gc/state", {})),
        (("gc", "logs"), ("GET", "gc/logs", {})),
        (("gc", "logs", "--look"), ("GET", "gc/logs", {"look": "true"})),
        (("gc", "explain", "0x1F"), ("GET", "gc/explain", {"log": "1f.log"})),
        (("gc", "explain", "1f.log", "--shard", "2"), ("GET", "gc/explain", {"log": "1f.log", "shard": "2"})),
        (("scrub", "state"), ("GET", "scrub", {})),
        (("scrub", "run"), ("PUT", "scrub", {})),
        (("scrub", "run", "--shard", "1"), ("PUT", "scrub", {"shard": 1})),
        (("drill", "list"), ("GET", "drill", {})),
        (("drill", "set", "datasync *.txn delay 0.2"), ("PUT", "drill", {"rules": ["datasync *.txn delay 0.2"]})),
        (("drill", "clear"), ("DELETE", "drill", {})),
    ],
)
def test_each_command_requests_its_page(
    bookie: Bookie, arguments: tuple[str, ...], asked: tuple[str, str, Any]
) -> None:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert bookie.asked == [asked]
    printed = json.loads(run(*arguments, "--json").stdout)
    assert printed == WELL[asked[1]]


def test_a_suspended_compaction_is_not_reported_as_running(bookie: Bookie) -> None:
    bookie.answers["gc/suspend_compaction"] = {"isMajorGcSuspended": "false", "isMinorGcSuspended": "true"}
    result = run("gc", "run", "--major")
    assert bookie.asked[0] == ("PUT", "gc", {"forceMinor": False, "forceMajor": True})
    assert (result.exit_code, result.stderr) == (0, "")
    result = run("gc", "run", "--major", "--minor", "--json")
    assert result.stderr == "minor compaction is suspended and does not run; `bindery bookie gc resume` resumes it\n"
    assert json.loads(result.stdout) == WELL["gc"]


def test_entry_logs_and_explanations_are_readable_text(bookie: Bookie) -> None:
    row = run("gc", "logs").stdout.splitlines()[1].split()
    assert row[:8] == ["0", "1f.log", "sealed", "2.0", "KiB", "1.0", "KiB", "50.0"]
    assert run("gc", "explain", "1f").stdout.startswith("Half of it is alive, so it stays.\n")
    assert "last run" in run("gc", "state").stdout
    assert "2023-11-14 22:13:20Z" in run("gc", "state").stdout


def test_logs_not_scanned_yet_and_a_started_verification_are_reported(bookie: Bookie) -> None:
    assert "not been scanned" not in run("gc", "state").stdout
    bookie.answers["gc/state"] = {"shards": [{"shard": 0, **plain(replace(GARBAGE, logs=0))}]}
    assert "have not been scanned yet; `bindery bookie gc logs --look`" in run("gc", "state").stdout
    assert "not been scanned" not in run("gc", "state", "--json").stdout
    assert "`bindery bookie scrub state` shows the progress" in run("scrub", "run").stdout
    assert run("scrub", "run", "--shard", "1").stdout.startswith("verifying shard 1;")


def test_a_token_comes_from_a_file_or_the_environment(
    bookie: Bookie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("scrub", "run")
    assert bookie.authorizations == {None}
    (tmp_path / "token").write_text("from-file\n")
    run("scrub", "run", "--token-file", str(tmp_path / "token"))
    assert "Bearer from-file" in bookie.authorizations
    monkeypatch.setenv("BINDERY_BOOKIE_TOKEN", "from-variable")
    run("scrub", "run")
    assert "Bearer from-variable" in bookie.authorizations
    assert "cannot read the token file" in str(run("state", "--token-file", str(tmp_path / "none")).exception)
    (tmp_path / "token").write_text(" ")
    assert "the token file is empty" in str(run("state", "--token-file", str(tmp_path / "token")).exception)


def test_refusals_name_the_fix(bookie: Bookie) -> None:
    bookie.answers["gc"] = httpx.Response(401, json={"detail": "a token is needed", "code": "unauthorized"})
    result = run("gc", "run")
    assert isinstance(result.exception, BinderyError)
    assert str(result.exception).startswith("a token is needed; pass --token-file")
    bookie.answers["gc"] = httpx.Response(503, json={"detail": "the storage is not open yet"})
    assert str(run("gc", "run").exception) == "the storage is not open yet (503)"
    bookie.answers["drill"] = None
    assert "fault injection is disabled" in str(run("drill", "list").exception)


def test_an_absent_bookie_is_named() -> None:
    result = run("state", "--url", "http://127.0.0.1:9")
    assert "no bookie answers at http://127.0.0.1:9" in str(result.exception)
    assert "--http-port" in str(result.exception)


def test_times_and_sizes_are_readable() -> None:
    assert tables.size_text(512) == "512 B"
    assert tables.size_text(1536) == "1.5 KiB"
    assert tables.size_text(3 * 2**50) == "3072.0 TiB"
    assert tables.words("lastVerifiedMs") == "last verified"
    assert list(tables.lines_of({"lastRunMs": 0, "isIt": True, "why": None, "rows": [], "odd": 10**20})) == [
        "last run  never",
        "is it     yes",
        "why       -",
        "rows      ",
        f"odd       {10**20}",
    ]
    assert list(tables.lines_of({"endMs": 10**20})) == [f"end  {10**20}"]

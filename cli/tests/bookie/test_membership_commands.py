"""`bindery bookie drain|recover|maintenance|members` over metadata in memory; the tests act as replication workers."""

import json
import random
from typing import Any

import pytest
from bindery.bookie.membership_commands import progress_line
from bindery.common import progress
from bindery.common.operator import duration_text, parse_duration
from bindery.common.progress import Progress as Live
from bindery_core.errors import BadRequest
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, Membership, MembershipStore
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.stores.memory import MemoryStore
from bindery_recovery.draining import drain
from bindery_recovery.draining.drain import Progress
from memory_cluster import LAYOUT, MemoryCluster
from typer.testing import Result


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    cluster = MemoryCluster(monkeypatch)
    cluster.register("b0", "b1", "b2")
    return cluster


def output_of(result: Result) -> str:
    return result.output + str(result.exception or "")


def membership(cluster: MemoryCluster, bookie: str) -> Membership:
    return cluster.do(lambda store: MembershipStore(store, clock_ms=lambda: 0).get(BookieId(bookie)))


def copying(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, moves: list[tuple[LedgerId, str, str]]) -> None:
    """At each poll of a waiting command, apply the next of `moves` and make the bookie read-only."""

    async def pause(self: object, *arguments: Any) -> None:
        ledger_id, old, new = moves.pop(0)
        await cluster.turn_read_only(old)

        def transform(metadata: LedgerMetadata) -> LedgerMetadata:
            ensemble = tuple(BookieId(new) if b == old else b for b in metadata.last_segment.ensemble)
            return metadata.with_changes(segments=(Segment(EntryId(0), ensemble),))

        store = cluster.tree.connect()
        await LedgerManager(store, LAYOUT, randomness=random.Random(5)).update(ledger_id, transform)

    follow = drain.BookieEmptier.follow
    monkeypatch.setattr(
        drain.BookieEmptier, "follow", lambda self, started, **_: follow(self, started, pause=lambda s: pause(self, s))
    )


def test_a_drain_shows_its_start_progress_and_the_next_step(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.ledger("b0", "b1"), cluster.ledger("b0", "b1", length=3 * 2**20)
    result = cluster.invoke("bookie", "drain", "b0", "--reason", "old disks")
    assert result.exit_code == 0
    assert result.stdout == "b0 is being drained: 2 ledgers, 4.0 MiB\n"
    assert "warning: no auditor is running" in result.stderr
    assert "--wait` shows the progress" in result.stderr
    cluster.elect("a1")
    copying(cluster, monkeypatch, [(first, "b0", "b2"), (second, "b0", "b2")])
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    result = cluster.invoke("bookie", "drain", "b0", "--wait")
    assert result.exit_code == 0
    assert result.stdout == "b0 is already being drained: 2 ledgers, 4.0 MiB\n"
    assert "0 %: 0 B of 4.0 MiB moved, 2 of 2 ledgers left" in result.stderr
    assert "b0 is empty: stop it, then run `bindery bookie cookie retire --bookie-id b0`" in result.stderr
    assert membership(cluster, "b0").intent is Intent.DRAINING


def test_progress_as_json_is_one_line_per_poll(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = cluster.ledger("b0", "b1"), cluster.ledger("b0", "b1", length=3 * 2**20)
    copying(cluster, monkeypatch, [(first, "b0", "b2"), (second, "b0", "b2")])
    result = cluster.invoke("bookie", "drain", "b0", "--wait", "--json")
    begun, *looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert (begun["intent"], begun["ledgers"], begun["bytes"], begun["goes_on"]) == ("draining", 2, 4 * 2**20, False)
    assert [(look["percent"], look["ledgers_left"], look["done"]) for look in looks] == [
        (0.0, 2, False),
        (25.0, 1, False),
        (100.0, 0, True),
    ]
    assert result.stderr == ""


def test_a_drain_below_quorum_is_refused_with_ledger_and_numbers(cluster: MemoryCluster) -> None:
    ledger_id = cluster.ledger("b0", "b1", "b2")
    result = cluster.invoke("bookie", "drain", "b0")
    assert result.exit_code == 1
    assert f"ledger {ledger_id} needs 3 bookies, and without it 2 would be writable" in output_of(result)
    assert membership(cluster, "b0").intent is Intent.ACTIVE


def test_a_drain_is_cancelled(cluster: MemoryCluster) -> None:
    cluster.invoke("bookie", "drain", "b0")
    result = cluster.invoke("bookie", "drain", "b0", "--cancel")
    assert result.stdout == "b0 was draining; it is an active member again\n"
    assert "cookie" not in result.stderr
    assert "is not being drained: it is active" in output_of(cluster.invoke("bookie", "drain", "b0", "--cancel"))


def test_a_reason_can_be_set_later(cluster: MemoryCluster) -> None:
    cluster.ledger("b0", "b1")
    assert cluster.invoke("bookie", "drain", "b0").exit_code == 0
    begun = membership(cluster, "b0")
    cluster.now_ms += 1000
    assert cluster.invoke("bookie", "drain", "b0", "--reason", "old disks").exit_code == 0
    now = membership(cluster, "b0")
    assert (now.reason, now.intent, now.since_ms, now.drain) == (
        "old disks",
        Intent.DRAINING,
        begun.since_ms,
        begun.drain,
    )
    assert cluster.invoke("bookie", "drain", "b0").exit_code == 0
    assert membership(cluster, "b0").reason == "old disks"


def test_waiting_ends_with_exit_code_1_when_only_unrecoverable_ledgers_are_left(cluster: MemoryCluster) -> None:
    ledger_id = cluster.ledger("b0", "b1")
    record = RecoveryRecord(ledger_id, state=RecoveryState.UNRECOVERABLE)
    cluster.do(lambda store: RecoveryRecords(store).put(record))
    result = cluster.invoke("bookie", "drain", "b0", "--wait")
    assert result.exit_code == 1
    assert (
        f"1 ledgers cannot be recovered: {ledger_id}; `bindery recovery explain {ledger_id}` gives the reason"
        in result.stderr
    )


def test_recover_needs_yes_then_marks_waits_and_retires(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger_id = cluster.ledger("b0", "b1")
    assert "b0 is registered: it is not lost" in output_of(cluster.invoke("bookie", "recover", "b0", "--yes"))
    cluster.stop("b0")
    for arguments, code in (((), 1), (("--dry-run",), 0), (("--dry-run", "--yes"), 0)):
        result = cluster.invoke("bookie", "recover", "b0", *arguments)
        assert (result.exit_code, result.stdout) == (code, "b0 is not registered; it held 1 ledgers, 1.0 MiB\n")
        assert membership(cluster, "b0").intent is Intent.ACTIVE
    result = cluster.invoke("bookie", "recover", "b0", "--yes", "--reason", "burnt")
    assert result.stdout == "b0 is removed; it held 1 ledgers, 1.0 MiB; 1 newly marked\n"
    assert "--yes --wait` shows the progress" in result.stderr
    assert cluster.do(lambda store: store.exists(LAYOUT.mark(ledger_id))) is not None
    copying(cluster, monkeypatch, [(ledger_id, "b0", "b2")])
    result = cluster.invoke("bookie", "recover", "b0", "--yes", "--wait")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "no ledger names b0 any more, and its cookie is retired"
    assert cluster.do(_cookies) == ["b1", "b2"]
    assert membership(cluster, "b0").intent is Intent.REMOVED


def test_cancelling_a_finished_recovery_reports_that_the_cookie_is_removed(cluster: MemoryCluster) -> None:
    cluster.stop("b0")
    assert cluster.invoke("bookie", "recover", "b0", "--yes").exit_code == 0
    result = cluster.invoke("bookie", "drain", "b0", "--cancel")
    assert (result.exit_code, result.stdout) == (0, "b0 was removed; it is an active member again\n")
    assert "its cookie was removed" in result.stderr
    assert "`bindery bookie cookie adopt --bookie-id b0 ...`" in result.stderr
    assert "or empty them" in result.stderr


async def _cookies(store: MemoryStore) -> list[BookieId]:
    return await CookieStore(store, LAYOUT).bookies()


def test_recover_of_a_bookie_that_held_nothing_retires_it_at_once(cluster: MemoryCluster) -> None:
    cluster.stop("b0")
    result = cluster.invoke("bookie", "recover", "b0", "--dry-run")
    assert result.stdout == "b0 is not registered; no ledger names it any more\n"
    result = cluster.invoke("bookie", "recover", "b0", "--yes")
    assert result.exit_code == 0
    assert cluster.do(_cookies) == ["b1", "b2"]


def test_recover_reports_that_too_few_bookies_remain(cluster: MemoryCluster) -> None:
    ledger_id = cluster.ledger("b0", "b1", "b2")
    cluster.stop("b0")
    result = cluster.invoke("bookie", "recover", "b0", "--dry-run")
    assert f"ledger {ledger_id} needs 3 bookies and only 2 are writable: it is copied when 1 more join" in result.stderr


def test_recover_reports_that_enough_bookies_remain(cluster: MemoryCluster) -> None:
    cluster.ledger("b0", "b1")
    cluster.stop("b0")
    result = cluster.invoke("bookie", "recover", "b0", "--dry-run")
    assert result.stderr == "enough bookies remain: 2 are writable, and no ledger needs more than 2\n"


def test_recover_and_maintenance_of_an_unknown_name_are_refused(cluster: MemoryCluster) -> None:
    for verb in (("recover", "b9", "--yes"), ("maintenance", "b9", "--for", "1m"), ("drain", "b9")):
        result = cluster.invoke("bookie", *verb)
        assert result.exit_code == 1
        assert "b9 is not a bookie of this cluster; those that are: b0, b1, b2" in output_of(result)
    assert membership(cluster, "b9").intent is Intent.ACTIVE


def test_maintenance_ends_by_itself(cluster: MemoryCluster) -> None:
    result = cluster.invoke("bookie", "maintenance", "b0", "--for", "10m", "--reason", "kernel")
    assert result.stdout == "b0 is in maintenance until 2027-01-15 08:10:00Z (10 min)\n"
    assert membership(cluster, "b0").until_ms == cluster.now_ms + 600_000
    (first, *_) = (json.loads(line) for line in cluster.invoke("bookie", "members", "--json").stdout.splitlines())
    assert (first["bookie_id"], first["intent"], first["reason"]) == ("b0", "maintenance", "kernel")
    cluster.now_ms += 600_000
    assert "maintenance" not in cluster.invoke("bookie", "members").stdout
    assert cluster.invoke("bookie", "maintenance", "b0", "--end").stdout == "the maintenance of b0 is over\n"
    assert cluster.invoke("bookie", "maintenance", "b0", "--end").stdout == "b0 was not in maintenance\n"
    for wrong in ((), ("--for", "1m", "--end"), ("--for", "8d"), ("--for", "soon"), ("--for", "0")):
        assert isinstance(cluster.invoke("bookie", "maintenance", "b0", *wrong).exception, BadRequest)


def test_members_lists_registered_known_and_intended_bookies(cluster: MemoryCluster) -> None:
    cluster.stop("b1")
    cluster.invoke("bookie", "drain", "b0", "--reason", "old disks")
    lines = cluster.invoke("bookie", "members").stdout.splitlines()
    assert lines[0].split() == ["bookie", "registered", "cookie", "intent", "since", "until", "drain", "reason"]
    assert lines[1].split()[:4] == ["b0", "writable", "yes", "draining"]
    assert "0 ledgers, 0 B at the start" in lines[1]
    assert "old disks (" in lines[1]
    assert lines[2].split()[:4] == ["b1", "ABSENT", "yes", "active"]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172_800)])
def test_a_duration_is_parsed_to_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1m", "1.5h", "10 m", "m", "1w"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="the format is 90s, 10m, 1h30m or 2d"):
        parse_duration(text)


def test_printed_durations_are_rounded() -> None:
    assert [duration_text(s) for s in (0, 99, 100, 5999, 6000, 260_000)] == [
        "0 s",
        "99 s",
        "2 min",
        "100 min",
        "1.7 h",
        "3 d",
    ]


def test_the_progress_line_shows_sizes_ledgers_speed_and_time_left() -> None:
    progress = Progress(3, 9, 2**20, 4 * 2**20, 2**19, 2.0, ())
    assert progress_line(progress) == "75 %: 3.0 MiB of 4.0 MiB moved, 3 of 9 ledgers left, 512.0 KiB/s, about 2 s left"
    progress = Progress(1, 2, 0, 4, 1.0, 0.0, ())  # the remaining ledger is open: its size is unknown
    assert progress_line(progress) == "99 %: 4 B of 4 B moved, 1 of 2 ledgers left, 1 B/s"


def test_without_a_terminal_progress_is_an_occasional_line(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    live = Live(clock=lambda: now[0])
    for number in range(11):
        live.show(f"step {number}")
        now[0] += 1.0
    live.say("done")
    assert capsys.readouterr().err.splitlines() == ["step 5", "step 10", "done"]
    Live(is_quiet=True).say("nothing")
    assert capsys.readouterr().err == ""

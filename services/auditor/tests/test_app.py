"""A complete auditor over HTTP, on a cluster in memory: repairs, responses and authorization."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from auditor_cluster import LAYOUT, NAMES, AuditorUnderTest, Cluster, clock_ms, running, until
from bindery_auditor.app import ROUTES, AuditorApp, AuditorContext
from bindery_core.ids import BookieId, LedgerId
from bindery_identity.tokens import SharedSecrets
from bindery_kit.admin.access import Access
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.ledgers.verified_records import LEVELS
from bindery_metadata.recovery.last_audits import SEVERITIES, VERDICTS, LastAudit, LastAudits

API = "/api/v1/autorecovery"
SECRET = b"0123456789abcdef"
LAST = "bindery_last_audit"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as found:
        yield found


def last_audit(**changes: Any) -> LastAudit:
    known = {
        "level": "deep",
        "run_id": "r1",
        "verdict": "HEALTHY",
        "exit_code": 0,
        "began_ms": 0,
        "ended_ms": 0,
        "copies_expected": 200,
        "copies_verified": 200,
        "bytes_read": 1,
        "oldest_verified_ms": 0,
    }
    return LastAudit(**{**known, **changes})


async def metrics_of(auditor: AuditorUnderTest) -> dict[str, float]:
    text = (await auditor.http.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^(\S+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}


async def history_of(auditor: AuditorUnderTest) -> list[str]:
    return [event["text"] for event in (await auditor.get("/v1/recovery/history"))["events"]]


# --- repairs ----------------------------------------------------------------------------------------------------------


async def test_a_lost_bookie_is_replaced_and_status_and_history_report_it(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x" * 100] * 20)
    lost = sorted(await cluster.members(ledger_id))[0]
    auditor = await cluster.auditor().start()
    await until(lambda: auditor.service.auditor.state.audit.audits)
    await cluster.lose(lost)

    async def is_seen_absent() -> bool:
        return bool((await auditor.get("/v1/recovery/status"))["lost"])

    await until(is_seen_absent)
    status = await auditor.get("/v1/recovery/status")
    assert status["auditor"] == "auditor-0"
    assert status["this"]["is_leader"]
    assert (status["lost"][0]["bookie_id"], status["lost"][0]["phase"]) == (lost, "waiting")
    assert status["lost_bookie_delay_s"] == 10

    await until(lambda: auditor.service.worker.stats.ledgers_healed)
    assert lost not in await cluster.members(ledger_id)
    texts = await history_of(auditor)
    assert texts[0].startswith(f"ledger {ledger_id} is whole again: 20 copies")
    assert any(text.startswith(f"{lost} is lost: 1 of the 1 ledgers") for text in texts)

    async def is_done() -> bool:
        return bool((await auditor.get("/v1/recovery/status"))["marked"] == 0)

    await until(is_done)
    status = await auditor.get("/v1/recovery/status")
    assert (status["eta_s"], status["bytes_left"], status["by_obstacle"]) == (0.0, 0, {})
    assert status["this"]["worker"]["entries_copied"] == 20
    assert status["lost"][0]["left_s"] is None
    assert status["this"]["checks"]["ledgers"]["interval_s"] == 604_800
    assert status["this"]["parts_down"] == []


async def test_without_a_spare_the_ledger_stays_listed_with_the_reason(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x"] * 3)
    members = sorted(await cluster.members(ledger_id))
    spare = next(name for name in NAMES if name not in members)
    auditor = await cluster.auditor().start()
    await cluster.lose(spare)
    await cluster.lose(members[0])

    async def is_blocked() -> bool:
        records = [one["record"] for one in (await auditor.get("/v1/recovery/ledgers"))["ledgers"]]
        return any(record and record["obstacle"] == "no_spare" for record in records)

    await until(is_blocked)
    [ledger] = (await auditor.get("/v1/recovery/ledgers"))["ledgers"]
    assert (ledger["ledger_id"], ledger["bookies"]) == (ledger_id, [members[0]])
    assert ledger["record"]["reason"] == "bookie_lost"
    assert ledger["record"]["attempts"] >= 1
    assert ledger["record"]["detail"]
    one = await auditor.get(f"/v1/recovery/ledgers/{ledger_id}")
    assert one["ledger_id"] == ledger_id
    assert ledger["record"]["detail"] in one["sentence"]
    page = (await auditor.http.get("/")).text
    assert ledger["record"]["detail"] in page

    await cluster.join(BookieId("bookie-9"))
    await until(lambda: auditor.service.worker.stats.ledgers_healed)
    assert "bookie-9" in await cluster.members(ledger_id)


async def test_ledgers_are_listed_in_pages(cluster: Cluster) -> None:
    auditor = await cluster.auditor(workers=0).start()
    for ledger_id in range(5):
        await auditor.admin.marks.mark(LedgerId(ledger_id), ("bookie-0",))
    first = await auditor.get("/v1/recovery/ledgers?limit=2")
    assert [one["ledger_id"] for one in first["ledgers"]] == [0, 1]
    assert first["next_first"] == 2
    rest = await auditor.get("/v1/recovery/ledgers?first=2&limit=3")
    assert [one["ledger_id"] for one in rest["ledgers"]] == [2, 3, 4]
    assert "next_first" not in rest
    assert rest["ledgers"][0]["record"] is None
    assert (await auditor.http.get("/v1/recovery/ledgers?limit=0")).status_code == 400


async def test_an_unknown_ledger_is_404(cluster: Cluster) -> None:
    auditor = await cluster.auditor().start()
    answer = await auditor.http.get("/v1/recovery/ledgers/77")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert (await auditor.http.get("/v1/recovery/ledgers/x")).status_code == 400


async def test_no_ledger_is_repaired_between_pause_and_resume(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x"])
    lost = sorted(await cluster.members(ledger_id))[0]
    auditor = await cluster.auditor().start()
    mistaken = await auditor.http.post("/v1/recovery/pause", json={"reasons": "new racks"})
    assert (mistaken.status_code, mistaken.json()["detail"]) == (
        400,
        "unknown member; the body may have only reason: member=reasons",
    )
    assert (await auditor.get(f"{API}/status")) == {"enabled": True}
    answer = await auditor.http.post("/v1/recovery/pause", json={"reason": "new <racks>"})
    assert answer.json() == {
        "paused": {"by": "auditor-0", "reason": "new <racks>", "at_ms": answer.json()["paused"]["at_ms"]}
    }
    assert (await auditor.get(f"{API}/status")) == {"enabled": False}
    await cluster.lose(lost)
    status = await auditor.get("/v1/recovery/status")
    assert (status["is_enabled"], status["pause"]["reason"]) == (False, "new <racks>")
    page = (await auditor.http.get("/")).text
    assert "Recovery is paused: new &lt;racks&gt;." in page
    assert "<racks>" not in page

    await until(lambda: clock_ms() > status["at_ms"] + 120_000)
    assert lost in await cluster.members(ledger_id)
    assert (await auditor.http.post("/v1/recovery/resume")).json() == {"paused": None, "was_paused": True}
    await until(lambda: auditor.service.worker.stats.ledgers_healed)
    assert lost not in await cluster.members(ledger_id)
    assert (await auditor.http.post("/v1/recovery/resume")).json() == {"paused": None, "was_paused": False}
    assert "recovery was paused by auditor-0: new <racks>" in await history_of(auditor)
    answer = await auditor.http.post("/v1/recovery/pause", json={"reason": 7})
    assert answer.status_code == 400


async def test_bookies_are_listed_with_their_membership(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x" * 50] * 4)
    first, second, *_ = sorted(await cluster.members(ledger_id))
    memberships = MembershipStore(cluster.store, clock_ms=clock_ms)
    await memberships.set(
        first, Intent.DRAINING, reason="old", by="ann", drain={"ledgers_total": 1, "bytes_total": 200}
    )
    await memberships.set(second, Intent.MAINTENANCE, until_ms=clock_ms() + 60_000)
    auditor = await cluster.auditor(workers=0).start()

    async def bookies() -> dict[str, Any]:
        return {one["bookie_id"]: one for one in (await auditor.get("/v1/bookies"))["bookies"]}

    async def is_counted() -> bool:
        return bool((await bookies())[first]["drain"]["ledgers_left"] == 1)

    await until(is_counted)
    found = await bookies()
    assert sorted(found) == sorted(NAMES)
    assert (found[first]["intent"], found[first]["reason"], found[first]["by"]) == ("draining", "old", "ann")
    drain = found[first]["drain"]
    assert (drain["ledgers_total"], drain["bytes_total"], drain["bytes_left"]) == (1, 200, 200)
    assert found[second]["intent"] == "maintenance"
    assert {one["registration"] for one in found.values()} == {"writable"}
    await until(lambda: clock_ms() > found[second]["until_ms"])
    await cluster.lose(second)
    found = await bookies()
    assert (found[second]["intent"], found[second]["registration"]) == ("active", "absent")
    assert found[second]["has_cookie"]


# --- several auditors -------------------------------------------------------------------------------------------------


async def test_both_auditors_answer_and_the_standby_takes_over_when_the_leader_stops(cluster: Cluster) -> None:
    first = await cluster.auditor("auditor-0").start()
    await until(lambda: first.service.is_leader)
    second = await cluster.auditor("auditor-1").start()
    for auditor in (first, second):
        assert (await auditor.http.get(f"{API}/who_is_auditor")).text == "Auditor: auditor-0"
    assert not (await second.get("/v1/recovery/status"))["this"]["is_leader"]
    assert "\nbindery_recovery_this_leads 0\n" in (await second.http.get("/metrics")).text

    await first.stop()
    await until(lambda: second.service.is_leader, limit_s=5)
    assert (await second.http.get(f"{API}/who_is_auditor")).text == "Auditor: auditor-1"
    assert "\nbindery_recovery_this_leads 1\n" in (await second.http.get("/metrics")).text


async def test_the_worker_of_a_standby_copies_when_the_leader_is_killed(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x"] * 5)
    lost = sorted(await cluster.members(ledger_id))[0]
    first = await cluster.auditor("auditor-0", workers=0).start()
    await until(lambda: first.service.is_leader)
    second = await cluster.auditor("auditor-1").start()
    await cluster.lose(lost)
    await first.kill()
    await until(lambda: second.service.worker.stats.ledgers_healed)
    assert lost not in await cluster.members(ledger_id)
    assert first.exits == second.exits == []


async def test_a_stop_releases_the_locks_before_leadership(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x"] * 5)
    lost = sorted(await cluster.members(ledger_id))[0]
    auditor = await cluster.auditor().start()
    at_stop: list[tuple[bool, str | None]] = []

    async def hang(*_: Any, **__: Any) -> Any:
        await until(lambda: False, limit_s=10_000)

    auditor.client.store_replicas = hang  # type: ignore[method-assign]
    await cluster.lose(lost)
    await until(lambda: auditor.service.worker.current)
    assert ledger_id in await auditor.admin.marks.locks()
    resign = auditor.service.election.resign

    async def seen_resigning() -> None:
        at_stop.append((bool(await auditor.admin.marks.locks()), await auditor.admin.auditor()))
        await resign()

    auditor.service.election.resign = seen_resigning  # type: ignore[method-assign]
    await auditor.service.stop()
    assert at_stop == [(False, "auditor-0")]
    assert await auditor.admin.auditor() is None
    assert await auditor.admin.marks.get(ledger_id) is not None, "the mark stays: the ledger is not whole"
    assert auditor.service.watcher.states["worker"].deaths == 0


# --- BookKeeper's paths -----------------------------------------------------------------------------------------------


async def test_bookkeepers_routes_answer_as_in_bookkeeper(cluster: Cluster) -> None:
    auditor = cluster.auditor(workers=0)
    http = auditor.http
    auditor.open()
    answer = await http.get(f"{API}/who_is_auditor")
    assert (answer.status_code, answer.text) == (404, "No auditor elected")
    answer = await http.get(f"{API}/lost_bookie_recovery_delay")
    assert answer.status_code == 404
    answer = await http.put(f"{API}/trigger_audit")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_auditor")
    answer = await http.get(f"{API}/list_under_replicated_ledger")
    assert (answer.status_code, answer.text) == (404, "No under replicated ledgers found")

    await auditor.start()
    await until(lambda: auditor.service.auditor.state.audit.audits)
    assert (await http.get(f"{API}/who_is_auditor")).text == "Auditor: auditor-0"
    assert (await http.get(f"{API}/lost_bookie_recovery_delay")).text == "lostBookieRecoveryDelay value: 10"
    answer = await http.put(f"{API}/lost_bookie_recovery_delay", json={"delay_seconds": 33})
    assert answer.text == "Success set lostBookieRecoveryDelay to 33"
    assert (await http.get(f"{API}/lost_bookie_recovery_delay")).text == "lostBookieRecoveryDelay value: 33"
    for body in ({"delay_seconds": "1"}, {"delay_seconds": -1}, {"delay_seconds": True}, {}):
        assert (await http.put(f"{API}/lost_bookie_recovery_delay", json=body)).status_code == 400

    await auditor.admin.marks.mark(LedgerId(3), ("b1:3181", "b2:3181"))
    await auditor.admin.marks.mark(LedgerId(4), ("b2:3181",))
    path = f"{API}/list_under_replicated_ledger"
    assert (await http.get(path)).json() == [3, 4]
    assert (await http.get(f"{path}?missingreplica=b1:3181")).json() == [3]
    assert (await http.get(f"{path}?excludingmissingreplica=b1:3181")).json() == [4]
    assert (await http.get(f"{path}?printmissingreplica=true&missingreplica=b1:3181")).json() == {
        "3": ["b1:3181", "b2:3181"]
    }
    assert (await http.get(f"{path}?missingreplica=b1:3181&excludingmissingreplica=b2:3181")).status_code == 404

    assert (await http.get(f"{API}/status")).json() == {"enabled": True}
    assert (await http.put(f"{API}/status?enabled=false")).json() == {"enabled": False}
    assert (await http.put(f"{API}/status?enabled=false")).json() == {"enabled": False}
    assert (await http.put(f"{API}/status?enabled=true")).json() == {"enabled": True}
    assert (await http.put(f"{API}/status")).status_code == 400


async def test_trigger_audit_marks_ledgers_without_waiting_for_the_delay(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x"])
    lost = sorted(await cluster.members(ledger_id))[0]
    auditor = await cluster.auditor(workers=0, lost_bookie_delay_s=86_400).start()
    await until(lambda: auditor.service.auditor.state.audit.audits)
    await cluster.lose(lost)
    await until(lambda: auditor.service.auditor.watch and auditor.service.auditor.watch.lost.absences)
    assert await auditor.admin.marks.get(ledger_id) is None
    answer = await auditor.http.put(f"{API}/trigger_audit")
    assert (answer.status_code, answer.text) == (200, "Success trigger audit.")
    before = clock_ms()
    await until(lambda: auditor.service.auditor.state.audit.marked_total)
    assert clock_ms() - before < 60_000
    assert (await auditor.http.get(f"{API}/list_under_replicated_ledger")).json() == [ledger_id]


@pytest.mark.parametrize(
    ("path", "source"),
    [("bookie", lambda name: [name]), ("decommission", lambda name: name)],
    ids=("bookie", "decommission"),
)
async def test_an_absent_bookie_is_replaced_in_the_background_and_its_cookie_deleted(
    cluster: Cluster, path: str, source: Any
) -> None:
    ledger_id = await cluster.write([b"x"] * 3)
    gone = sorted(await cluster.members(ledger_id))[0]
    auditor = await cluster.auditor(lost_bookie_delay_s=86_400).start()
    body = {"bookie_src": source(gone), "delete_cookie": True}
    answer = await auditor.http.put(f"{API}/{path}", json=body)
    assert answer.status_code == 409, "it is registered"
    await cluster.lose(gone)
    assert (await auditor.http.put(f"{API}/{path}", json=body)).status_code == 200

    async def has_no_cookie() -> bool:
        return await CookieStore(cluster.store, LAYOUT).read(gone) is None

    await until(has_no_cookie)
    assert gone not in await cluster.members(ledger_id)
    answer = await auditor.http.put(f"{API}/{path}", json={"bookie_src": source("nobody")})
    assert answer.status_code == 404
    for wrong in ({}, {"bookie_src": 7}, {"bookie_src": []}, {"bookie_src": [7]}):
        assert (await auditor.http.put(f"{API}/{path}", json=wrong)).status_code == 400


# --- authorization ----------------------------------------------------------------------------------------------------


def access(verifier: SharedSecrets | None) -> Access:
    return Access(verifier, now_s=lambda: 0.0, hint="start the auditor with --admin-token-file")


async def test_each_request_that_changes_something_needs_the_token(cluster: Cluster) -> None:
    auditor = await cluster.auditor(access=access(SharedSecrets([SECRET]))).start()
    for route in ROUTES:
        path = route.path.replace("{id}", "1")
        if route.method == "GET":
            assert (await auditor.http.get(path)).status_code != 401, path
        else:
            answer = await auditor.http.request(route.method, path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
            assert answer.headers["content-type"] == "application/problem+json"
    assert await auditor.admin.is_enabled()
    headers = {"authorization": f"Bearer {SECRET.decode()}"}
    assert (await auditor.http.post("/v1/recovery/pause", headers=headers)).status_code == 200
    assert not await auditor.admin.is_enabled()


async def test_without_a_token_file_no_remote_request_changes_anything(cluster: Cluster) -> None:
    auditor = await cluster.auditor(access=access(None)).start()
    answer = await auditor.http.post("/v1/recovery/pause", headers={"authorization": "Bearer anything-at-all"})
    assert answer.status_code == 401
    assert "--admin-token-file" in answer.json()["detail"]
    assert (await auditor.http.get("/v1/recovery/status")).status_code == 200


async def test_requests_before_the_first_session_are_answered_with_503() -> None:
    app = AuditorApp(AuditorContext(), access=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://auditor") as http:
        for route in ROUTES:
            answer = await http.request(route.method, route.path.replace("{id}", "1"))
            assert (answer.status_code, answer.json()["code"]) == (503, "starting"), route.path


# --- metrics and the page ---------------------------------------------------------------------------------------------


async def test_metrics_report_the_process_and_the_cluster(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x" * 10] * 6)
    lost = sorted(await cluster.members(ledger_id))[0]
    auditor = await cluster.auditor().start()
    await until(lambda: auditor.service.auditor.state.audit.audits)
    await cluster.lose(lost)
    await until(lambda: auditor.service.worker.stats.ledgers_healed)
    auditor.service.progress.latest = None
    await auditor.service.progress.get()
    samples = dict(re.findall(r"^(\S+(?:\{[^}]*\})?) (\S+)$", (await auditor.http.get("/metrics")).text, re.MULTILINE))
    assert samples["replication_replication_worker_NUM_ENTRIES_WRITTEN"] == "6"
    assert samples["replication_replication_worker_NUM_FULL_OR_PARTIAL_LEDGERS_REPLICATED"] == "1"
    assert int(samples['replication_auditor_AUDIT_BOOKIES_TIME_count{success="true"}']) >= 1
    assert samples['replication_auditor_NUM_UNDER_REPLICATED_LEDGERS_sum{success="true"}'] in ("0", "1")
    assert samples["replication_auditor_election_attempts"] == "1"
    assert samples["bindery_recovery_this_leads"] == "1"
    assert samples["bindery_recovery_this_entries_copied_total"] == "6"
    assert float(samples["bindery_recovery_this_bytes_copied_total"]) >= 60
    assert samples['bindery_recovery_marked_ledgers{obstacle="none"}'] == "0"
    assert samples["bindery_recovery_unrecoverable_ledgers"] == "0"
    assert samples["bindery_recovery_oldest_mark_age_seconds"] == "0"
    assert samples["bindery_recovery_bytes_left"] == "0"
    assert samples["bindery_recovery_eta_seconds"] == "0"
    assert samples['bindery_recovery_absent_bookies{phase="handled"}'] == "1"
    assert samples['bindery_recovery_this_ledgers_marked_total{reason="bookie_lost"}'] == "1"
    assert float(samples["bindery_recovery_this_budget_bytes_per_second"]) >= 2**20
    assert samples["process_open_fds"]


async def test_metrics_count_marked_ledgers_by_obstacle(cluster: Cluster) -> None:
    ledger_id = await cluster.write([b"x"] * 3)
    members = sorted(await cluster.members(ledger_id))
    auditor = await cluster.auditor().start()
    for name in NAMES:
        if name not in members[1:]:
            await cluster.lose(name)

    async def text() -> str:
        await auditor.service.progress.get()
        return (await auditor.http.get("/metrics")).text

    async def is_told() -> bool:
        return 'bindery_recovery_marked_ledgers{obstacle="no_spare"} 1\n' in await text()

    await until(is_told)
    assert "\nbindery_recovery_eta_seconds NaN\n" in await text()
    assert re.search(r'\nbindery_recovery_marked_ledgers_by_age\{le="inf"\} 1\n', await text())


async def test_the_page_escapes_values_and_loads_nothing(cluster: Cluster) -> None:
    auditor = await cluster.auditor(workers=0).start()
    await auditor.admin.marks.mark(LedgerId(1), ("<script>alert(1)</script>",))
    await until(lambda: auditor.service.progress.latest and auditor.service.progress.latest.marked)
    answer = await auditor.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert answer.headers["x-frame-options"] == "DENY"
    assert "&lt;script&gt;" in answer.text
    assert "<script" not in answer.text
    assert not re.search(r"(src|href)='(?!/v1/)", answer.text)
    assert "1 ledger is under-replicated" in answer.text
    for name in NAMES:
        assert name in answer.text


async def test_the_results_of_the_last_audits_are_shown_by_level_with_their_age(cluster: Cluster) -> None:
    auditor = await cluster.auditor().start()
    await auditor.last_audits.get()
    samples = await metrics_of(auditor)
    assert {level: samples[f'{LAST}_recorded{{level="{level}"}}'] for level in LEVELS} == dict.fromkeys(LEVELS, 0.0)
    assert not [name for name in samples if name.startswith(LAST) and not name.startswith(f"{LAST}_recorded")]
    assert (await auditor.get("/v1/recovery/status"))["audits"] == []
    assert "No audit has recorded a result." in (await auditor.http.get("/")).text

    audits = LastAudits(cluster.store)
    await audits.put(last_audit(began_ms=clock_ms() - 9_000, ended_ms=clock_ms() - 2_000))
    quick = last_audit(
        level="quick",
        verdict="CORRUPT",
        exit_code=2,
        copies_verified=150,
        began_ms=clock_ms() - 700_000,
        ended_ms=clock_ms() - 600_000,
        oldest_verified_ms=clock_ms() - 800_000,
        kinds={"ENTRY_LOST": 3, "ORPHAN_DATA": 1},
        severities={"unreadable": 3, "warning": 1},
    )
    await audits.put(quick)

    async def is_shown() -> bool:
        return f'{LAST}_age_seconds{{level="quick"}}' in await metrics_of(auditor)

    began_ms = clock_ms()
    await until(is_shown, limit_s=35)
    samples = await metrics_of(auditor)
    passed_s = (clock_ms() - began_ms) / 1000
    assert [samples[f'{LAST}_recorded{{level="{level}"}}'] for level in ("quick", "standard", "deep")] == [1, 0, 1]
    assert samples[f'{LAST}_age_seconds{{level="quick"}}'] == pytest.approx(600 + passed_s, abs=1)
    assert samples[f'{LAST}_age_seconds{{level="deep"}}'] == pytest.approx(2 + passed_s, abs=1)
    assert samples[f'{LAST}_oldest_verification_seconds{{level="quick"}}'] == pytest.approx(800 + passed_s, abs=1)
    assert samples[f'{LAST}_coverage_ratio{{level="quick"}}'] == 0.75
    for level, verdict in (("quick", "CORRUPT"), ("deep", "HEALTHY")):
        shown = {name: samples[f'{LAST}_verdict{{level="{level}",verdict="{name}"}}'] for name in VERDICTS}
        assert shown == {name: float(name == verdict) for name in VERDICTS}
    assert {name: samples[f'{LAST}_findings{{level="quick",severity="{name}"}}'] for name in SEVERITIES} == {
        "info": 0,
        "warning": 1,
        "incomplete": 0,
        "under_replicated": 0,
        "corrupt": 0,
        "unreadable": 3,
    }

    deepest, other = (await auditor.get("/v1/recovery/status"))["audits"]
    assert (deepest["level"], other["level"], other["verdict"], other["coverage"]) == ("deep", "quick", "CORRUPT", 0.75)
    assert (other["kinds"], other["run_id"]) == ({"ENTRY_LOST": 3, "ORPHAN_DATA": 1}, "r1")
    assert other["age_s"] == pytest.approx(600 + passed_s, abs=1)
    page = (await auditor.http.get("/")).text
    assert re.search(
        r"<td>quick</td><td><span class='bad'>CORRUPT</span></td><td>\d+ min ago</td><td>150 of 200</td>", page
    )
    assert "<td>3 unreadable, 1 warning</td>" in page
    assert "<td>deep</td><td>HEALTHY</td>" in page


async def test_the_age_of_an_audit_grows_while_its_record_cannot_be_read(cluster: Cluster) -> None:
    await LastAudits(cluster.store).put(last_audit(ended_ms=clock_ms()))
    auditor = await cluster.auditor().start()
    await auditor.last_audits.get()
    await auditor.store.close()
    await asyncio.sleep(600)
    assert (await metrics_of(auditor))[f'{LAST}_age_seconds{{level="deep"}}'] == pytest.approx(600, abs=2)


async def test_responses_are_strict_json(cluster: Cluster) -> None:
    auditor = await cluster.auditor().start()
    for path in ("/v1/recovery/status", "/v1/recovery/ledgers", "/v1/recovery/history", "/v1/bookies"):
        answer = await auditor.http.get(path)
        assert answer.headers["content-type"] == "application/json"
        json.loads(answer.content, parse_constant=pytest.fail)  # NaN is not valid JSON

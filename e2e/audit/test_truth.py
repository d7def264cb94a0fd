"""An audit finds exactly the faults of each kind that are injected into a cluster with real data, with the right
severity and exit code. Ledgers that it marks are healed, and the next audit does not report them again.

`make audit-truth SEED=7` selects other entries and bookies. The tests run in order, on one cluster.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.standalone.control import ask
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError
from bindery_core.ids import LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_spark.audit.checkpoint import run_directory
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.main import main

from e2e.audit.faults import ENTRIES, Faults, Found

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
SEED = int(os.environ.get("BINDERY_AUDIT_SEED", "1"))
CHANGE_TIMEOUT_S = 120.0
HEAL_TIMEOUT_S = 300.0
DELAY_S = 1
ORPHAN_AFTER_S = 1
BOOKIES = 4
OF_THE_WHOLE = ("ORPHAN_METADATA", "TOPIC_INCONSISTENT", "CURSOR_INCONSISTENT")
"""Kinds that only an audit of all ledgers can find."""
OF_DEEP = ("ORPHAN_DATA", "BAD_PLACEMENT")
OF_COPIES = ("MISSING_REPLICA", "ENTRY_LOST", "REPLICA_DIVERGENCE")
"""Kinds of findings about single entries."""


class Truth:
    """The cluster and the faults in it."""

    def __init__(self, cluster: ThrowawayCluster, out: Path) -> None:
        self.cluster = cluster
        self.out = out
        self.wanted: set[Found] = set()
        self.claimed: set[LedgerId] = set()
        self.healable: set[int] = set()
        self.self_healing: set[int] = set()
        self.first_run = ""

    def change(self, verb: str, name: str) -> None:
        request = {"verb": verb, "name": name}
        answer = ask(self.cluster.directory.control_socket, request, timeout_s=CHANGE_TIMEOUT_S)
        assert answer is not None
        assert "error" not in answer, answer

    async def restart(self, bookie: str, work: Any) -> None:
        await asyncio.to_thread(self.change, "stop", bookie)
        work()
        await asyncio.to_thread(self.change, "start", bookie)

    @asynccontextmanager
    async def session(self):  # type: ignore[no-untyped-def]
        store = await ZooKeeperStore.connect(self.cluster.zookeeper)
        client = await LedgerClient.connect(store, randomness=random.SystemRandom())
        marks = UnderreplicationManager(
            store, LedgersLayout(), randomness=random.SystemRandom(), clock_ms=lambda: time.time_ns() // 1_000_000
        )
        try:
            yield store, client, marks
        finally:
            await client.close()
            await store.close()

    def audit(self, *arguments: str) -> tuple[int, set[Found], str, str]:
        """Exit code, findings, last line, run id."""
        before = set(self.out.iterdir()) if self.out.exists() else set()
        code = main(
            ["run", "--zookeeper", self.cluster.zookeeper, "--out", str(self.out), "--rate", "0", "--json", *arguments]
        )
        assert code < 4, "the job failed"
        (directory,) = set(self.out.iterdir()) - before
        found = read_findings(directory / "findings")
        rows = [
            (f["kind"], f["severity"], f["ledger_id"], f["first_entry"], f["last_entry"], f["bookie"]) for f in found
        ]
        assert len(rows) == len(set(rows)), "a finding is reported twice"
        lines = (directory / "summary.txt").read_text().splitlines()
        return code, set(rows), lines[-1].rpartition(" ")[2], directory.name


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    # Bookies must keep the ledger whose znode a fault deletes, until an audit has found it.
    settings = {"AUDITOR_OPEN_LEDGER_GRACE_S": "2", "BOOKIE_STORAGE_GC_WAIT_TIME_MIN_S": "600"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with ThrowawayCluster(bookies=BOOKIES) as cluster:
            yield Truth(cluster, tmp_path_factory.mktemp("audit") / "runs")
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


async def test_in_an_intact_cluster_only_the_stopped_bookie_is_found(truth: Truth) -> None:
    """The coverage shows it. `test_command` has a run with the verdict HEALTHY."""
    async with httpx.AsyncClient(base_url=truth.cluster.url, timeout=60, trust_env=False) as http:
        for topic in ("orders", "payments"):
            for number in range(30):
                path = f"/v1/topics/public/default/{topic}"
                answer = await http.post(f"{path}/messages", content=f"message {number}".encode() * 20)
                assert answer.status_code == 200, answer.text
            await http.post(f"{path}/subscriptions/s/receive", json={"consumer": "c", "initial": "earliest", "max": 9})
    async with truth.session() as (store, client, marks):
        await marks.disable()
        await marks.set_lost_bookie_delay_s(3600)
        faults = Faults(store, client, random.Random(SEED))
        for _ in range(3):
            await faults.ledger()
    await asyncio.to_thread(truth.change, "stop", "bookie-1")
    try:
        code, found, verdict, run_id = await asyncio.to_thread(truth.audit, "--timeout", "2s")
    finally:
        await asyncio.to_thread(truth.change, "start", "bookie-1")
    assert (code, verdict) == (3, "INCOMPLETE")
    assert found == {("UNREADABLE_BOOKIE", "incomplete", None, None, None, "bookie-1")}
    summary = run_directory(truth.out, run_id).read_json("summary.json")
    assert 0 < summary["coverage"] < 1
    (unseen,) = [one for one in summary["bookies"] if one["unknown"]]
    assert unseen["bookie"] == "bookie-1"
    assert unseen["reason"]
    assert [one["bookie"] for one in summary["bookies"] if one["unlisted"]] == ["bookie-1"]


async def test_exactly_the_faults_are_found(truth: Truth) -> None:
    async with truth.session() as (store, client, marks):
        await marks.set_lost_bookie_delay_s(DELAY_S)
        faults = Faults(store, client, random.Random(f"faults {SEED}"))
        directory = truth.cluster.directory.root
        await faults.flip_bits(lambda bookie: directory / bookie, truth.restart)
        for put in (
            faults.hole,
            faults.forged_payload,
            faults.lost_entry,
            faults.stale_ensemble,
            faults.wrong_length,
            faults.orphan_data,
            faults.orphan_metadata,
            faults.open_too_long,
            faults.bad_placement,
            faults.miscounted_topic,
            faults.unreadable_metadata,
            faults.legal,
        ):
            await put()
        await faults.false_mark(marks)
        await faults.hole_that_is_marked(marks)
    truth.wanted, truth.claimed, truth.healable = faults.wanted, faults.claimed, set(map(int, faults.healable))
    truth.self_healing = {i for kind, _, i, *_ in faults.wanted if kind == "DIGEST_MISMATCH" and i is not None}
    await asyncio.sleep(ORPHAN_AFTER_S)
    code, found, verdict, truth.first_run = await asyncio.to_thread(truth.audit, "--orphan-after", "1s")
    # A bookie repairs an entry that a reader found damaged, possibly before it is read again.
    repaired = {one for one in found if one[:2] == ("DIGEST_MISMATCH", "warning")}
    assert {one[2] for one in repaired} <= truth.self_healing
    assert (found - repaired) | {(kind, "corrupt", *place) for kind, _, *place in repaired} == truth.wanted
    assert (code, verdict) == (2, "CORRUPT")


@pytest.mark.long_run
async def test_each_narrower_audit_finds_its_part_of_the_faults(truth: Truth) -> None:
    """The level standard finds missing entries of one bookie's ledgers; the level quick finds missing ends."""
    chosen = random.Random(f"bookie {SEED}").choice([f"bookie-{n}" for n in range(BOOKIES)])
    async with truth.session() as (_, client, _):
        names = {}
        for ledger_id in {one[2] for one in truth.wanted if one[2] is not None}:
            with suppress(BinderyError):
                segments = (await client.metadata(LedgerId(ledger_id))).segments
                names[ledger_id] = {bookie for segment in segments for bookie in segment.ensemble}
    # A bookie repairs a damaged entry after it was read.
    steady = {one for one in truth.wanted if one[2] not in truth.self_healing}
    late = ("MISSING_MARK", "NOT_HEALED")  # reported only after the first run, which has the times

    def among(found: set[Found]) -> set[Found]:
        return {one for one in found if one[2] not in truth.self_healing and one[0] not in late}

    presence = {one for one in steady if one[0] not in (*OF_THE_WHOLE, *OF_DEEP)}
    payloads = {one for one in presence if one[0] == "REPLICA_DIVERGENCE" and one[3] not in (0, ENTRIES - 1)}
    _, found, _, _ = await asyncio.to_thread(truth.audit, "--level", "standard", "--bookie", chosen)
    # A list does not show whether a copy is damaged, so it cannot disprove a mark without a reason.
    expected = {one for one in presence - payloads if one[0] != "FALSE_MARK"}
    assert among(found) == {one for one in expected if chosen in names.get(one[2] or 0, ())}
    _, found, _, _ = await asyncio.to_thread(truth.audit, "--level", "quick")
    inside = {one for one in presence if one[0] in OF_COPIES and one[3] not in (0, ENTRIES - 1)}
    assert among(found) == {one for one in presence - inside if one[0] != "FALSE_MARK"}


async def test_missing_marks_are_reported_applied_and_healed(truth: Truth) -> None:
    """The second run has the times of the first findings. It marks repairable ledgers, and the auditor heals them."""
    await asyncio.sleep(DELAY_S)
    async with truth.session() as (store, client, marks):
        faults = Faults(store, client, random.Random(SEED), claimed=truth.claimed)
        await faults.claim_healed(marks)
    lacking = {i for kind, _, i, *_ in truth.wanted if kind in ("MISSING_REPLICA", "DIGEST_MISMATCH", "STALE_ENSEMBLE")}
    missed: set[Found] = {
        ("NOT_HEALED" if i in truth.claimed else "MISSING_MARK", "under_replicated", i, None, None, None)
        for i in lacking
    }
    code, found, _, _ = await asyncio.to_thread(truth.audit, "--orphan-after", "1s", "--apply", "--yes")
    # A bookie repairs a damaged entry from other copies after it was read, so it may be repaired by now.
    assert {one for one in found if one[2] not in truth.self_healing} == {
        one for one in truth.wanted | missed if one[2] not in truth.self_healing
    }
    assert code == 2
    async with truth.session() as (_, _, marks):
        assert truth.healable - truth.self_healing <= {int(mark.ledger_id) async for mark in marks.list()}
        await marks.enable()
        began = time.monotonic()
        while truth.healable & {int(mark.ledger_id) async for mark in marks.list()}:
            assert time.monotonic() - began < HEAL_TIMEOUT_S, "the marked ledgers are not healed"
            await asyncio.sleep(0.5)
    code, found, _, run_id = await asyncio.to_thread(truth.audit, "--orphan-after", "1s")
    about = {one for one in found if one[2] in truth.healable}
    assert {kind for kind, *_ in about} <= {"ORPHAN_DATA"}, "healable ledgers are healed"
    assert all(severity == "info" for _, severity, *_ in about)
    assert code == 2, "faults that copying cannot heal remain"
    assert main(["diff", truth.first_run, run_id, "--out", str(truth.out)]) == 1

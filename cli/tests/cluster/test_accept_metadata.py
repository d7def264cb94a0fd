"""`bindery cluster accept-metadata`: what bookies reported is shown, and accepted only with --yes."""

import json
from typing import Any

import pytest
from bindery.cluster import accept_metadata
from bindery_core.errors import Conflict
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.ledgers.known_ledgers import KnownLedgers, KnownLedgersStore, RollbackReport
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.stores.memory import MemoryStore
from memory_cluster import LAYOUT, NOW_MS, MemoryCluster

REPORTS = {
    "b1": RollbackReport(NOW_MS, unknown=2, first=7, last=9, short_end=10, missing=5, ids_protected=True),
    "b2": RollbackReport(NOW_MS, unknown=1, first=2**62, last=2**62, long_end=2**62 + 1),
    "b3": RollbackReport(NOW_MS, unknown=0, first=0, last=0, missing=1),
}


class Suspicious:
    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster

    def report(self, reports: dict[str, RollbackReport]) -> None:
        async def work(store: MemoryStore) -> None:
            for bookie, report in reports.items():
                await (await known_in(store)).update(
                    lambda known, bookie=bookie, report=report: known.with_report(bookie, report)  # type: ignore[misc]
                )

        self.cluster.do(work)

    @property
    def known(self) -> KnownLedgers:
        async def work(store: MemoryStore) -> KnownLedgers:
            return (await (await known_in(store)).read())[0]

        return self.cluster.do(work)

    @property
    def events(self) -> list[HistoryEvent]:
        async def work(store: MemoryStore) -> list[HistoryEvent]:
            return list(await RecoveryRecords(store).history())

        return self.cluster.do(work)

    def run(self, *options: str) -> Any:
        return self.cluster.invoke("cluster", "accept-metadata", *options)


async def known_in(store: MemoryStore) -> KnownLedgersStore:
    return KnownLedgersStore(store, instance_id=await CookieStore(store, LAYOUT).instance_id())


@pytest.fixture
def suspicious(monkeypatch: pytest.MonkeyPatch) -> Suspicious:
    cluster = MemoryCluster(monkeypatch)
    cluster.register("b1", "b2", "b3", "b4")
    return Suspicious(cluster)


@pytest.mark.parametrize("options", [(), ("--yes",), ("--dry-run",)])
def test_without_a_report_there_is_nothing_to_accept(suspicious: Suspicious, options: tuple[str, ...]) -> None:
    result = suspicious.run(*options)
    assert (result.exit_code, result.stdout) == (0, "no bookie suspects a rollback of the metadata\n")
    assert json.loads(suspicious.run(*options, "--json").stdout) == {"state": "ok", "accepted": False}
    assert suspicious.events == []


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--dry-run",), 0), (("--dry-run", "--yes"), 0)])
def test_without_yes_the_reports_are_shown_and_nothing_is_accepted(
    suspicious: Suspicious, options: tuple[str, ...], code: int
) -> None:
    suspicious.report(REPORTS)
    result = suspicious.run(*options)
    assert result.exit_code == code
    heading, *rows = (line.split() for line in result.stdout.splitlines())
    assert heading == ["bookie", "since", "unknown", "first", "last", "ids", "protected", "missing"]
    date = ["2027-01-15", "08:00:00Z"]
    assert rows[:3] == [
        ["b1", *date, "2", "7", "9", "yes", "5"],
        ["b2", *date, "1", str(2**62), str(2**62), "NO", "not", "counted", "yet"],
        ["b3", *date, "0", "1"],
    ]
    assert "no report from b4: what they store without metadata is deleted too" in result.stdout
    assert ("nothing was accepted; --yes" in result.stderr) is (code == 1)
    assert dict(suspicious.known.reports) == REPORTS
    assert suspicious.events == []


def test_with_yes_the_ledgers_are_given_up(suspicious: Suspicious) -> None:
    suspicious.report(REPORTS)
    result = suspicious.run("--yes")
    assert result.exit_code == 0
    assert "accepted: the bookies delete these ledgers with their next garbage collection" in result.stdout
    known = suspicious.known
    assert (known.reports, known.short_end, known.long_end, known.accepted_ms) == ({}, 10, 2**62 + 1, NOW_MS)
    assert "@" in known.accepted_by
    [event] = suspicious.events
    assert (event.kind, event.fields["unknown"], event.fields["missing"]) == ("metadata_accepted", 3, 6)


def test_the_json_has_what_is_deleted(suspicious: Suspicious) -> None:
    suspicious.report({"b1": REPORTS["b1"], "b3": REPORTS["b3"]})
    expected = {
        "state": "metadata_rollback_suspected",
        "accepted": False,
        "bookies": [
            {
                "bookie_id": "b1",
                "since_ms": NOW_MS,
                "unknown": 2,
                "first_ledger_id": 7,
                "last_ledger_id": 9,
                "ids_protected": True,
                "missing": 5,
            },
            {
                "bookie_id": "b3",
                "since_ms": NOW_MS,
                "unknown": 0,
                "first_ledger_id": None,
                "last_ledger_id": None,
                "ids_protected": False,
                "missing": 1,
            },
        ],
        "unreported": ["b2", "b4"],
    }
    result = suspicious.run("--json")
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (1, expected, "")
    accepted = json.loads(suspicious.run("--json", "--yes").stdout)
    assert accepted == {**expected, "state": "ok", "accepted": True}


def test_a_report_that_comes_meanwhile_is_not_accepted_unseen(
    suspicious: Suspicious, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspicious.report({"b1": REPORTS["b1"]})
    real = accept_metadata.accept_metadata

    async def overtaken(store: MemoryStore, **options: Any) -> KnownLedgers:
        await (await known_in(store)).update(lambda known: known.with_report("b2", REPORTS["b2"]))
        return await real(store, **options)

    monkeypatch.setattr(accept_metadata, "accept_metadata", overtaken)
    result = suspicious.run("--yes")
    assert isinstance(result.exception, Conflict)
    assert "accepted:" not in result.stdout
    assert sorted(suspicious.known.reports) == ["b1", "b2"]

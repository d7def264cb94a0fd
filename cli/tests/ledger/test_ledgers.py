"""`bindery ledgers orphans` passes its options on."""

from typing import Any

import pytest
from bindery.common import cluster_command
from bindery.ledger import orphans
from bindery.ledger.ledgers import app
from typer.testing import CliRunner


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, dict[str, Any]]]:
    """Record the calls of the implementation, which returns 1."""
    recorded: list[tuple[object, dict[str, Any]]] = []

    async def run_orphans(cluster: object, **options: Any) -> int:
        recorded.append((cluster, options))
        return 1

    def run_on(zookeeper: str, ledgers_root: str, work: Any) -> Any:
        coroutine = work("the cluster")
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("the command waits")

    monkeypatch.setattr(orphans, "run_orphans", run_orphans)
    monkeypatch.setattr(cluster_command, "run_on", run_on)
    return recorded


def test_by_default_orphans_of_an_hour_are_listed_only(calls: list[tuple[object, dict[str, Any]]]) -> None:
    assert CliRunner().invoke(app, ["orphans"]).exit_code == 1
    assert calls == [
        (
            "the cluster",
            {"delete": False, "yes": False, "older_than_s": 3600.0, "everything": False, "as_json": False},
        )
    ]


def test_all_options_are_passed_on(calls: list[tuple[object, dict[str, Any]]]) -> None:
    CliRunner().invoke(app, ["orphans", "--delete", "--yes", "--older-than", "1d", "--all", "--json"])
    assert [options for _, options in calls] == [
        {"delete": True, "yes": True, "older_than_s": 86400.0, "everything": True, "as_json": True}
    ]


def test_a_wrong_duration_is_refused(calls: list[tuple[object, dict[str, Any]]]) -> None:
    assert CliRunner().invoke(app, ["orphans", "--older-than", "soon"]).exit_code != 0
    assert calls == []

"""Selection of recently verified ledgers to skip, and the stored plan of a run."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.verified_records import Verified
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.options import Options
from bindery_spark.audit.plan import make_plan
from bindery_spark.audit.planning import BegunRun, Skipped, begun, recently_verified

NOW_MS = 1_000_000


@pytest.mark.parametrize(
    ("options", "row", "record", "is_recent"),
    [
        pytest.param({}, {}, {}, True, id="verified"),
        pytest.param({"since_verified_ms": None}, {}, {}, False, id="not asked for"),
        pytest.param({}, {"state": "open"}, {}, False, id="open"),
        pytest.param({}, {"metadata_version": 8}, {}, False, id="changed"),
        pytest.param({}, {}, {"level": "standard"}, False, id="less deeply"),
        pytest.param({"level": "quick"}, {}, {"level": "standard"}, True, id="more deeply"),
        pytest.param({}, {}, {"verified_at_ms": NOW_MS - 101}, False, id="too long ago"),
        pytest.param({}, {}, {"verified_at_ms": NOW_MS - 100}, False, id="exactly as long ago"),
        pytest.param({}, {}, {"verified_at_ms": NOW_MS - 99}, True, id="within the window"),
        pytest.param({}, {"ledger_id": 2}, {}, False, id="another ledger"),
    ],
)
def test_a_ledger_is_skipped_if_it_was_verified_recently_as_deeply_and_did_not_change(
    options: dict, row: dict, record: dict, is_recent: bool
) -> None:
    ledger = SimpleNamespace(**{"ledger_id": 1, "state": "closed", "metadata_version": 7, **row})
    fields = {"level": "deep", "verified_at_ms": NOW_MS - 1, "run_id": "r", "metadata_version": 7, **record}
    verified = {LedgerId(1): Verified(LedgerId(1), **fields)}
    found = recently_verified([ledger], verified, Options(**{"since_verified_ms": 100, **options}), now_ms=NOW_MS)
    assert found == (verified if is_recent else {})


def test_a_resumed_run_has_the_stored_plan_and_facts(tmp_path: Path) -> None:
    plan, facts = make_plan([]), Facts("c-1", 7_000, {"b": 5}, {9: 3})
    directory = RunDirectory(tmp_path / "r-1")
    directory.write_run(
        {
            "options": asdict(Options()),
            "began_ms": 4,
            "facts": facts.to_json(),
            "plan": plan.to_json(),
            "skipped": {"ledgers": 2, "oldest_ms": 3},
        }
    )
    assert begun(directory) == BegunRun("r-1", 4, facts, plan, Skipped(2, 3))
    assert (begun(directory).run.run_id, begun(directory).run.now_ms) == ("r-1", 4)

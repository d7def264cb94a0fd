"""Goal: the load of one subscription, its history and its verdict work together with real processes."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_e2e.judging.history import read_history
from bindery_e2e.reporting.report import Report, text_summary
from bindery_e2e.runs.ordering import run_ordering
from bindery_e2e.traffic.clients import TrafficError
from bindery_e2e.traffic.ordering import ENDS, OrderingSettings, Phases

SECONDS = 8.0


@pytest.fixture(scope="module")
def url() -> Any:
    with ThrowawayCluster(bookies=3) as cluster:
        yield cluster.url


def played(url: str, folder: Path, **changes: Any) -> Report:
    topic = f"public/default/{folder.name}"
    settings = OrderingSettings(seed=5, seconds=SECONDS, storm_s=4.0, calm_s=4.0, topic=topic, **changes)
    return run_ordering(settings, folder, facts={"command": "a test"}, url=url)


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(600)  # a busy machine may need minutes
@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_a_correct_broker_keeps_the_order_of_the_type(kind: str, url: str, tmp_path: Path) -> None:
    report = played(url, tmp_path, kind=kind)
    assert not report.judgement.findings, text_summary(report)
    counts = report.judgement.counts
    assert counts["delivered"] > counts["acknowledged"] > 500
    ops = Counter(record.values["op"] for record in read_history(report.history) if record.type == "invoke")
    assert min(ops[op] for op in ("nack", "leave", "ack")) > 0, ops


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_subscription_without_an_order_breaks_the_order_of_keys(url: str, tmp_path: Path) -> None:
    report = played(url, tmp_path, kind="shared", order="key")
    kinds = {finding.kind for finding in report.judgement.findings}
    # Whether two consumers hold one key at a moment depends on the speed of the machine.
    assert {"out-of-order"} <= kinds <= {"out-of-order", "held-twice"}, text_summary(report)


@pytest.mark.integration
def test_a_topic_that_is_not_empty_is_refused(url: str, tmp_path: Path) -> None:
    settings = OrderingSettings(seed=1, seconds=0.5, keys=4, producers=1, topic="public/default/used", kind="shared")
    run_ordering(settings, tmp_path / "first", facts={}, url=url)
    with pytest.raises(TrafficError, match="holds messages already"):
        run_ordering(settings, tmp_path / "second", facts={}, url=url)


def test_lives_end_outside_of_calms_and_consumers_vanish_long_before() -> None:
    settings = OrderingSettings()
    phases = Phases(settings, began=100.0)
    rng = random.Random(3)
    ends: Counter[str] = Counter()
    for _ in range(5_000):
        at, slot = 100.0 + rng.uniform(0, 60), rng.randrange(5)
        ends_at, how = phases.end_of_life(at, slot, rng)
        ends[how] += 1
        begin, end = phases.calm_of(ends_at)
        assert ends_at > at or slot == 0 or at >= begin
        if begin <= ends_at < end:
            assert ends_at <= begin + 0.1, "only the begin of a calm ends lives"
            assert slot > 0
        if how == "vanish":
            assert ends_at + settings.short_ack_timeout_ms / 1000 + 1 < begin
    assert set(ends) == set(ENDS)

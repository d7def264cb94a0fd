"""Alerts and dashboard query metrics that the services really have; every alert has a complete runbook.

promtool is not required: promql-parser parses and types the expressions. Names and labels are compared with the metrics
of a real cluster after writes and reads.
"""

import asyncio
import re
import time

import httpx
import pytest
from bindery.standalone.plan import BOOKIE_HTTP_PORT, HOST
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_metadata.recovery.last_audits import VERDICTS, LastAudit, LastAudits
from bindery_metadata.recovery.last_backup import LastBackup, LastBackupStore
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from monitoring_files import (
    CHART,
    RUNBOOKS,
    TARGET_LABELS,
    ZOOKEEPER_SERIES,
    alerts,
    dashboard,
    dashboard_expressions,
    selectors,
)

ALERTS = alerts()
EXPRESSIONS = {name: str(rule["expr"]) for name, rule in ALERTS.items()} | dashboard_expressions()
SEVERITIES = {"critical", "warning"}
RUNBOOK_PARTS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "Resolved when"]
LAST_BACKUP = "bindery_last_backup_age_seconds"
READ_S_MAX = 120.0
"""Maximum seconds until an auditor has read the result of a backup, which it does every 30 s."""
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? \S+")

Series = dict[str, set[str]]


async def record_results(zookeeper: str) -> None:
    """Record the result of an audit and of a backup, as these do at their end."""
    store = await ZooKeeperStore.connect(zookeeper)
    audit = LastAudit(
        level="deep",
        run_id="r",
        verdict="HEALTHY",
        exit_code=0,
        began_ms=0,
        ended_ms=0,
        copies_expected=0,
        copies_verified=0,
        bytes_read=0,
        oldest_verified_ms=0,
    )
    await LastAudits(store).put(audit)
    await LastBackupStore(store).succeeded(LastBackup(ended_ms=1, name="a"))
    await store.close()


@pytest.fixture(scope="module")
def shown() -> Series:
    """Metric -> labels of its samples, of a bookie, a broker and an auditor."""
    with ThrowawayCluster(bookies=3) as cluster:
        topic = f"{cluster.url}/v1/topics/public/default/alerts"
        ids = httpx.post(f"{topic}/messages", content=b"one").raise_for_status().json()
        receive = {"consumer": "c", "initial": "earliest"}
        httpx.post(f"{topic}/subscriptions/s/receive", json=receive).raise_for_status()
        httpx.post(f"{topic}/subscriptions/s/ack", json=ids).raise_for_status()
        asyncio.run(record_results(cluster.zookeeper))
        httpx.get(f"{cluster.auditor_url()}/v1/recovery/status").raise_for_status()  # reads the results of audits
        bookie = f"http://{HOST}:{BOOKIE_HTTP_PORT + cluster.port_offset}"
        deadline_s = time.monotonic() + READ_S_MAX
        while LAST_BACKUP not in httpx.get(f"{cluster.auditor_url()}/metrics").text:
            assert time.monotonic() < deadline_s, "the auditor does not read the result of the backup"
            time.sleep(1)
        pages = [httpx.get(f"{url}/metrics").text for url in (bookie, cluster.url, cluster.auditor_url())]
    series: Series = {name: set(labels) for name, labels in ZOOKEEPER_SERIES.items()}
    for line in "\n".join(pages).splitlines():
        if match := SAMPLE.fullmatch(line):
            series.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return series


@pytest.mark.integration
def test_every_queried_series_exists_with_its_labels(shown: Series) -> None:
    for where, expression in EXPRESSIONS.items():
        for name, labels in selectors(expression):
            assert name in shown, f"{where}: no service shows {name}"
            assert labels - TARGET_LABELS <= shown[name], f"{where}: {name} has no such label"


@pytest.mark.integration
def test_texts_name_only_labels_that_the_alert_has(shown: Series) -> None:
    for name, rule in ALERTS.items():
        there = set().union(*(shown[series] for series, _ in selectors(rule["expr"])), TARGET_LABELS)
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert used <= there, name


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_expression_selects_by_namespace_and_job(where: str) -> None:
    """Otherwise the alert of one release would fire for the pods of another one."""
    found = list(selectors(EXPRESSIONS[where]))
    assert found
    assert all({"namespace", "job"} <= labels for _, labels in found)


def test_a_wrong_expression_is_refused() -> None:
    for wrong in ("rate(up)", "up{a=}", "sum by pod (up)", "no_such_function(up)"):
        with pytest.raises(ValueError):
            list(selectors(wrong))


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_complete(name: str) -> None:
    rule = ALERTS[name]
    assert rule["alert"] == name
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in SEVERITIES
    assert set(rule["annotations"]) == {"summary", "description"}
    assert "<" not in str(rule["annotations"]), "a word that the template does not know"
    source = next((CHART / "rules").glob(f"*/{name}.yaml")).read_text()
    assert "auditor>" not in source, "bookies may run the auditor's part: select by <any>"


def test_every_verdict_of_an_audit_but_healthy_has_an_alert() -> None:
    selector = re.compile(r'bindery_last_audit_verdict\{[^}]*\bverdict="([^"]*)"')
    told = [verdict for rule in ALERTS.values() for verdict in selector.findall(rule["expr"])]
    assert sorted(told) == sorted(set(VERDICTS) - {"HEALTHY"})


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Bindery*.md")} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_a_runbook_has_all_its_parts(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text()
    title, severity = re.match(r"# (\w+)\n\n\*\*(\w+)\*\* after ", text).groups()  # type: ignore[union-attr]
    assert (title, severity) == (name, ALERTS[name]["labels"]["severity"])
    assert f"** after {ALERTS[name]['for']}: " in text
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == RUNBOOK_PARTS
    assert "    kubectl " in text, "a command to copy"


def test_the_index_lists_all_runbooks() -> None:
    text = (RUNBOOKS / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", text, re.MULTILINE) == [
        (name, ALERTS[name]["labels"]["severity"]) for name in sorted(ALERTS)
    ]


def test_panels_do_not_overlap_and_have_descriptions() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_dashboard_has_the_required_series() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Health", "Throughput", "Latency", "Disks", "Recovery", "Brokers", "Consumers", "Processes"]

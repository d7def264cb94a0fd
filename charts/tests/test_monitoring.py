"""The chart's objects for Prometheus and Grafana."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring_files import CHART, alerts, dashboard
from rendering import documents, helm_program

KINDS = {"PodMonitor", "PrometheusRule"}
DEFINED = {*KINDS, "HTTPRoute"}
"""Kinds that Kubernetes does not define itself."""
ALL = (
    'metrics={"podMonitor": {"enabled": true, "authorization": {"credentials": {"name": "a", "key": "b"}}}, '
    '"rules": {"enabled": true}}',
    "zookeeper.metrics.enabled=true",
    "security.enabled=true",
    'broker.httpRoute={"enabled": true, "parentRefs": [{"name": "a", "namespace": "b", "sectionName": "https"}], '
    '"hosts": ["bindery.example.org"]}',
)
"""Settings with which all of them are rendered, with all of their fields."""
OF_PARTS = {"BinderyBackupFailed", "BinderyBackupOverdue", "BinderyZooKeeperServerDown", "BinderyZooKeeperSlow"}
"""Alerts about parts that are not enabled by default."""
DEFINITIONS = sorted((Path(__file__).parent / "crds").glob("*.yaml"))


def helm(*settings: str) -> subprocess.CompletedProcess[str]:
    words = [helm_program(), "template", "bindery", str(CHART), "--namespace", "n", "--kube-version", "1.32.0"]
    options = [word for setting in settings for word in ("--set-json", setting)]
    return subprocess.run([*words, *options], capture_output=True, text=True, timeout=60)


def render(*settings: str) -> list[dict[str, Any]]:
    done = helm(*settings)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [one for one in objects if one["kind"] == kind]
    assert len(found) == 1
    return found[0]


def rules_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups = only(objects, "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_monitoring_objects_are_not_created_by_default() -> None:
    objects = render()
    assert not KINDS & {one["kind"] for one in objects}
    assert not [one for one in objects if "dashboard" in one["metadata"]["name"]]


def test_the_monitor_selects_each_service_and_the_port_that_serves_metrics() -> None:
    objects = render('metrics.podMonitor={"enabled": true, "labels": {"team": "a"}}')
    monitor = only(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["team"] == "a"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (job,) = endpoint["relabelings"]
    selected = {}
    for one in objects:
        if one["kind"] not in ("StatefulSet", "Deployment"):
            continue
        labels = one["spec"]["template"]["metadata"]["labels"]
        wanted = monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (expression,) = monitor["spec"]["selector"]["matchExpressions"]
        if wanted and labels[expression["key"]] in expression["values"]:
            ports = [port["name"] for port in one["spec"]["template"]["spec"]["containers"][0]["ports"]]
            name = labels[
                job["sourceLabels"][0]
                .removeprefix("__meta_kubernetes_pod_label_")
                .replace("_", ".", 2)
                .replace("app.kubernetes.io_", "app.kubernetes.io/")
            ]
            selected[job["replacement"].replace("$1", name)] = endpoint["port"] in ports
    assert selected == {"bindery-bookie": True, "bindery-broker": True, "bindery-auditor": True}


def test_zookeeper_is_scraped_at_its_own_port_if_it_serves_metrics() -> None:
    monitor = 'metrics.podMonitor={"enabled": true}'
    objects = render(monitor, "zookeeper.metrics.enabled=true", "networkPolicy.enabled=true")
    services, zookeeper = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (services["port"], zookeeper["port"], zookeeper["relabelings"][0]) == (
        "http", "metrics", {"targetLabel": "job", "replacement": "bindery-zookeeper"}
    )  # fmt: skip
    (expression,) = only(objects, "PodMonitor")["spec"]["selector"]["matchExpressions"]
    assert "zookeeper" in expression["values"]
    (server,) = [
        one for one in objects if one["kind"] == "StatefulSet" and one["metadata"]["name"].endswith("zookeeper")
    ]
    ports = server["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": "metrics", "containerPort": 7000} in ports
    (files,) = [one for one in objects if one["kind"] == "ConfigMap" and "zoo.cfg" in one["data"]]
    assert "metricsProvider.httpPort=7000\n" in files["data"]["zoo.cfg"]
    (policy,) = [
        one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("zookeeper")
    ]
    assert [{"port": "metrics", "protocol": "TCP"}] in [rule["ports"] for rule in policy["spec"]["ingress"]]
    for off in (
        (),
        ("zookeeper.metrics.enabled=true", "zookeeper.enabled=false", 'zookeeper.external.servers=["a:1"]'),
    ):
        objects = render(monitor, *off)
        assert len(only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]) == 1
        assert "metricsProvider" not in str(objects)


def test_scrapes_of_guarded_metrics_have_credentials() -> None:
    guarded = 'broker.config.auth={"metrics": true, "tokensKeysFile": "/keys"}'
    assert "metrics.podMonitor.authorization is empty" in helm('metrics.podMonitor={"enabled": true}', guarded).stderr
    credentials = {"credentials": {"name": "prometheus", "key": "token"}}
    monitor = f"metrics.podMonitor={json.dumps({'enabled': True, 'authorization': credentials})}"
    (endpoint,) = only(render(monitor, guarded), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == credentials


def test_every_alert_is_rendered_with_its_values() -> None:
    settings = ["bookie.replicas=7", "broker.replicas=2", "audit.enabled=true", 'metrics.rules={"enabled": true}']
    more = ["backup.enabled=true", "backup.overdueAfterSeconds=4711", "zookeeper.metrics.enabled=true"]
    rules = rules_of(render(*settings, *more, "zookeeper.replicas=3"))
    assert rules["BinderyBackupOverdue"]["expr"].count("> 4711") == 2
    assert rules["BinderyZooKeeperServerDown"]["expr"].endswith("< 3")
    assert set(rules) == set(alerts())
    assert "< 7" in rules["BinderyBookieDown"]["expr"]
    assert "< 2" in rules["BinderyBrokerDown"]["expr"]
    assert "< 3" in rules["BinderyTooFewBookies"]["expr"], "the ensemble"
    for name, rule in rules.items():
        assert 'namespace="n", job="bindery-' in rule["expr"] or 'namespace="n", job=~"bindery-(' in rule["expr"]
        assert not set("<>") & set("".join(rule["annotations"].values())), "a placeholder was left"
        assert rule["labels"]["release"] == "bindery"
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"


def test_the_overdue_alert_requires_a_schedule_and_accepts_deeper_audits() -> None:
    rules = 'metrics.rules={"enabled": true}'
    assert set(alerts()) - set(rules_of(render(rules))) == {"BinderyAuditOverdue", *OF_PARTS}
    scheduled = rules_of(render(rules, "audit.enabled=true"))["BinderyAuditOverdue"]["expr"]
    assert (scheduled.count("> 777600\n"), scheduled.count("> 777600)")) == (1, 1)
    assert scheduled.count('level=~"deep"') == 2
    for level, deep_enough in (("standard", "standard|deep"), ("quick", "quick|standard|deep")):
        changed = [f'audit.level="{level}"', "audit.overdueAfterSeconds=10000000"]
        expression = rules_of(render(rules, "audit.enabled=true", *changed))["BinderyAuditOverdue"]["expr"]
        assert (expression.count(f'level=~"{deep_enough}"'), expression.count("> 10000000")) == (2, 2)


def test_values_may_name_the_overdue_alert_without_a_schedule() -> None:
    changed = {"enabled": True, "merge": {"BinderyAuditOverdue": {"for": "1h"}}, "disabled": ["BinderyAuditIncomplete"]}
    assert set(alerts()) - set(rules_of(render(f"metrics.rules={json.dumps(changed)}"))) == {
        "BinderyAuditOverdue",
        "BinderyAuditIncomplete",
        *OF_PARTS,
    }


def test_the_address_of_runbooks_can_be_set() -> None:
    rules = rules_of(render('metrics.rules={"enabled": true, "runbookUrl": "https://example.org/r/"}'))
    assert rules["BinderyNoBroker"]["annotations"]["runbook_url"] == "https://example.org/r/BinderyNoBroker.md"


def test_alerts_can_be_omitted_changed_and_added() -> None:
    objects = render(
        'metrics.rules={"enabled": true, "disabled": ["BinderyBrokerDown"], "merge": {"BinderyBookieJournalSlow": '
        '{"for": "1h", "labels": {"severity": "info"}}}, "groups": [{"name": "mine", "rules": [{"alert": "Mine", '
        '"expr": "vector(1)"}]}]}'
    )
    rules = rules_of(objects)
    assert "BinderyBrokerDown" not in rules
    assert "Mine" in rules
    slow = rules["BinderyBookieJournalSlow"]
    assert (slow["for"], slow["labels"]["severity"], slow["labels"]["namespace"]) == ("1h", "info", "n")
    assert slow["annotations"]["summary"]


@pytest.mark.parametrize("member", ['"disabled": ["BinderyNope"]', '"merge": {"BinderyNope": {"for": "1h"}}'])
def test_an_unknown_alert_is_refused_by_its_name(member: str) -> None:
    done = helm('metrics.rules={"enabled": true, ' + member + "}")
    assert done.returncode != 0
    assert "an unknown alert: BinderyNope. Known alerts: BinderyAuditFoundDamage" in done.stderr


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("metrics.podMonitor.enabeld=true", "enabeld"),
        ("metrics.podMonitor.interval=30", "interval"),
        ('metrics.podMonitor.interval="often"', "interval"),
        ('metrics.rules.disabled="BinderyNoBroker"', "disabled"),
        ('metrics.rules.merge={"BinderyNoBroker": {"fro": "1h"}}', "fro"),
        ('metrics.dashboard.labels={"grafana_dashboard": 1}', "grafana_dashboard"),
        ("metrics.serviceMonitor={}", "serviceMonitor"),
    ],
)
def test_wrong_values_are_refused(setting: str, key: str) -> None:
    done = helm(setting)
    assert done.returncode != 0
    assert "metrics" in done.stderr
    assert key in done.stderr


def test_the_dashboard_is_rendered_unchanged() -> None:
    objects = render('metrics.dashboard={"enabled": true, "annotations": {"grafana_folder": "Messaging"}}')
    (board,) = [one for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "bindery-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["metadata"]["annotations"] == {"grafana_folder": "Messaging"}
    assert json.loads(board["data"]["bindery.json"]) == dashboard()


def test_the_stand_in_definitions_have_every_field_that_is_rendered() -> None:
    """Otherwise a dry run would accept wrong fields or refuse right ones."""
    objects = render(*ALL)
    for path in DEFINITIONS:
        definition = yaml.safe_load(path.read_text())["spec"]
        made = only(objects, definition["names"]["kind"])
        assert made["apiVersion"] == f"{definition['group']}/{definition['versions'][0]['name']}"
        _check(made["spec"], definition["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec")


def _check(value: Any, schema: dict[str, Any], where: str) -> None:
    if isinstance(value, dict):
        if "properties" in schema:
            assert set(value) <= set(schema["properties"]), where
            for key, member in value.items():
                _check(member, schema["properties"][key], f"{where}.{key}")
    elif isinstance(value, list):
        assert schema["type"] == "array", where
        for member in value:
            _check(member, schema["items"], where)
    else:
        wanted = {"string": str, "boolean": bool, "integer": int}.get(schema.get("type", ""), object)
        assert isinstance(value, wanted), where


@pytest.fixture
def defined() -> Iterator[None]:
    """Make all kinds available: those of an installed operator and Gateway API, or temporary stand-in definitions."""
    made = []
    for path in DEFINITIONS:
        done = subprocess.run(["kubectl", "create", "-f", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or "AlreadyExists" in done.stderr, done.stderr
        made += [str(path)] * (done.returncode == 0)
    for path in DEFINITIONS:
        name = yaml.safe_load(path.read_text())["metadata"]["name"]
        wait = ["kubectl", "wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s"]
        subprocess.run(wait, check=True, capture_output=True, timeout=60)
    yield
    for one in made:
        subprocess.run(["kubectl", "delete", "-f", one, "--wait=true"], check=True, capture_output=True, timeout=60)


@pytest.mark.kubernetes
@pytest.mark.usefixtures("defined")
def test_kubernetes_accepts_the_rendered_objects() -> None:
    objects = render(*ALL)
    wanted = [one for one in objects if one["kind"] in DEFINED]
    assert len(wanted) == len(DEFINED)
    for one in wanted:
        one["metadata"]["namespace"] = "default"
    assert _try_out(wanted) == ""
    wanted[0]["spec"]["no-such-field"] = 1
    assert "no-such-field" in _try_out(wanted)


def _try_out(objects: list[dict[str, Any]]) -> str:
    """Kubernetes' error message for the objects."""
    command = ["kubectl", "create", "--dry-run=server", "--validate=strict", "-f", "-"]
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})  # YAML would make a boolean of "n"
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    return done.stderr

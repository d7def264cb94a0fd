"""Read the chart's alerts and dashboard, and the series that their PromQL queries."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "bindery"
RUNBOOKS = ROOT / "docs" / "runbooks"
PLACEHOLDERS = {
    "<bookie>": 'namespace="n", job="bindery-bookie"',
    "<broker>": 'namespace="n", job="bindery-broker"',
    "<any>": 'namespace="n", job=~"bindery-(auditor|bookie|broker)"',
    "<zookeeper>": 'namespace="n", job="bindery-zookeeper"',
    "<zookeepers>": "1",
    "<backupOverdueSeconds>": "10800",
    "<bookies>": "4",
    "<brokers>": "1",
    "<ensemble>": "3",
    "<auditLevels>": "deep",
    "<auditOverdueSeconds>": "777600",
    "<fullname>": "bindery",
}
"""Values that templates/monitoring/prometheus-rule.yaml inserts for a release named bindery."""

ZOOKEEPER_SERIES: dict[str, set[str]] = {"avg_latency": set(), "znode_count": set()}
"""Series of ZooKeeper's PrometheusMetricsProvider that alerts query, with their labels.

The provider is not among the libraries of the tests. Source: ZooKeeper's Monitor Guide, "Alerting with Prometheus", and
ServerMetrics of ZooKeeper 3.9.
"""

TARGET_LABELS = frozenset({"namespace", "job", "pod", "container", "instance"})
"""Labels of every series that a PodMonitor scraped."""


def alerts() -> dict[str, dict[str, Any]]:
    """File name -> rule."""
    found = {}
    for path in sorted((CHART / "rules").glob("*/*.yaml")):
        text = path.read_text()
        for word, meaning in PLACEHOLDERS.items():
            text = text.replace(word, meaning)
        found[path.stem] = yaml.safe_load(text)
    return found


def dashboard() -> dict[str, Any]:
    board = json.loads((CHART / "dashboards" / "bindery.json").read_text())
    assert isinstance(board, dict)
    return board


def dashboard_expressions() -> dict[str, str]:
    """Expressions by panel and target. Grafana's variables are replaced by a duration."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m")
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Names of the series that `expression` queries, and the labels that it selects by.

    Raises ValueError for invalid PromQL.
    """
    found: list[tuple[str, set[str]]] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = [*node.matchers.matchers, *(one for group in node.matchers.or_matchers for one in group)]
            found.append((node.name, {one.name for one in matchers}))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return iter(found)

"""The documents list every metric of topics and of the broker, and no other."""

import re
from pathlib import Path

from broker_harness import TOPIC, Harness, ids

DOCS = Path(__file__).parents[3] / "docs"
LEFT_OUT = "## Left out"
NAME = re.compile(r"`((?:pulsar|bindery_broker)_[A-Za-z0-9_]+)`")


async def test_the_documents_name_every_metric(broker: Harness) -> None:
    await broker.produce("a")
    await broker.ack(ids(await broker.receive()))
    await broker.client.get(TOPIC)
    page = (broker.metrics.render() + await broker.topic_page()).decode()
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    shown = {name for name in shown if not name.endswith("_created")}
    text = (DOCS / "broker-metrics.md").read_text() + (DOCS / "pulsar-metrics.md").read_text().partition(LEFT_OUT)[0]
    names = [name for row in text.splitlines() if row.startswith("| `") for name in NAME.findall(row.split(" | ")[0])]
    assert sorted(names) == sorted(shown)

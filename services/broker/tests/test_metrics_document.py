"""The document lists every metric of topics and of the broker, and no other."""

import re
from pathlib import Path

from broker_harness import TOPIC, Harness, ids

DOCUMENT = Path(__file__).parents[3] / "docs" / "broker-metrics.md"
NAME = re.compile(r"`((?:pulsar|bindery_broker)_[a-z_]+)(?:\{[a-z,]+\})?`")


async def test_the_document_names_every_metric(broker: Harness) -> None:
    await broker.produce("a")
    await broker.ack(ids(await broker.receive()))
    await broker.client.get(TOPIC)
    page = (broker.metrics.render() + await broker.topic_page()).decode()
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    shown = {name for name in shown if not name.endswith("_created")}
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in NAME.findall(row)} == shown

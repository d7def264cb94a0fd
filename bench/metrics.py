"""Measure a page of metrics of a broker with many topics. No network or disk.

    .venv/bin/python bench/metrics.py
    .venv/bin/python bench/metrics.py --topics 10000 --shown 0 1000 10000

Each topic has one subscription and one stored message, of which one in ten was delivered. A page is collected as for a
request to /metrics, in slices between which other tasks run. Shown for each maximum number of topics with series of
their own: the CPU time of the page, the longest slice (other tasks wait that long), the size of the page and the number
of its series. Best of three pages.
"""

import argparse
import asyncio
import gc
import logging
import time

import structlog
from bindery_broker.broker import Broker, Components
from bindery_broker.main import GC_THRESHOLD
from bindery_broker.namespaces.records import encode, new_namespace, new_tenant
from bindery_broker.settings import BrokerSettings
from bindery_broker.topic_metrics import TopicMetrics
from bindery_client.memory.memory import MemoryLedgerClient
from bindery_kit.observability.metrics import Metrics
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import Create
from bindery_pulsar.message_codec import OutgoingMessage
from bindery_pulsar.topic_name import TopicName

PAGES = 3
CLUSTER = "bindery"


async def broker_with(topics: int, store: MemoryStore) -> Broker:
    for path, record in (
        ("/admin", {}),
        ("/admin/policies", {}),
        ("/admin/policies/public", new_tenant(admin_roles=[], allowed_clusters=[CLUSTER])),
        ("/admin/policies/public/default", new_namespace(cluster=CLUSTER)),
    ):
        await store.multi([Create(path, encode(record))])
    loop = asyncio.get_running_loop()
    components = Components(
        client=MemoryLedgerClient(),
        store=store,
        leases=Leases(store),
        clock=lambda: time.time_ns() // 1_000_000,
        now=loop.time,
        metrics=Metrics("broker", with_process=False),
    )
    broker = Broker(BrokerSettings(topics_max=topics), components, url="http://bench")
    for number in range(topics):
        name = TopicName.of(tenant="public", namespace="default", local=f"topic-{number:05}")
        await broker.locate(name, create=True)
        topic = await broker.topic(name, create=True)
        subscription, _ = await topic.subscribe("subscription")
        await topic.publish([OutgoingMessage(payload=b"x" * 100)], producer=None, batch=False)
        if number % 10 == 0:
            subscription.statistics.delivered.add(1, 100, now=loop.time())
    return broker


class Slices:
    """Processor time of the slices of one page."""

    def __init__(self) -> None:
        self.longest_s = self.worked_s = 0.0

    async def measure(self, metrics: TopicMetrics) -> None:
        """Collect a page, and measure each turn of the event loop meanwhile."""
        task = asyncio.ensure_future(metrics.collect())
        while not task.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            turn_s = time.thread_time() - began
            self.worked_s += turn_s
            self.longest_s = max(self.longest_s, turn_s)
        await task


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=10_000, help="number of topics (default: %(default)s)")
    parser.add_argument("--shown", type=int, nargs="+", default=[0, 1_000, 10_000], help="maxima to measure")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    broker = await broker_with(options.topics, MemoryTree().connect())
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    print(f"{options.topics} topics, milliseconds of processor time")
    print(f"{'shown':>8} {'page':>8} {'slice':>8} {'MiB':>8} {'series':>8}")
    for shown in options.shown:
        best = None
        for _ in range(PAGES):
            metrics, slices = TopicMetrics(topics_max=shown), Slices()
            metrics.watch(broker)
            await slices.measure(metrics)
            if best is None or slices.worked_s < best.worked_s:
                best = slices
        page = metrics.render()
        series = sum(not line.startswith(b"#") for line in page.splitlines())
        assert best is not None
        print(f"{shown:8} {best.worked_s * 1000:8.0f} {best.longest_s * 1000:8.1f} {len(page) / 2**20:8.1f} {series:8}")
    await broker.close()


if __name__ == "__main__":
    asyncio.run(main())

"""ClusterState: everything that a hostile page could change, as a flat table that can be compared.

| part      | what is compared                                                                                         |
|-----------|----------------------------------------------------------------------------------------------------------|
| ZooKeeper | path, content, version and number of changes of the children of every znode, except `MOVING`; of the     |
|           | records of brokers, which contain their load, whether one is draining                                    |
| broker    | list of topics; for each: entries, ledgers, messages in and out, subscriptions with cursors, consumers   |
|           | and leases                                                                                               |
| bookies   | state, read-only, suspended compactions, ledgers, running compactions and scrubs, entries written        |
| auditor   | bookies with their membership, history, whether recovery is enabled, delay of lost bookies, audits       |

A new cluster checks its ledgers once, some seconds after the election of its auditor: compare after `wait_settled`.
"""

import json
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx
from bindery.standalone.plan import BOOKIE_HTTP_PORT
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_metadata.stores.zookeeper import ZooKeeperStore

MOVING: Final = ("/bindery/recovery/workers/",)
"""Prefixes of the znodes that change by themselves: a worker of recovery reports its progress every 10 seconds."""
BROKERS: Final = "/loadbalance/brokers/"
MOVING_MEMBERS: Final = ("nextMs", "checkedMs")
"""Members of a bookie's responses that change by themselves: the time of the next scrub is computed anew for each
request from two clocks; the check whether the metadata was rolled back runs every minute."""
RATES_AND_AGES: Final = ("_per_s", "_age_ms", "_in_ms", "_at")
"""Ends of the names of members of a topic's statistics that change by themselves: times are computed from two
clocks."""
OF_BOOKIES: Final = (
    "/api/v1/bookie/state", "/api/v1/bookie/state/readonly", "/api/v1/bookie/gc/suspend_compaction",
    "/api/v1/bookie/gc", "/api/v1/bookie/entry_location_compact", "/api/v1/bookie/ledgers", "/api/v1/bookie/drill",
    "/api/v1/bookie/limbo", "/api/v1/bookie/damage", "/api/v1/bookie/scrub", "/api/v1/bookie/gc/rollback",
)  # fmt: skip
OF_TOPICS: Final = ("", "/internal", "/subscriptions")
WRITES: Final = ("bookkeeper_server_ADD_ENTRY_REQUEST_count", "bookkeeper_server_ADD_ENTRY_count", "bookie_WRITE_BYTES")
"""Metrics of a bookie that grow with every write, also with those of the self-test."""
SETTLED_TIMEOUT_S: Final = 60.0
State = dict[str, Any]


async def cluster_state(cluster: ThrowawayCluster) -> State:
    """Return name -> value."""
    state: State = {}
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    try:
        await _znodes(store, "/", state)
    finally:
        await store.close()
    with httpx.Client(timeout=30, trust_env=False) as http:

        def get(url: str) -> Any:
            answer = http.get(url)
            return answer.json() if answer.status_code == 200 else answer.status_code

        topics = get(f"{cluster.url}/v1/topics")
        state["broker topics"] = topics
        for topic in topics["topics"]:
            for part in OF_TOPICS:
                state[f"broker {topic}{part}"] = _lasting(get(f"{cluster.url}/v1/topics/{topic}{part}"))
        for number in range(cluster.bookies):
            url = bookie_url(cluster, number)
            for path in OF_BOOKIES:
                state[f"bookie-{number} {path}"] = _lasting(get(url + path))
            for line in http.get(f"{url}/metrics").text.splitlines():
                if line.startswith(WRITES):
                    name, _, value = line.rpartition(" ")
                    state[f"bookie-{number} {name}"] = value
        auditor = cluster.auditor_url()
        state["auditor bookies"] = get(f"{auditor}/v1/bookies")
        state["auditor history"] = get(f"{auditor}/v1/recovery/history")
        status = get(f"{auditor}/v1/recovery/status")
        for name in ("is_enabled", "pause", "marked", "lost_bookie_delay_s", "auditor", "lost", "draining"):
            state[f"auditor {name}"] = status[name]
        state["auditor audits"] = status["this"]["audit"]["audits"]
    return state


def wait_settled(cluster: ThrowawayCluster) -> None:
    """Wait until the auditor has done its first check of all ledgers, whose result it writes to ZooKeeper."""
    until = time.monotonic() + SETTLED_TIMEOUT_S
    while True:
        status = httpx.get(f"{cluster.auditor_url()}/v1/recovery/status", timeout=30, trust_env=False).json()
        if status["ledger_check"]["last_finished_ms"] is not None and not status["ledger_check"]["is_running"]:
            return
        assert time.monotonic() < until, status["ledger_check"]
        time.sleep(0.1)


def bookie_url(cluster: ThrowawayCluster, number: int = 0) -> str:
    return f"http://127.0.0.1:{BOOKIE_HTTP_PORT + cluster.port_offset + number}"


def refused(cluster: ThrowawayCluster) -> dict[str, int]:
    """Return how many requests the broker, the first bookie and the auditor refused, by reason."""
    found: dict[str, int] = {}
    prefix = 'bindery_http_refused_total{reason="'
    for url in (cluster.url, bookie_url(cluster), cluster.auditor_url()):
        for line in httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text.splitlines():
            if line.startswith(prefix):
                reason, _, value = line.removeprefix(prefix).partition('"} ')
                found[reason] = found.get(reason, 0) + int(value)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> values before and after, of everything that differs."""
    return {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


def _lasting(value: Any) -> Any:
    """Return a response without MOVING_MEMBERS and RATES_AND_AGES."""
    if isinstance(value, dict):
        return {
            name: _lasting(member)
            for name, member in value.items()
            if name not in MOVING_MEMBERS and not name.endswith(RATES_AND_AGES)
        }
    return [_lasting(member) for member in value] if isinstance(value, list) else value


async def _znodes(store: ZooKeeperStore, path: str, state: State) -> None:
    node = await store.get(path)
    if path.startswith(BROKERS):
        state[f"znode {path}"] = json.loads(node.data)["draining"]
    elif not path.startswith(MOVING):
        state[f"znode {path}"] = (node.data, node.stat.version, node.stat.children_version)
    for child in await store.children(path):
        await _znodes(store, f"{path.rstrip('/')}/{child}", state)

"""A broker of Apache Pulsar and brokers of Bindery in one cluster: bundles move between them by unload.

The Pulsar broker is Apache's, started on the ZooKeeper and the bookies of a cluster of Bindery. Its topics are used
with Apache's client (Client.java) and managed with the unmodified pulsar-admin. Each test has its own namespace.
"""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from bindery.standalone.throwaway import BUNDLES_STAY, ThrowawayCluster
from bindery_metadata.stores.embedded import die_with_parent, find_java

from e2e.interop.jars import JavaMissing, class_path
from e2e.interop.processes import HOST, Process, free_port
from e2e.pulsar_admin.test_pulsar_admin import OPENED, Admin

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

HERE: Final = Path(__file__).resolve().parent
BROKER_POM: Final = HERE.parent / "pulsar_admin" / "broker.xml"
START_TIMEOUT_S: Final = 240.0
MOVE_TIMEOUT_S: Final = 60.0
"""Maximum seconds until the other broker serves a bundle that was unloaded."""
COUNT: Final = 20


@dataclass(frozen=True)
class Sent:
    """A message as both sides show it."""

    id: str
    """`ledger:entry`."""
    value: str
    key: str | None
    properties: tuple[tuple[str, str], ...]


class PulsarClient:
    """Apache's client in a JVM (Client.java)."""

    def __init__(self, url: str, jars: str, *, log: Path) -> None:
        self._url = url
        self._log = log.open("ab")
        self._child = subprocess.Popen(
            [
                *(str(find_java()), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
                *("-Djava.net.preferIPv4Stack=true", "-cp", jars, "Client"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=die_with_parent,
        )

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"url": self._url, **request}) + "\n")
        self._child.stdin.flush()
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer

    def produce(self, topic: str, values: Sequence[str]) -> list[Sent]:
        messages = [message(value) for value in values]
        answer = self._ask(topic=f"persistent://{topic}", messages=messages)
        assert "error" not in answer, answer["error"]
        return [sent(id, one) for id, one in zip(answer["ids"], messages, strict=True)]

    def refusal(self, topic: str) -> str:
        """Return the error of an attempt to produce."""
        return str(self._ask(topic=f"persistent://{topic}", messages=[message("refused")])["error"])

    def consume(self, topic: str, *, ack: Sequence[str] = ()) -> list[Sent]:
        """Receive all that subscription `s` delivers; acknowledge the messages with the values `ack`."""
        answer = self._ask(topic=f"persistent://{topic}", subscription="s", ack=list(ack))
        assert "error" not in answer, answer["error"]
        return [sent(one["id"], one) for one in answer["messages"]]

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._log.close()


class Bindery:
    """The HTTP API of a broker of Bindery."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, body: Any = None, *, lines: bool = False) -> Any:
        data = b"{}" if body is None else body.encode() if lines else json.dumps(body).encode()
        kind = "application/x-ndjson" if lines else "application/json"
        request = urllib.request.Request(
            f"{self.url}/v1{path}",
            data=None if method == "GET" else data,
            headers={"Content-Type": kind},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.load(answer)

    def produce(self, topic: str, values: Sequence[str]) -> list[Sent]:
        found = []
        for one in map(message, values):  # each as an entry
            line = json.dumps({"payload": one["value"], "key": one["key"], "properties": one["properties"]})
            (id,) = self.ask("POST", f"/topics/{topic}/messages", line, lines=True)["message_ids"]
            found.append(sent(id, one))
        return found

    def subscribe(self, topic: str) -> None:
        self.ask("PUT", f"/topics/{topic}/subscriptions/s", {"initial": "earliest"})

    def consume(self, topic: str, *, ack: Sequence[str] = ()) -> list[Sent]:
        """Receive all that subscription `s` delivers; acknowledge the messages with the values `ack`."""
        path = f"/topics/{topic}/subscriptions/s"
        got = self.ask("POST", f"{path}/receive", {"consumer": "c", "type": "shared", "max": 1000, "wait_ms": 2000})
        return self._done(path, got["messages"], ack)

    def consume_all(self, topic: str, *, ack: Sequence[str] = ()) -> list[Sent]:
        """The same on a partitioned topic, whose partitions may answer one after another."""
        path = f"/topics/{topic}/subscriptions/s"
        found: list[dict[str, Any]] = []
        while True:
            got = self.ask("POST", f"{path}/receive", {"consumer": "c", "type": "shared", "max": 1000, "wait_ms": 1500})
            if not got["messages"]:
                return self._done(path, found, ack)
            found += got["messages"]

    def _done(self, path: str, messages: list[dict[str, Any]], ack: Sequence[str]) -> list[Sent]:
        ids = [one["message_id"] for one in messages if one["payload"] in ack]
        if ids:
            self.ask("POST", f"{path}/ack", {"message_ids": ids})
        self.ask("DELETE", f"{path}/consumers/c")
        return [sent(one["message_id"], {**one, "value": one["payload"]}) for one in messages]

    def partitions(self, topic: str, wanted: int | None = None) -> int:
        """Return the number of partitions; set it first if `wanted` is given."""
        body = None if wanted is None else {"partitions": wanted}
        found = self.ask("GET" if body is None else "PUT", f"/topics/{topic}/partitions", body)
        return int(found["partitions"])

    def refusal(self, topic: str) -> dict[str, Any]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.produce(topic, ["refused"])
        problem: dict[str, Any] = json.load(caught.value)
        return problem

    def unload(self, namespace: str) -> list[str]:
        """Unload a namespace. Returns the owners of its bundles."""
        found = self.ask("POST", f"/namespaces/{namespace}/unload")["bundles"]
        return [one["owner"] for one in found if one["owner"]]


def message(value: str) -> dict[str, Any]:
    """Return the message with this value: a key, and properties that depend on the value."""
    return {"value": value, "key": f"k{zlib.crc32(value.encode()) % 7}", "properties": {"of": value, "ü": "ß"}}


def sent(id: str, one: dict[str, Any]) -> Sent:
    ledger_and_entry = ":".join(id.split(":")[:2])
    return Sent(ledger_and_entry, one["value"], one.get("key"), tuple(sorted(one["properties"].items())))


def until(found: Any, what: str) -> Any:
    """Call `found` until it returns without an error of a broker. Used after an unload, while the owner changes."""
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    while True:
        try:
            return found()
        except (AssertionError, OSError) as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: {error}") from error
            time.sleep(0.2)


@dataclass
class Neighbours:
    """Two brokers of Bindery and one of Pulsar, in one cluster."""

    first: Bindery
    second: Bindery
    client: PulsarClient
    admin: Admin
    pulsar_url: str

    def pulsar_admin(self, *words: str, url: str | None = None) -> str:
        outcome = self.admin.run(url or self.pulsar_url, list(words))
        assert outcome.ok, (words, outcome.reason)
        return outcome.out

    def namespace(self, name: str) -> str:
        """Create a namespace with Bindery, and return the name of a topic in it."""
        self.first.ask("PUT", f"/namespaces/public/{name}")
        return f"public/{name}/orders"

    def fetch(self, namespace: str) -> None:
        """Unload the bundles of the Pulsar broker until it has none.

        It reads its topic `__change_events` as long as it owns a bundle of the namespace. So it takes the bundle of
        this topic back if that one is unloaded before the others.
        """
        deadline = time.monotonic() + MOVE_TIMEOUT_S
        while True:
            bundles = self.first.ask("GET", f"/namespaces/{namespace}/bundles")["bundles"]
            left = [one["bundle"] for one in bundles if one["owner"] == self.pulsar_url]
            if not left:
                return
            assert time.monotonic() < deadline, left
            for bundle in left:
                self.pulsar_admin("namespaces", "unload", namespace, "-b", bundle)

    def fetched(self, namespace: str, consume: Callable[[], list[Sent]]) -> list[Sent]:
        """Consume from Bindery after a namespace was unloaded by Pulsar: see `fetch`."""
        self.fetch(namespace)
        return consume()

    def bundle(self, topic: str) -> str:
        """Return the bundle of a topic."""
        return self.pulsar_admin("topics", "bundle-range", f"persistent://{topic}", url=self.first.url).strip()


SAMPLE: Final = os.environ.get("E2E_SAMPLE")
LOAD_MANAGER: Final = ["false", "true"] if not SAMPLE else ["false", "true"][int(SAMPLE) % 2 :][:1]
"""Values of `loadBalancerEnabled`. E2E_SAMPLE=<seed>, as in `.ci/run`: one of them, because each takes minutes."""


@pytest.fixture(scope="module", params=LOAD_MANAGER, ids=lambda is_on: f"load-manager-{is_on}")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbours]:
    """`loadBalancerEnabled` of Pulsar: with it, its ModularLoadManager decides who gets a bundle without owner."""
    home = tmp_path_factory.mktemp("beside-pulsar")
    try:
        broker_jars, client_jars = class_path(BROKER_POM, []), class_path(BROKER_POM, [HERE / "Client.java"])
        admin = Admin(log=home / "admin.log")
    except JavaMissing as error:
        pytest.fail(str(error))
    with contextlib.ExitStack() as stack:
        stack.callback(admin.close)
        cluster = stack.enter_context(ThrowawayCluster(bookies=3, brokers=2, auditors=1, environment=BUNDLES_STAY))
        web, binary = free_port(), free_port()
        settings = {
            "clusterName": "bindery",
            "metadataStoreUrl": f"zk:{cluster.zookeeper}",
            "configurationMetadataStoreUrl": f"zk:{cluster.zookeeper}",
            "bindAddress": HOST,
            "advertisedAddress": HOST,
            "brokerServicePort": binary,
            "webServicePort": web,
            "managedLedgerDefaultEnsembleSize": 3,
            "managedLedgerDefaultWriteQuorum": 3,
            "managedLedgerDefaultAckQuorum": 2,
            "functionsWorkerEnabled": "false",
            "loadBalancerEnabled": request.param,
        }
        conf = home / "broker.conf"
        conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        drivers = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata{}Driver"
        command = [
            *(str(find_java()), "-Xmx384m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC"),
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in (*OPENED, "sun.net")),
            *("--add-opens=java.management/sun.management=ALL-UNNAMED", "-Djava.net.preferIPv4Stack=true"),
            *(f"-Dbookkeeper.metadata.{kind.lower()}.drivers={drivers.format(kind)}" for kind in ("Bookie", "Client")),
            *("-Dio.netty.tryReflectionSetAccessible=true", "-cp", broker_jars),
            *("org.apache.pulsar.PulsarBrokerStarter", "--broker-conf", str(conf)),
        ]
        process = Process("pulsar", command, log=home / "pulsar.log", port=web)
        process.start()
        stack.callback(process.kill)
        client = PulsarClient(f"pulsar://{HOST}:{binary}", client_jars, log=home / "client.log")
        stack.callback(client.close)
        url = f"http://{HOST}:{web}"
        _wait_ready(url, process)
        yield Neighbours(Bindery(cluster.broker_url(0)), Bindery(cluster.broker_url(1)), client, admin, url)


def _wait_ready(url: str, process: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/admin/v2/namespaces/public", timeout=5) as answer:
                if "public/default" in json.load(answer):
                    return
        except (OSError, urllib.error.URLError, ValueError):
            pass
        assert process.is_running, process.words()
        assert time.monotonic() < deadline, process.words()
        time.sleep(0.5)


def numbered(prefix: str, count: int = COUNT) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def test_pulsar_serves_a_namespace_that_bindery_created(both: Neighbours) -> None:
    topic = both.namespace("created-here")
    written = both.client.produce(topic, numbered("a"))
    assert both.client.consume(topic, ack=["a1"]) == written
    assert both.client.consume(topic) == [written[0], *written[2:]]
    refused = both.first.refusal(topic)
    assert (refused["status"], refused["code"]) == (409, "owned_by_pulsar")
    assert refused["facts"]["owner"] == both.pulsar_url


def test_a_bundle_of_bindery_moves_to_pulsar_and_back(both: Neighbours) -> None:
    """Messages, keys, properties, the mark-delete position and single acknowledgements are those of before."""
    topic = both.namespace("to-and-fro")
    space = topic.rpartition("/")[0]
    both.first.subscribe(topic)
    written = both.first.produce(topic, numbered("a"))
    assert both.first.consume(topic, ack=["a0", "a1", "a5", "a7"]) == written
    owner = both.first.ask("GET", f"/topics/{topic}")["owner"]
    assert both.second.unload(space) == [owner]

    left = [one for one in written if one.value not in ("a0", "a1", "a5", "a7")]
    assert until(lambda: both.client.consume(topic, ack=["a2", "a9"]), "Pulsar's consumer") == left
    left = [one for one in left if one.value not in ("a2", "a9")]
    more = both.client.produce(topic, numbered("b"))
    assert both.first.refusal(topic)["code"] == "owned_by_pulsar"

    both.pulsar_admin("namespaces", "unload", space)
    fetched = until(lambda: both.fetched(space, lambda: both.second.consume(topic, ack=["b3"])), "Bindery's consumer")
    assert fetched == left + more
    left += [one for one in more if one.value != "b3"]
    last = both.first.produce(topic, numbered("c", 3))

    both.pulsar_admin("namespaces", "unload", space, url=both.first.url)
    assert until(lambda: both.client.consume(topic), "Pulsar's consumer") == left + last
    assert both.first.unload(space) == [both.pulsar_url]
    assert until(lambda: both.second.consume(topic, ack=[one.value for one in left + last]), "the end") == left + last
    assert both.first.consume(topic) == []


def test_a_namespace_of_pulsar_moves_to_bindery_and_back(both: Neighbours) -> None:
    """Pulsar has made it with two bundles, and split these."""
    both.pulsar_admin("namespaces", "create", "public/made-there", "--bundles", "2")
    topic = "public/made-there/orders"
    for bundle in ("0x00000000_0x80000000", "0x80000000_0xffffffff"):
        both.pulsar_admin("namespaces", "split-bundle", "public/made-there", "-b", bundle)
    written = both.client.produce(topic, numbered("a"))
    assert both.client.consume(topic, ack=["a0", "a3", "a4"]) == written
    left = [one for one in written if one.value not in ("a0", "a3", "a4")]
    both.pulsar_admin("namespaces", "unload", "public/made-there")
    space = "public/made-there"
    fetched = until(
        lambda: both.fetched(space, lambda: both.first.consume(topic, ack=["a1", "a8"])), "Bindery's consumer"
    )
    assert fetched == left
    left = [one for one in left if one.value not in ("a1", "a8")]
    more = both.second.produce(topic, numbered("b"))
    assert "bindery" in both.pulsar_admin("clusters", "list")
    found = json.loads(both.pulsar_admin("topics", "stats", f"persistent://{topic}"))  # redirected to Bindery
    assert found["subscriptions"]["s"]["msgBacklog"] == len(left) + len(more)
    error = both.client.refusal(topic)
    assert "Exception" in error

    both.pulsar_admin("namespaces", "unload", "public/made-there")  # passed on to the owner
    assert until(lambda: both.client.consume(topic), "Pulsar's consumer") == left + more


def test_a_topic_that_is_unloaded_stays_where_it_is(both: Neighbours) -> None:
    topic = both.namespace("topic-only")
    both.first.produce(topic, ["a"])
    owner = both.first.ask("GET", f"/topics/{topic}")["owner"]
    both.pulsar_admin("topics", "unload", f"persistent://{topic}", url=both.first.url)
    assert both.second.produce(topic, ["b"])
    assert both.second.ask("GET", f"/topics/{topic}")["owner"] == owner


@pytest.mark.parametrize(
    "words",
    [
        ["public/no-such-namespace"],
        ["public/no-such-namespace", "-b", "0x00000000_0x40000000"],
        ["public/default", "-b", "0x00000001_0x40000000"],
        ["public/default", "-b", "0x00000000_0x80000000"],
        ["public/default", "-b", "0x00000000_0x40000000"],
    ],
    ids=" ".join,
)
def test_both_refuse_the_same_unloads_with_the_same_reason(both: Neighbours, words: list[str]) -> None:
    ours, theirs = (both.admin.run(url, ["namespaces", "unload", *words]) for url in (both.first.url, both.pulsar_url))
    assert ours == theirs


def test_bundles_that_bindery_splits_are_served_by_both(both: Neighbours) -> None:
    """Each splits its own bundle, whichever is asked; the other follows the new division."""
    space = "public/split-here"
    both.pulsar_admin("namespaces", "create", space, "--bundles", "3", url=both.first.url)
    topic = f"{space}/orders"
    both.first.subscribe(topic)
    written = both.first.produce(topic, numbered("a"))

    def divisions() -> list[str]:
        return [both.pulsar_admin("namespaces", "bundles", space, url=url) for url in (both.first.url, both.pulsar_url)]

    both.pulsar_admin("namespaces", "split-bundle", space, "-b", both.bundle(topic), url=both.second.url)
    written += both.second.produce(topic, numbered("b"))
    ours, theirs = divisions()
    assert json.loads(ours)["numBundles"] == 4
    assert theirs == ours
    owner = both.first.ask("GET", f"/topics/{topic}")["owner"]
    assert both.first.unload(space) == [owner] * 2
    assert until(lambda: both.client.consume(topic), "Pulsar's consumer") == written

    bundle = both.bundle(topic)
    parts = both.second.ask("POST", f"/namespaces/{space}/split", {"bundle": bundle})["parts"]
    assert len(parts) == 2
    written += both.client.produce(topic, numbered("c"))
    ours, theirs = divisions()
    assert json.loads(ours)["numBundles"] == 5
    assert theirs == ours
    assert both.bundle(topic) in parts
    both.pulsar_admin("namespaces", "unload", space)
    assert until(lambda: both.fetched(space, lambda: both.second.consume(topic)), "Bindery's consumer") == written


def test_an_unload_names_the_broker_that_gets_the_bundle(both: Neighbours) -> None:
    topic = both.namespace("destination")
    space = topic.rpartition("/")[0]
    both.first.subscribe(topic)
    written = both.first.produce(topic, numbered("a"))
    bundle = both.bundle(topic)
    unload = ("namespaces", "unload", space, "-b", bundle, "-d")
    both.pulsar_admin(*unload, both.pulsar_url, url=both.second.url)
    assert both.first.refusal(topic)["facts"]["owner"] == both.pulsar_url
    assert both.client.consume(topic) == written
    both.pulsar_admin(*unload, both.second.url.removeprefix("http://"), url=both.first.url)
    assert both.first.ask("GET", f"/topics/{topic}")["owner"] == both.second.url
    assert both.first.consume(topic) == written
    refused = both.admin.run(both.first.url, [*unload, "127.0.0.1:1"])
    assert not refused.ok
    assert "inactive destination broker" in refused.reason


def by_key(messages: Sequence[Sent]) -> dict[str | None, list[Sent]]:
    """Return the messages of each key, in their order."""
    found: dict[str | None, list[Sent]] = {}
    for one in messages:
        found.setdefault(one.key, []).append(one)
    return found


def test_a_partitioned_topic_of_bindery_moves_to_pulsar_and_back(both: Neighbours) -> None:
    topic = both.namespace("parts-here")
    space = topic.rpartition("/")[0]
    assert both.first.partitions(topic, 4) == 4
    both.second.subscribe(topic)
    written = both.first.produce(topic, numbered("a"))
    assert by_key(both.second.consume_all(topic, ack=["a3", "a11"])) == by_key(written)
    left = [one for one in written if one.value not in ("a3", "a11")]
    assert set(both.second.unload(space)) <= {both.first.url, both.second.url}

    def seen_by_pulsar() -> None:
        assert by_key(both.client.consume(topic)) == by_key(left)

    until(seen_by_pulsar, "Pulsar's consumer of all partitions")
    both.client.consume(topic, ack=["a0"])
    left = [one for one in left if one.value != "a0"]
    left += both.client.produce(topic, numbered("b"))
    assert both.first.partitions(topic) == 4

    def seen_here() -> None:
        both.fetch(space)
        assert by_key(both.first.consume_all(topic)) == by_key(left)

    until(seen_here, "Bindery's consumer of all partitions")
    left += both.second.produce(topic, numbered("c"))
    seen_here()


def test_a_partitioned_topic_of_pulsar_is_used_and_enlarged_by_both(both: Neighbours) -> None:
    topic = both.namespace("parts-there")
    space, full = topic.rpartition("/")[0], f"persistent://{topic}"
    both.pulsar_admin("topics", "create-partitioned-topic", full, "-p", "3")
    both.pulsar_admin("topics", "create-subscription", full, "-s", "s", "-m", "earliest")
    written = both.client.produce(topic, numbered("a"))
    assert both.first.partitions(topic) == 3
    both.pulsar_admin("topics", "update-partitioned-topic", full, "-p", "4")
    assert until(lambda: both.second.partitions(topic), "partitions") == 4

    def seen_here() -> None:
        both.fetch(space)
        assert by_key(both.second.consume_all(topic)) == by_key(written)

    until(seen_here, "Bindery's consumer of all partitions")
    both.second.consume_all(topic, ack=[one.value for one in written])
    assert both.first.partitions(topic, 6) == 6
    assert '"partitions" : 6' in both.pulsar_admin("topics", "get-partitioned-topic-metadata", full)
    written = both.first.produce(topic, numbered("b", 40))
    used = both.first.ask("GET", f"/topics/{topic}")["partitions"]
    assert used["4"]["entries"] + used["5"]["entries"] > 0
    both.first.unload(space)

    def seen_by_pulsar() -> None:
        assert by_key(both.client.consume(topic)) == by_key(written)

    until(seen_by_pulsar, "Pulsar's consumer of all partitions")


def test_brokers_of_both_kinds_are_listed(both: Neighbours) -> None:
    expected = {url.removeprefix("http://") for url in (both.first.url, both.second.url, both.pulsar_url)}
    for url in (both.first.url, both.pulsar_url):
        assert set(both.pulsar_admin("brokers", "list", "bindery", url=url).split()) == expected


def test_pulsar_assigns_no_bundle_to_bindery(both: Neighbours) -> None:
    """A bundle without an owner for which Pulsar's clients ask goes to the Pulsar broker, each time."""
    for number in range(3):
        topic = both.namespace(f"assigned-{number}")
        for name in ("a", "b", "c", "d"):
            assert both.client.produce(f"{topic}-{name}", [name])

"""Apache Pulsar's ManagedLedger takes over topics of Bindery, and the other way round.

After a kill, the other side delivers again but never skips. After a clean close, it delivers exactly the entries that
are not acknowledged. The bookies are Bindery's; Pulsar's code opens the topic as its broker does (Cursors.java).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_broker.managed_ledger import ManagedCursor, ManagedLedger, ManagedLedgerSettings, Redelivered
from bindery_client.client import LedgerClient
from bindery_metadata.stores.embedded import find_java
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_pulsar.message_id import EARLIEST, Position

from e2e.interop.jars import JavaMissing, class_path

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

HERE: Final = Path(__file__).resolve().parent
NAMESPACE: Final = "public/default/persistent"
SETTINGS: Final = ManagedLedgerSettings(retention_acked_s=10**9, retention_unsubscribed_s=10**9)
OPENED: Final = ("java.io", "java.nio", "java.util.zip", "java.lang", "jdk.internal.misc")
RUN_TIMEOUT_S: Final = 120.0


class Taken(NamedTuple):
    """What a Pulsar broker found."""

    mark_delete: str
    delivered: list[Position]


class Sides:
    """Both brokers on one cluster."""

    def __init__(self, cluster: ThrowawayCluster, client: LedgerClient, store: ZooKeeperStore, jars: str) -> None:
        self._cluster = cluster
        self._client = client
        self._store = store
        self._jars = jars

    async def open(self, name: str) -> tuple[ManagedLedger, ManagedCursor]:
        topic = await ManagedLedger.open(
            f"{NAMESPACE}/{name}",
            client=self._client,
            store=self._store,
            clock=lambda: time.time_ns() // 10**6,
            settings=SETTINGS,
        )
        return topic, await topic.open_cursor("s", start=EARLIEST)

    async def pulsar(self, name: str, *, ack: list[Position] | None = None, kill: bool = False) -> Taken:
        """Open the topic with Pulsar's code, read everything, acknowledge `ack`, and close it or stop without that."""
        words = [str(position) for position in ack or ()] + (["kill"] if kill else [])
        child = await asyncio.create_subprocess_exec(
            str(find_java()),
            *("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
            *("-Djava.net.preferIPv4Stack=true", "-cp", self._jars, "Cursors"),
            *(self._cluster.zookeeper, f"{NAMESPACE}/{name}", "s", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(child.communicate(), RUN_TIMEOUT_S)
        lines = [line for line in output.decode().splitlines() if line.startswith(("mark", "deliver", "closed", "kil"))]
        assert lines, errors.decode()[-3000:]
        assert lines[-1] == ("killed" if kill else "closed"), errors.decode()[-3000:]
        delivered = [line.split()[1] for line in lines if line.startswith("deliver")]
        positions = [Position(*map(int, text.split(":"))) for text in delivered]
        return Taken(lines[0].split()[1], positions)


@pytest.fixture(scope="module")
def jars() -> str:
    try:
        return class_path(HERE / "pom.xml", [HERE / "Cursors.java"])
    except JavaMissing as error:
        pytest.fail(str(error))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=3, brokers=1, auditors=1) as cluster:
        yield cluster


@pytest.fixture
async def sides(cluster: ThrowawayCluster, jars: str) -> AsyncIterator[Sides]:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom())
    try:
        yield Sides(cluster, client, store, jars)
    finally:
        await client.close()
        await store.close()


async def rest_of(cursor: ManagedCursor) -> list[Position]:
    found = await cursor.read_unacked(EARLIEST, entries_max=10**6, size_max=10**9)
    return [entry.position for entry in found.entries]


@pytest.mark.parametrize("count", [40, 6000], ids=["short", "long"])
async def test_after_a_clean_close_each_side_delivers_exactly_the_rest(sides: Sides, count: int) -> None:
    """A short state is in the znode, a long one in the last record of the cursor ledger."""
    name = f"clean-{count}"
    topic, cursor = await sides.open(name)
    positions = await topic.add_many([b"%d" % i for i in range(count)])
    await cursor.ack_many([positions[0], *positions[3::2]])
    await cursor.record_redeliveries([Redelivered(positions[2], 1, 3)])
    rest = await rest_of(cursor)
    assert len(rest) == count // 2
    await topic.close()

    assert await sides.pulsar(name, ack=rest[:5:2]) == (str(positions[0]), rest)
    rest = [position for position in rest if position not in rest[:5:2]]
    topic, cursor = await sides.open(name)
    assert await rest_of(cursor) == rest
    assert cursor.redelivery_count(positions[2]) == 0, "Pulsar does not keep the counts"
    await cursor.ack_many(rest[1:4])
    await topic.close()
    assert (await sides.pulsar(name)).delivered == [rest[0], *rest[4:]]


@pytest.mark.parametrize("moved", [False, True], ids=["holes", "seek"])
async def test_after_a_kill_of_bindery_pulsar_delivers_again_but_skips_nothing(sides: Sides, moved: bool) -> None:
    name = f"killed-{moved}"
    topic, cursor = await sides.open(name)
    positions = await topic.add_many([b"%d" % i for i in range(3000)])
    await cursor.ack_many([*positions[:10], *positions[11::2]])
    if moved:
        await cursor.seek(positions[4])
    await cursor.ack_many(positions[20:22])
    await cursor.record_redeliveries([Redelivered(positions[30], 1, 2)])
    rest = await rest_of(cursor)
    mark_delete = str(cursor.mark_delete)
    await topic.crash()

    taken = await sides.pulsar(name)
    assert taken.mark_delete == mark_delete
    assert set(rest) <= set(taken.delivered)
    assert taken.delivered == sorted(taken.delivered)
    topic, cursor = await sides.open(name)
    assert set(rest) <= set(await rest_of(cursor))
    await topic.close()


async def test_after_a_kill_of_pulsar_its_records_are_the_state(sides: Sides) -> None:
    name = "killed-pulsar"
    topic, cursor = await sides.open(name)
    positions = await topic.add_many([b"%d" % i for i in range(100)])
    await cursor.ack_many(positions[1::2])
    await topic.close()
    await sides.pulsar(name, ack=[positions[0], positions[4]], kill=True)
    topic, cursor = await sides.open(name)
    rest = [position for position in positions[2::2] if position != positions[4]]
    assert await rest_of(cursor) == rest
    await topic.close()

"""Auto-recovery together with Apache's: Apache's shell with Bindery's auditors, and workers on ledgers of the other
kind.

Each scenario kills a bookie of a ledger's ensemble, and restarts it at its end.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import pytest
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import EntryId, LedgerId

from e2e.interop.actors import Actor, OurActor, payload
from e2e.interop.clusters import Bookie, Cluster, Clusters, our_auditor, run_cli
from e2e.interop.conftest import AUTORECOVERY_TABLE
from e2e.interop.java import apache_autorecovery
from e2e.interop.processes import Process, free_port
from e2e.interop.table import Table

pytestmark = [
    pytest.mark.interop,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("table_place"),
    pytest.mark.timeout(900),
]
on_ours = pytest.mark.parametrize("cluster", ["bindery"], indirect=True)
on_theirs = pytest.mark.parametrize("cluster", ["mixed", "apache"], indirect=True)
everywhere = pytest.mark.parametrize("cluster", ["bindery", "mixed", "apache"], indirect=True)
ENTRIES: Final = 60
SIZE: Final = 2000

Actors = dict[tuple[str, str], Actor]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, clusters: Clusters) -> Cluster:
    return clusters[request.param]


@pytest.fixture
def table_place(cluster: Cluster) -> tuple[Table, str, list[str]]:
    return AUTORECOVERY_TABLE, cluster.name, []


async def shell(clusters: Clusters, cluster: Cluster, *words: str) -> str:
    status, text = await clusters.driver.shell(cluster.shell_conf, *words)
    assert status == 0, f"{words}: {text}"
    return text


async def marked(clusters: Clusters, cluster: Cluster, *words: str) -> list[int]:
    """The ledgers that `listunderreplicated` lists."""
    text = await shell(clusters, cluster, "listunderreplicated", *words)
    return [int(number) for number in re.findall(r"^(\d+)$", text, re.MULTILINE)]


async def until(condition: Callable[[], Awaitable[object]], what: str, *, timeout_s: float = 90) -> float:
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < timeout_s, f"timeout: {what}"
        await asyncio.sleep(0.25)
    return time.monotonic() - began


async def ledger_over(actor: Actor, bookie: Bookie) -> int:
    """A closed ledger with a replica of each entry on the bookie."""
    for _ in range(200):
        writer = await actor.create()
        if bookie.id in (await actor.metadata(writer.ledger))["segments"][0]["ensemble"]:
            await writer.add(ENTRIES, size=SIZE, seed=7)
            await writer.close()
            return writer.ledger
        await writer.close()
    raise AssertionError("the bookie is in no ensemble")


async def names(actors: Actors, cluster: Cluster, ledger: int, bookie: Bookie) -> bool:
    segments = (await actors["bindery v3", cluster.name].metadata(ledger))["segments"]
    return any(bookie.id in segment["ensemble"] for segment in segments)


async def check_replicas(actors: Actors, cluster: Cluster, ledger: int, *, without: Bookie) -> None:
    """Check the three replicas of each entry on their bookies: digest, bytes, length; none on `without`."""
    actor = actors["bindery v3", cluster.name]
    assert isinstance(actor, OurActor)
    facts = await actor.client.metadata(LedgerId(ledger))
    assert facts.state is LedgerState.CLOSED
    assert int(facts.last_entry_id) == ENTRIES - 1

    def take(replica: ReplicaRead) -> ReplicaRead:
        return replica

    for segment in facts.segments:
        assert without.id not in segment.ensemble
        assert len(set(segment.ensemble)) == 3
    for bookie_id in facts.segments[0].ensemble:
        length = 0
        ids = [EntryId(i) for i in range(ENTRIES)]
        for replica in await actor.client.read_replicas(LedgerId(ledger), facts, bookie_id, ids, take):
            assert replica.verdict is Verdict.GOOD, f"{bookie_id} {replica.entry_id}: {replica.verdict}"
            assert replica.payload == payload(7, int(replica.entry_id), SIZE)
            length += len(replica.payload)
            assert replica.length == length
    assert len(facts.segments) == 1


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    try:
        for process in processes:
            process.start()
        await asyncio.gather(*(process.serving() for process in processes))
        yield
    finally:
        for process in processes:
            process.kill()


@asynccontextmanager
async def dead(actors: Actors, cluster: Cluster, bookie: Bookie) -> AsyncIterator[None]:
    """Kill the bookie during the block; restart it afterwards and wait until it is registered."""
    java = actors["java v3", cluster.name]

    async def is_writable() -> bool:
        return bookie.id in (await java.bookies())["writable"]  # type: ignore[attr-defined]

    async def is_away() -> bool:
        return not await is_writable()

    bookie.process.kill()
    try:
        await until(is_away, f"{bookie.id} is away")
        yield
    finally:
        bookie.process.start()
        await bookie.process.serving()
        await until(is_writable, f"{bookie.id} is back")


def auditor(cluster: Cluster, name: str, *options: str) -> Process:
    return our_auditor(
        name,
        directory=cluster.directory / name,
        zookeeper=cluster.zookeeper,
        root=cluster.root,
        port=free_port(),
        options=("--open-ledger-grace-s", "2", *options),
    )


@asynccontextmanager
async def their_autorecovery(cluster: Cluster, name: str) -> AsyncIterator[Process]:
    """Apache's auditor and worker."""
    process = apache_autorecovery(
        name, directory=cluster.directory / name, zookeeper=cluster.zookeeper, root=cluster.root, port=free_port()
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()


# -- Apache's shell, Bindery's auditor ---------------------------------------------------------------------------------


@everywhere
async def test_shell_and_marks(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`listunderreplicated -mr`, `-emr`, `-pmr`, `-c`; `listbookies -a`; `ledgermetadata`, during a repair"""
    victim, other = cluster.bookies[1], cluster.bookies[0]
    ledger = await ledger_over(actors["java v3", cluster.name], victim)
    await shell(clusters, cluster, "lostbookierecoverydelay", "-s", "2")
    finder = auditor(cluster, "finder", "--workers", "0")
    async with running(finder), dead(actors, cluster, victim):

        async def is_marked() -> bool:
            return ledger in await marked(clusters, cluster)

        await until(is_marked, "our auditor marks the ledger")
        text = await shell(clusters, cluster, "listunderreplicated", "-pmr", "-prw")
        assert re.search(rf"^{ledger}\n\s+Ctime : \d{{13}}\n\s+MissingReplica : {victim.id}$", text, re.MULTILINE), text
        count = len(await marked(clusters, cluster))
        assert f"count: {count}" in await shell(clusters, cluster, "listunderreplicated", "-c")
        assert ledger in await marked(clusters, cluster, "-mr", victim.id)
        assert ledger not in await marked(clusters, cluster, "-mr", other.id)
        assert ledger not in await marked(clusters, cluster, "-emr", victim.id)
        assert victim.id not in await shell(clusters, cluster, "listbookies", "-rw")
        assert victim.id in await shell(clusters, cluster, "listbookies", "-a")
        assert victim.id in await shell(clusters, cluster, "ledgermetadata", "-ledgerid", str(ledger))
        async with running(auditor(cluster, "healer")):

            async def is_healed() -> bool:
                return not await marked(clusters, cluster)

            await until(is_healed, "our worker heals it", timeout_s=150)
        assert victim.id not in await shell(clusters, cluster, "ledgermetadata", "-ledgerid", str(ledger))
        await check_replicas(actors, cluster, ledger, without=victim)
        text = await shell(clusters, cluster, "readledger", "-ledgerid", str(ledger))
        assert len(re.findall(r"Eid=(\d+)", text)) == ENTRIES


@on_ours
async def test_whoisauditor(clusters: Clusters, cluster: Cluster) -> None:
    """`whoisauditor`: Bindery's auditor, and its successor"""
    name = "bindery-auditor:8090"  # Apache's shell treats it as a bookie id and resolves it
    first, second = auditor(cluster, name), auditor(cluster, "second:8090")

    def says(who: str) -> Callable[[], Awaitable[bool]]:
        async def ask() -> bool:
            status, text = await clusters.driver.shell(cluster.shell_conf, "whoisauditor")
            # The shell fails while there has never been an auditor, and between two of them.
            assert status == 0 or "NoNode" in text or "No auditor elected" in text, text
            return status == 0 and who in text

        return ask

    async with running(first):
        await until(says(name), "the first one is the auditor")
        async with running(second):
            first.kill()
            took_s = await until(says("second:8090"), "the second one follows")
            print(f"hand-over seen after {took_s:.1f} s")


@on_ours
async def test_switch(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`autorecovery -d` and `-e`, `queryautorecoverystatus`: stop and start Bindery's recovery"""
    victim = cluster.bookies[2]
    ledger = await ledger_over(actors["bindery v3", cluster.name], victim)
    await shell(clusters, cluster, "lostbookierecoverydelay", "-s", "1")
    async with running(auditor(cluster, "switched")):
        await shell(clusters, cluster, "autorecovery", "-d")
        text = await run_status(cluster)
        assert "PAUSED" in text
        try:
            async with dead(actors, cluster, victim):
                await asyncio.sleep(20)  # longer than the auditor's start delay plus the lost-bookie delay
                assert await marked(clusters, cluster) == []
                text = await shell(clusters, cluster, "queryautorecoverystatus")
                assert "No Ledger is being recovered" in text
                await shell(clusters, cluster, "autorecovery", "-e")

                async def is_healed() -> bool:
                    return not await names(actors, cluster, ledger, victim)

                took_s = await until(is_healed, "it is healed", timeout_s=150)
                print(f"healed {took_s:.1f} s after autorecovery -e")
                await check_replicas(actors, cluster, ledger, without=victim)
        finally:
            with contextlib.suppress(AssertionError):
                await shell(clusters, cluster, "autorecovery", "-e")
        assert "PAUSED" not in await run_status(cluster)


async def run_status(cluster: Cluster) -> str:
    try:
        return await run_cli("recovery", "status", "--zookeeper", cluster.zookeeper)
    except AssertionError as said:  # exit code 1: the ledger cannot be repaired now
        return str(said)


@on_ours
async def test_delay_and_trigger(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """`lostbookierecoverydelay -s`, `-g`; `triggeraudit`: Bindery's auditor marks ledgers before the delay ends"""
    victim = cluster.bookies[3]
    ledger = await ledger_over(actors["java v3", cluster.name], victim)
    await shell(clusters, cluster, "lostbookierecoverydelay", "-s", "600")
    assert "600" in await shell(clusters, cluster, "lostbookierecoverydelay", "-g")
    async with running(auditor(cluster, "triggered", "--workers", "0")):
        await asyncio.sleep(17)  # the auditor's start delay
        async with dead(actors, cluster, victim):
            await asyncio.sleep(5)
            assert await marked(clusters, cluster) == []
            await shell(clusters, cluster, "triggeraudit")

            async def is_marked() -> bool:
                return ledger in await marked(clusters, cluster, "-mr", victim.id)

            took_s = await until(is_marked, "the ledger is marked", timeout_s=90)
            print(f"marked {took_s:.1f} s after triggeraudit, with a delay of 600 s")
            assert "600" in await shell(clusters, cluster, "lostbookierecoverydelay", "-g")
    async with running(auditor(cluster, "tidy")):  # the bookie is back: the mark is removed without copying

        async def is_clear() -> bool:
            return not await marked(clusters, cluster)

        await until(is_clear, "the mark is cleared")
    assert await names(actors, cluster, ledger, victim)


# -- repair of ledgers of the other kind -------------------------------------------------------------------------------


@everywhere
async def test_theirs_heals_ours(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """Apache's auto-recovery heals a ledger that Bindery's client wrote, without Bindery's auditors"""
    victim = cluster.bookies[0]
    ledger = await ledger_over(actors["bindery v3", cluster.name], victim)
    await shell(clusters, cluster, "lostbookierecoverydelay", "-s", "1")
    async with their_autorecovery(cluster, "theirs"), dead(actors, cluster, victim):

        async def is_healed() -> bool:
            return not await names(actors, cluster, ledger, victim)

        await until(is_healed, "Apache's auto-recovery heals it", timeout_s=150)

        async def is_clear() -> bool:
            return not await marked(clusters, cluster)

        await until(is_clear, "no mark is left", timeout_s=150)
        await check_replicas(actors, cluster, ledger, without=victim)


@on_theirs
async def test_ours_heals_theirs(clusters: Clusters, cluster: Cluster, actors: Actors) -> None:
    """Bindery's recovery heals a ledger that Apache's client wrote, on Apache's bookies"""
    victim = next(bookie for bookie in reversed(cluster.bookies) if bookie.kind == "apache")
    ledger = await ledger_over(actors["java v3", cluster.name], victim)
    await shell(clusters, cluster, "lostbookierecoverydelay", "-s", "1")
    async with running(auditor(cluster, "ours")), dead(actors, cluster, victim):

        async def is_healed() -> bool:
            return not await names(actors, cluster, ledger, victim)

        await until(is_healed, "ours heals it", timeout_s=150)

        async def is_clear() -> bool:
            return not await marked(clusters, cluster)

        await until(is_clear, "no mark is left", timeout_s=150)
        await check_replicas(actors, cluster, ledger, without=victim)
        reader = await actors["java v3", cluster.name].open(ledger)
        assert await reader.read(0, ENTRIES - 1, size=SIZE, seed=7) == ENTRIES

"""A bookie dies during a write; both clients must handle it.

One kill of a bookie serves all clients of the cluster. Each client has two ledgers whose ensembles contain this bookie:
one that it writes, and one whose writer crashed. The bookie is restarted before the next one is killed.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from e2e.interop.actors import Actor, Handle
from e2e.interop.clusters import Bookie, Cluster, Clusters
from e2e.interop.conftest import COLUMNS, Side, other_of

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]

VICTIMS = (("bindery", "bindery"), ("apache", "apache"), ("mixed", "bindery"), ("mixed", "apache"))
"""(cluster, kind of the bookie that is killed)."""
ATTEMPTS_MAX = 200


@dataclass
class Outcome:
    """Result of one client; after a failure only `error` is set."""

    writer: Handle | None = None
    last: int = -1
    recovered: Handle | None = None
    error: BaseException | None = None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcomes(
    clusters: Clusters, actors: dict[tuple[str, str], Actor]
) -> AsyncIterator[dict[tuple[str, str, str], Outcome]]:
    """Outcomes by (cluster, kind of the victim, actor)."""
    found: dict[tuple[str, str, str], Outcome] = {}

    async def kill_in(name: str) -> None:
        for cluster_name, kind in VICTIMS:
            if cluster_name == name:
                parts = await _through_a_kill(clusters[name], kind, actors)
                found.update({(name, kind, actor): outcome for actor, outcome in parts.items()})

    await asyncio.gather(*(kill_in(name) for name in ("bindery", "apache", "mixed")))
    yield found


async def _through_a_kill(cluster: Cluster, kind: str, actors: dict[tuple[str, str], Actor]) -> dict[str, Outcome]:
    """Kill and restart a bookie; outcomes by actor."""
    victim = next(bookie for bookie in cluster.bookies if bookie.kind == kind)
    names = sorted({column.actor for column in COLUMNS if column.cluster == cluster.name})
    killed = asyncio.Event()
    ready = {name: asyncio.Event() for name in names}
    parts = {
        name: asyncio.create_task(
            _part(actors[name, cluster.name], actors[other_of(name), cluster.name], victim, ready[name], killed)
        )
        for name in names
    }
    await asyncio.gather(*(event.wait() for event in ready.values()))
    victim.process.kill()
    killed.set()
    outcomes = {name: await part for name, part in parts.items()}
    await _seen(actors["java v3", cluster.name], victim, present=False)
    victim.process.start()
    await victim.process.serving()
    await _seen(actors["java v3", cluster.name], victim, present=True)
    return outcomes


async def _part(actor: Actor, other: Actor, victim: Bookie, ready: asyncio.Event, killed: asyncio.Event) -> Outcome:
    """Write during the kill, and recover the other client's ledger while the victim is down."""
    outcome = Outcome()
    try:
        left = await _over(other, victim)
        await left.add(40)
        await left.crash()
        outcome.writer = await _over(actor, victim)
        await outcome.writer.add(100)
        writing = asyncio.create_task(_write(outcome.writer, other, first=100, ready=ready, killed=killed))
        await killed.wait()
        outcome.recovered = await actor.open(left.ledger)
        outcome.last = await writing
    except BaseException as error:
        outcome.error = error
    finally:
        ready.set()
    return outcome


async def _write(writer: Handle, other: Actor, *, first: int, ready: asyncio.Event, killed: asyncio.Event) -> int:
    """Add continuously before, during and after the kill, close, and return the id of the last entry."""
    while not killed.is_set():
        await writer.add(10, first=first)
        first += 10
        ready.set()
    for _ in range(ATTEMPTS_MAX):  # fast bookies answer many adds before the writer detects the failure
        await writer.add(100, first=first)
        first += 100
        if len((await other.metadata(writer.ledger))["segments"]) > 1:
            break
    await writer.close()
    return first - 1


async def _over(actor: Actor, victim: Bookie) -> Handle:
    """Create a ledger whose ensemble contains the victim."""
    for _ in range(ATTEMPTS_MAX):
        writer = await actor.create()
        if victim.id in (await actor.metadata(writer.ledger))["segments"][0]["ensemble"]:
            return writer
    raise AssertionError("the victim is in no ensemble")


async def _seen(java: Actor, bookie: Bookie, *, present: bool) -> None:
    """Wait until Apache's client lists the bookie, or no longer lists it."""
    for _ in range(900):
        if (bookie.id in (await java.bookies())["writable"]) == present:  # type: ignore[attr-defined]
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{bookie.id} is {'not ' if present else ''}registered")


def _outcomes_of(side: Side, outcomes: dict[tuple[str, str, str], Outcome]) -> list[tuple[str, Outcome]]:
    found = [
        (kind, outcome)
        for (cluster, kind, actor), outcome in outcomes.items()
        if (cluster, actor) == (side.column.cluster, side.column.actor)
    ]
    assert found
    for kind, outcome in found:
        assert outcome.error is None, f"{kind} victim: {outcome.error!r}"
    return found


async def test_ensemble_change(side: Side, outcomes: dict[tuple[str, str, str], Outcome]) -> None:
    """a bookie is killed during a write: the ensemble changes, no entry is lost, the other client reads all entries"""
    for _, outcome in _outcomes_of(side, outcomes):
        assert outcome.writer is not None
        facts = await side.other.metadata(outcome.writer.ledger)
        assert len(facts["segments"]) == 2, facts["segments"]
        assert facts["last"] == outcome.last
        for reader in (side.other, side.actor):
            handle = await reader.open(outcome.writer.ledger)
            assert await handle.read(0, outcome.last) == outcome.last + 1


async def test_recovery_without_a_bookie(side: Side, outcomes: dict[tuple[str, str, str], Outcome]) -> None:
    """recover the other client's ledger while a bookie of its ensemble is dead"""
    for _, outcome in _outcomes_of(side, outcomes):
        assert outcome.recovered is not None
        assert await outcome.recovered.known_lac() == 39
        assert await outcome.recovered.read(0, 39) == 40
        handle = await side.other.open(outcome.recovered.ledger)
        assert await handle.read(0, 39) == 40

"""The access lists of a cluster are surveyed and replaced, on a real ZooKeeper."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import BINDERY_ROOT, LedgersLayout
from bindery_metadata.stores.access_lists import ALL, Credential, Entry, Kind, NewNodes, list_of
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_access import AccessFiles
from bindery_recovery import access_lists
from bindery_recovery.access_lists import EXAMPLES_MAX, UNREADABLE, Pace, access_roots, apply, survey

LAYOUT = LedgersLayout()
OWN = (Credential("bindery", "secret"),)
FOREIGN = (Entry("digest", Credential("foreign", "secret").identity, ALL),)
LEDGERS = 120
integration = pytest.mark.integration
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSpec]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = ServerSpec(tmp_path_factory.mktemp("zookeeper"), port, tick_ms=1000)
    running = EmbeddedZooKeeper(spec)
    asyncio.run(running.start())
    yield spec
    asyncio.run(running.stop())


async def remove_tree(store: ZooKeeperStore, path: str) -> None:
    for name in await store.children(path):
        if (path, name) != ("/", "zookeeper"):
            await remove_tree(store, f"{path.rstrip('/')}/{name}")
    if path != "/":
        await store.delete(path, version=None)


@pytest.fixture
async def opened(server: ServerSpec, tmp_path: Path) -> AsyncIterator[ZooKeeperStore]:
    """A store with credentials and open nodes, and a cluster with ledgers."""
    (tmp_path / "own").write_text(OWN[0].secret)
    (tmp_path / "all").write_text(f"{OWN[0].secret}\nforeign:secret")
    everything = await connect(server, tmp_path / "all")
    await remove_tree(everything, "/")
    await everything.close()
    store = await connect(server, tmp_path / "own")
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    await store.create(BINDERY_ROOT)
    await asyncio.gather(
        *(store.create(LAYOUT.ledger(ledger_id), b"x", make_parents=True) for ledger_id in range(LEDGERS))
    )
    yield store
    await store.close()


async def connect(server: ServerSpec, credentials: Path | None, new_nodes: NewNodes = NewNodes.OPEN) -> ZooKeeperStore:
    files = AccessFiles(credentials_file=str(credentials or ""), new_nodes=new_nodes)
    return await ZooKeeperStore.connect(server.hosts, access=files.load(), operation_timeout_s=60)


def test_the_roots_are_all_trees_of_a_cluster() -> None:
    assert set(access_roots(LedgersLayout("/a/b/ledgers"))) == {
        "/a", "/a/b", "/a/b/ledgers", "/bindery", "/managed-ledgers", "/schemas", "/namespace", "/admin", "/counters",
        "/bookies", "/loadbalance",
    }  # fmt: skip
    assert set(access_roots(LAYOUT, chroot="/x")) - set(access_roots(LAYOUT)) == {"/"}, (
        "the chroot belongs to the cluster"
    )


@integration
async def test_a_new_cluster_is_open(opened: ZooKeeperStore) -> None:
    found = await survey(opened, LAYOUT, OWN)
    assert found.nodes == found.count(Kind.OPEN) > LEDGERS
    assert len(found.examples[Kind.OPEN]) == EXAMPLES_MAX
    assert found.open_sessions_count == 0


@integration
@pytest.mark.parametrize("new_nodes", [NewNodes.CREATOR, NewNodes.SHARED])
async def test_all_lists_are_replaced_and_opened_again(
    opened: ZooKeeperStore, server: ServerSpec, new_nodes: NewNodes
) -> None:
    nodes = (await survey(opened, LAYOUT, OWN)).nodes
    visited: list[int] = []
    done = await apply(opened, LAYOUT, OWN, new_nodes, progress=visited.append)
    assert (done.replaced, done.passes, done.is_settled) == (nodes, 2, True)
    assert done.survey.count(new_nodes.value) == done.survey.nodes == nodes == max(visited)
    assert (await opened.access_list(LAYOUT.ledger(7))).entries == list_of(new_nodes, OWN)
    stranger = await connect(server, None)
    if new_nodes is NewNodes.CREATOR:
        with pytest.raises(Unauthorized):
            await stranger.get(LAYOUT.ledger(7))
        assert (await survey(stranger, LAYOUT, ())).count(UNREADABLE) > 0
    with pytest.raises(Unauthorized):
        await stranger.set(LAYOUT.ledger(7), b"", version=None)
    again = await apply(opened, LAYOUT, OWN, new_nodes)
    assert (again.replaced, again.passes) == (0, 1)
    opening = await apply(opened, LAYOUT, OWN, NewNodes.OPEN)
    assert opening.replaced == nodes
    assert opening.survey.count(Kind.OPEN) == nodes
    assert (await stranger.get(LAYOUT.ledger(7))).data == b"x"
    await stranger.close()


@integration
async def test_an_interrupted_change_is_completed_by_the_next(opened: ZooKeeperStore) -> None:
    """Wherever it is interrupted, the number of lists that are left is the number that the next one replaces."""
    nodes = (await survey(opened, LAYOUT, OWN)).nodes
    replaced = 0
    for stop_at in (1, nodes // 3, nodes - 1):

        def interrupt(visited: int, stop_at: int = stop_at) -> None:
            if visited >= stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await apply(opened, LAYOUT, OWN, NewNodes.CREATOR, progress=interrupt)
    replaced = (await survey(opened, LAYOUT, OWN)).count(Kind.CREATOR)
    assert 0 < replaced < nodes
    done = await apply(opened, LAYOUT, OWN, NewNodes.CREATOR)
    assert done.replaced == nodes - replaced
    assert done.survey.count(Kind.CREATOR) == nodes


@integration
async def test_lists_of_other_identities_are_left(opened: ZooKeeperStore, server: ServerSpec, tmp_path: Path) -> None:
    foreign = LAYOUT.ledger(3)
    await opened.set_access_list(foreign, FOREIGN, version=None)
    done = await apply(opened, LAYOUT, OWN, NewNodes.CREATOR)
    assert done.is_settled
    assert (done.survey.count(UNREADABLE), done.survey.count(Kind.CREATOR)) == (1, done.survey.nodes - 1)
    both = await connect(server, tmp_path / "all")
    assert (await both.access_list(foreign)).entries == FOREIGN
    await both.close()


@integration
async def test_the_lists_of_a_replaced_password_are_replaced(
    opened: ZooKeeperStore, server: ServerSpec, tmp_path: Path
) -> None:
    await apply(opened, LAYOUT, OWN, NewNodes.CREATOR)
    (tmp_path / "both").write_text(f"bindery:new\n{OWN[0].secret}")
    both = await connect(server, tmp_path / "both")
    credentials = both.access.presented.credentials
    before = await survey(both, LAYOUT, credentials)
    assert before.count(Kind.PREVIOUS) == before.nodes
    done = await apply(both, LAYOUT, credentials, NewNodes.CREATOR)
    assert done.survey.count(Kind.CREATOR) == before.nodes
    await both.close()
    (tmp_path / "new").write_text("bindery:new")
    renewed = await connect(server, tmp_path / "new")
    assert (await renewed.get(LAYOUT.ledger(7))).data == b"x"
    with pytest.raises(Unauthorized):
        await opened.get(LAYOUT.ledger(7))
    await apply(renewed, LAYOUT, credentials[:1], NewNodes.OPEN)
    await renewed.close()


@integration
async def test_nodes_that_are_created_meanwhile_are_replaced_or_reported(
    opened: ZooKeeperStore, server: ServerSpec, tmp_path: Path
) -> None:
    """Half of the processes already create restricted nodes, the others open ones; both use all nodes meanwhile."""
    secure = await connect(server, tmp_path / "own", NewNodes.CREATOR)
    stopped = asyncio.Event()

    async def create(store: ZooKeeperStore, base: int) -> int:
        number = 0
        while not stopped.is_set():
            path = await store.create(LAYOUT.ledger(base + number), b"y", make_parents=True)
            await (opened if store is secure else secure).set(path, b"z", version=0)
            number += 1
            await asyncio.sleep(0.005)
        return number

    creating = [asyncio.create_task(create(opened, 10_000)), asyncio.create_task(create(secure, 20_000))]
    await asyncio.sleep(0.1)
    await apply(opened, LAYOUT, OWN, NewNodes.CREATOR)
    stopped.set()
    created = await asyncio.gather(*creating)
    assert all(created)
    found = await survey(opened, LAYOUT, OWN)
    assert found.count(Kind.OPEN) + found.count(Kind.CREATOR) == found.nodes
    done = await apply(opened, LAYOUT, OWN, NewNodes.CREATOR)
    assert done.survey.count(Kind.CREATOR) == done.survey.nodes == found.nodes
    await secure.close()


@integration
async def test_open_nodes_of_sessions_are_reported(opened: ZooKeeperStore, server: ServerSpec) -> None:
    """Their processes may have no credentials."""
    stranger = await connect(server, None)
    path = await stranger.create("/loadbalance/brokers/b:1", ephemeral=True, make_parents=True)
    found = await survey(opened, LAYOUT, OWN)
    assert (found.open_sessions, found.open_sessions_count) == ([path], 1)
    await stranger.close()


@integration
async def test_nothing_is_changed_if_the_servers_do_not_accept_the_list(
    opened: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a server that computes identities by another algorithm."""
    monkeypatch.setattr(access_lists, "list_of", lambda *_: FOREIGN)
    with pytest.raises(BadRequest, match="digestAlg"):
        await apply(opened, LAYOUT, OWN, NewNodes.CREATOR)
    found = await survey(opened, LAYOUT, OWN)
    assert found.count(Kind.OPEN) == found.nodes
    with pytest.raises(BadRequest, match="credentials"):
        await apply(opened, LAYOUT, (), NewNodes.CREATOR)


async def test_the_rate_is_bounded() -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    pace = Pace(1000)
    for _ in range(5):
        await pace.wait(50)
    assert loop.time() - began_s >= 4 * 50 / 1000

"""Lists of ZooKeeper servers, with and without a chroot."""

import asyncio

import pytest
from bindery_core.errors import BadRequest
from bindery_metadata.stores.access_lists import NewNodes
from bindery_metadata.stores.embedded import ServerSpec, command, find_jars, find_java
from bindery_metadata.stores.zookeeper import ZooKeeperStore, make_chroot
from bindery_metadata.stores.zookeeper_access import AccessFiles
from bindery_metadata.stores.zookeeper_servers import ZooKeeperServers
from store_environments import SecureServer, remove_tree


@pytest.mark.parametrize(
    ("text", "servers", "chroot"),
    [
        ("a:2181", ("a:2181",), ""),
        ("127.0.0.1:2181,127.0.0.1:2182", ("127.0.0.1:2181", "127.0.0.1:2182"), ""),
        ("[::1]:2181", ("[::1]:2181",), ""),
        ("zk.example.:2181", ("zk.example.:2181",), ""),
        ("a:2181/messaging", ("a:2181",), "/messaging"),
        ("a:2181, b:2182/teams/one", ("a:2181", "b:2182"), "/teams/one"),
        ("a:2181/messaging/", ("a:2181",), "/messaging"),
        ("a:2181/", ("a:2181",), ""),
        ("a:2181/zookeepers", ("a:2181",), "/zookeepers"),
    ],
)
def test_servers_and_chroot_are_read(text: str, servers: tuple[str, ...], chroot: str) -> None:
    found = ZooKeeperServers.parse(text)
    assert (found.servers, found.chroot) == (servers, chroot)
    assert ZooKeeperServers.parse(str(found)) == found
    assert found.above == ",".join(servers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a/root:2181", "not a list of zookeeper servers"),
        ("a:2181/x,b:2181", "is written once, after the last server"),
        ("a:2181/x,b:2181/x", "is written once, after the last server"),
        ("a:2181//x", "not a znode path"),
        ("a:2181/x/../y", "not a znode path"),
        ("a:2181/zookeeper", "where zookeeper keeps its own nodes"),
        ("a:2181/zookeeper/quota", "where zookeeper keeps its own nodes"),
    ],
)
def test_an_invalid_chroot_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        ZooKeeperServers.parse(text)


@pytest.mark.integration
async def test_the_chroot_is_created_once_with_the_list_of_new_nodes_and_open_nodes_above_it(
    secure_zookeeper: SecureServer,
) -> None:
    access = secure_zookeeper.files.load()
    assert await make_chroot(f"{secure_zookeeper.hosts}/shared/by/one", access=access)
    assert not await make_chroot(f"{secure_zookeeper.hosts}/shared/by/one", access=access)
    assert await make_chroot(f"{secure_zookeeper.hosts}/shared/by/two", access=access), "beside the first one"
    store = await ZooKeeperStore.connect(secure_zookeeper.hosts, access=access)
    try:
        for path, new_nodes in (("/shared", "open"), ("/shared/by", "open"), ("/shared/by/one", "creator")):
            wanted = access.with_new_nodes(NewNodes(new_nodes)).list_of_new_nodes(access.presented)
            assert set((await store.access_list(path)).entries) == set(wanted), path
        await remove_tree(store, "/shared")
    finally:
        await store.close()


@pytest.mark.integration
async def test_a_list_without_a_chroot_needs_none(zookeeper: ServerSpec) -> None:
    assert not await make_chroot(f"{zookeeper.host}:{zookeeper.client_port}", access=AccessFiles().load())


@pytest.mark.integration
async def test_two_clusters_below_one_zookeeper_do_not_see_each_other(zookeeper: ServerSpec) -> None:
    servers = f"{zookeeper.host}:{zookeeper.client_port}"
    stores = []
    for name in ("one", "two"):
        await make_chroot(f"{servers}/{name}")
        stores.append(await ZooKeeperStore.connect(f"{servers}/{name}"))
    first, second = stores
    above = await ZooKeeperStore.connect(servers)
    try:
        await first.create("/ledgers", b"first")
        assert await second.exists("/ledgers") is None
        assert (await above.get("/one/ledgers")).data == b"first"
        sequential = await second.create("/n-", sequential=True)
        assert sequential.startswith("/n-"), "a response is without the chroot"
        assert await above.exists(f"/two{sequential}") is not None
    finally:
        for path in ("/one", "/two"):
            await remove_tree(above, path)
        for store in (*stores, above):
            await store.close()


@pytest.mark.integration
async def test_apaches_client_sees_the_same_nodes_below_the_same_chroot(zookeeper: ServerSpec) -> None:
    servers = f"{zookeeper.host}:{zookeeper.client_port}/apache/one"
    await make_chroot(servers)
    store = await ZooKeeperStore.connect(servers)
    above = await ZooKeeperStore.connect(ZooKeeperServers.parse(servers).above)
    try:
        await store.create("/ledgers", b"of bindery")
        *java, _main, _config = command(java=find_java(), jars=find_jars(), config=zookeeper.data_dir)
        words = ["org.apache.zookeeper.ZooKeeperMain", "-server", servers, "get", "/ledgers"]
        client = await asyncio.create_subprocess_exec(
            *java, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        said, _ = await client.communicate()
        assert b"of bindery" in said.splitlines()
    finally:
        await remove_tree(above, "/apache")
        await store.close()
        await above.close()

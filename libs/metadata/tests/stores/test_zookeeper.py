"""Tests of the kazoo adapter beyond the contract."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, MetadataOutcomeUnknown, MetadataUnavailable
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from bindery_metadata.stores.store import SessionState
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_connections import Crossing
from proxy import Proxy
from store_environments import free_port, until_answered


@pytest.mark.parametrize(
    "hosts",
    ["", "a", ":2181", "a:", "a:x", "a:0", "a:65536", "a:1,", "a:1,,b:2", "a/root:2181", "a..b:1", "a" * 64 + ":1"],
)
async def test_an_invalid_list_of_servers_is_refused(hosts: str) -> None:
    with pytest.raises(BadRequest):
        await ZooKeeperStore.connect(hosts)


async def test_the_error_names_servers_that_do_not_respond() -> None:
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(MetadataUnavailable) as raised:
        await ZooKeeperStore.connect(hosts, connect_timeout_s=0.3)
    assert hosts in str(raised.value)


async def test_connecting_to_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        async with asyncio.timeout(30):
            with pytest.raises(MetadataUnavailable):
                await ZooKeeperStore.connect(f"{host}:{port}", connect_timeout_s=0.2, session_timeout_s=1.0)


async def test_events_are_processed_in_order_and_a_failing_one_does_not_stop_others() -> None:
    crossing = Crossing(asyncio.get_running_loop())
    crossed: list[int] = []

    def put_all() -> None:
        for number in range(1000):
            crossing.put(lambda number=number: crossed.append(number))
            if number == 500:
                crossing.put(lambda: 1 // 0)

    await asyncio.to_thread(put_all)
    await asyncio.sleep(0)
    assert crossed == list(range(1000))


def test_events_for_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    crossing = Crossing(loop)
    loop.close()
    crossing.put(lambda: None)


@contextmanager
def stopped(server: ServerSpec) -> Iterator[None]:
    """Stop the process during the block. Threads may run on for a moment after the signal: waits for all of them."""
    pid = int(server.pid_path.read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 30
        while set(thread_states(pid)) != {"T"}:
            assert time.monotonic() < deadline, "the process does not stop"
            time.sleep(0.001)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def thread_states(pid: int) -> Iterator[str]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            yield (thread / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.integration
async def test_one_of_several_servers_is_enough(zookeeper: ServerSpec) -> None:
    store = await ZooKeeperStore.connect(f"127.0.0.1:{free_port()},{zookeeper.hosts}")
    await store.sync("/")
    await store.close()


@pytest.mark.integration
async def test_more_requests_than_the_limit_in_flight_are_all_answered(zookeeper: ServerSpec) -> None:
    store = await ZooKeeperStore.connect(zookeeper.hosts)
    answers = await asyncio.gather(*(store.exists("/zookeeper") for _ in range(3_000)))
    assert all(answers)
    await store.close()


@pytest.mark.integration
async def test_requests_do_not_block_the_event_loop(zookeeper: ServerSpec) -> None:
    """While the server is silent, a blocking wait would stop the event loop."""
    store = await ZooKeeperStore.connect(zookeeper.hosts, session_timeout_s=60, operation_timeout_s=30)
    with stopped(zookeeper):
        requested = [asyncio.create_task(store.sync("/")) for _ in range(200)]
        for _ in range(2_000):
            await asyncio.sleep(0)
        assert [task for task in requested if task.done()] == []
    await asyncio.gather(*requested)
    await store.close()


@pytest.mark.integration
async def test_a_stopped_server_leaves_writes_unknown_and_reads_unavailable(zookeeper: ServerSpec) -> None:
    """As in a long pause of the JVM, the connection stays open without responses. Later, all requests are applied."""
    store = await ZooKeeperStore.connect(zookeeper.hosts, operation_timeout_s=0.3)
    with stopped(zookeeper):
        with pytest.raises(MetadataOutcomeUnknown):
            await store.create("/still", ephemeral=True)
        with pytest.raises(MetadataUnavailable):
            await store.exists("/still")
    await until_answered(store)
    stat = await store.exists("/still")  # a later read of the same store sees the write
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id
    await store.close()


@pytest.mark.integration
async def test_sessions_ephemerals_and_watches_survive_a_crash_of_the_server(tmp_path: Path) -> None:
    spec = ServerSpec(tmp_path, free_port())
    server = EmbeddedZooKeeper(spec)
    await server.start()
    store = await ZooKeeperStore.connect(spec.hosts)
    other = await ZooKeeperStore.connect(spec.hosts)
    try:
        await store.create("/kept", b"one", ephemeral=True)
        states: list[SessionState] = []
        store.on_session_change(states.append)
        changed = asyncio.Event()
        await store.get("/kept", watch=changed.set)
        session_id = store.session_id
        os.kill(server.pid, signal.SIGKILL)
        await server.stop()
        await server.start()
        async with asyncio.timeout(30):
            await changed.wait()
        assert store.session_id == session_id
        assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
        await until_answered(other)  # the store may reconnect some seconds later
        assert (await other.get("/kept")).data == b"one"
    finally:
        await store.close()
        await other.close()
        await server.stop()


@pytest.mark.integration
async def test_a_malformed_response_ends_the_session_but_not_the_store(zookeeper: ServerSpec) -> None:
    proxy = Proxy(zookeeper.host, zookeeper.client_port)
    await proxy.start()
    store = await ZooKeeperStore.connect(proxy.host_port)
    states: list[SessionState] = []
    store.on_session_change(states.append)
    fired = asyncio.Event()
    await store.exists("/nonsense", watch=fired.set)
    proxy.send_nonsense()
    async with asyncio.timeout(30):
        await fired.wait()
    assert states[-2:] == [SessionState.LOST, SessionState.CONNECTED]
    await store.create("/nonsense", ephemeral=True)
    await store.close()
    await proxy.close()


@pytest.mark.integration
async def test_a_store_without_its_thread_can_be_closed(zookeeper: ServerSpec) -> None:
    proxy = Proxy(zookeeper.host, zookeeper.client_port)
    await proxy.start()
    store = await ZooKeeperStore.connect(proxy.host_port)
    lost = asyncio.Event()
    store.on_session_change(lambda state: lost.set() if state is SessionState.LOST else None)
    proxy.send_nonsense()
    async with asyncio.timeout(30):
        await lost.wait()
        await store.close()
    await proxy.close()

"""What is the kazoo adapter's alone."""

import asyncio
import socket

import pytest
from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_metadata.embedded import ServerSpec
from bindery_metadata.zookeeper import ZooKeeperStore, _Crossing, validate_hosts
from conftest import free_port


@pytest.mark.parametrize("hosts", ["a:2181", "127.0.0.1:2181,127.0.0.1:2182", "[::1]:2181"])
def test_lists_of_servers_are_read(hosts: str) -> None:
    assert validate_hosts(hosts) == hosts


@pytest.mark.parametrize("hosts", ["", "a", ":2181", "a:", "a:x", "a:0", "a:65536", "a:1,", "a:1,,b:2", "a/root:2181"])
async def test_what_is_no_list_of_servers_is_refused(hosts: str) -> None:
    with pytest.raises(BadRequest):
        await ZooKeeperStore.connect(hosts)


async def test_an_error_names_the_servers_that_do_not_answer() -> None:
    hosts = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(MetadataUnavailable) as raised:
        await ZooKeeperStore.connect(hosts, connect_timeout_s=0.3)
    assert hosts in str(raised.value)


async def test_a_server_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        async with asyncio.timeout(10):
            with pytest.raises(MetadataUnavailable):
                await ZooKeeperStore.connect(f"{host}:{port}", connect_timeout_s=0.2, session_timeout_s=1.0)


async def test_events_cross_in_order_and_a_failing_one_stops_no_other() -> None:
    crossing = _Crossing(asyncio.get_running_loop())
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
    crossing = _Crossing(loop)
    loop.close()
    crossing.put(lambda: None)


@pytest.mark.integration
async def test_one_of_several_servers_is_enough(zookeeper: ServerSpec) -> None:
    store = await ZooKeeperStore.connect(f"127.0.0.1:{free_port()},{zookeeper.hosts}")
    await store.sync("/")
    await store.close()


@pytest.mark.integration
async def test_more_requests_than_fit_in_flight_all_get_their_answer(zookeeper: ServerSpec) -> None:
    store = await ZooKeeperStore.connect(zookeeper.hosts)
    answers = await asyncio.gather(*(store.exists("/zookeeper") for _ in range(3_000)))
    assert all(answers)
    await store.close()


@pytest.mark.integration
async def test_the_loop_runs_on_while_requests_are_under_way(zookeeper: ServerSpec) -> None:
    store = await ZooKeeperStore.connect(zookeeper.hosts)
    loop = asyncio.get_running_loop()
    asked = [asyncio.create_task(store.sync("/")) for _ in range(200)]
    longest, last = 0.0, loop.time()
    while not all(task.done() for task in asked):
        await asyncio.sleep(0)
        now = loop.time()
        longest, last = max(longest, now - last), now
    assert longest < 0.5
    await store.close()

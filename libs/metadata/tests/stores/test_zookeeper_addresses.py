"""A store reconnects to a ZooKeeper server that restarts at another address under the same name, like a new pod."""

import asyncio
import socket
from collections.abc import Callable

import pytest
from bindery_metadata.stores.embedded import ServerSpec
from bindery_metadata.stores.store import SessionState
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from proxy import Proxy

pytestmark = pytest.mark.integration

NAME = "zookeeper-0.zookeepers"
WAIT_S = 30.0


class Names:
    """Resolves NAME to the port of a proxy, or to no address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port: int | None = None
        self.failures = 0
        self._really = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: str, *rest: object, **more: object) -> object:
        if host != NAME:
            return self._really(host, *rest, **more)  # type: ignore[arg-type]
        if self.port is None:
            self.failures += 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", self.port))]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def proxy_for(zookeeper: ServerSpec) -> tuple[Proxy, int]:
    proxy = Proxy("127.0.0.1", zookeeper.client_port)
    await proxy.start()
    return proxy, int(proxy.host_port.rpartition(":")[2])


async def test_the_session_continues_at_the_new_address(zookeeper: ServerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    old, names.port = await proxy_for(zookeeper)
    store = await ZooKeeperStore.connect(f"{NAME}:2181", session_timeout_s=10)
    try:
        session_id = store.session_id
        await store.create("/moves", ephemeral=True)
        names.port = None
        await old.close()
        await until(lambda: store.session_state is not SessionState.CONNECTED and names.failures >= 3)
        new, names.port = await proxy_for(zookeeper)
        await until(lambda: store.session_state is SessionState.CONNECTED)
        assert store.session_id == session_id
        assert await store.exists("/moves") is not None
    finally:
        await store.close()
    await new.close()


async def test_a_start_waits_for_a_name_that_does_not_resolve_yet(
    zookeeper: ServerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    connecting = asyncio.create_task(ZooKeeperStore.connect(f"{NAME}:2181", connect_timeout_s=WAIT_S))
    await until(lambda: names.failures >= 3)
    proxy, names.port = await proxy_for(zookeeper)
    store = await connecting
    assert store.session_state is SessionState.CONNECTED
    await store.close()
    await proxy.close()

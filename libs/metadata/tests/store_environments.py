"""The two environments of every test of this package: in memory, and a real ZooKeeper."""

import asyncio
import contextlib
import socket
import ssl
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from bindery_core.errors import MetadataUnavailable, NoSuchNode
from bindery_metadata.stores.access_lists import NewNodes
from bindery_metadata.stores.embedded import SecurePort, ServerSpec
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import MetadataStore, SessionState
from bindery_metadata.stores.zookeeper import ZooKeeperStore, make_chroot
from bindery_metadata.stores.zookeeper_access import AccessFiles
from bindery_simulation.certificates.authority import Authority, in_one_file
from kazoo.client import KazooClient
from proxy import READ_TYPES, WRITE_TYPES, Proxy

TIMEOUT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StoreEnvironment(ABC):
    """The environment of a store, and the faults that it can inject."""

    @abstractmethod
    async def connect(self, *, operation_timeout_s: float = TIMEOUT_S) -> MetadataStore: ...

    @abstractmethod
    async def suspend(self, store: MetadataStore) -> None:
        """Break the connection and keep it broken. Return when the store is SUSPENDED."""

    @abstractmethod
    async def resume(self, store: MetadataStore) -> None:
        """Allow the connection again. Return when the store is CONNECTED."""

    @abstractmethod
    async def end_session(self, store: MetadataStore) -> None:
        """End the session of `store` on the server. The store may or may not be notified."""

    @abstractmethod
    def lose_next_write(self, store: MetadataStore, *, applied: bool) -> None: ...

    @abstractmethod
    def lose_next_read(self, store: MetadataStore) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def expire(self, store: MetadataStore) -> None:
        """End the session of a connected store. Return when the store is CONNECTED in a new session."""
        old = store.session_id
        await self.end_session(store)
        await until(lambda: store.session_state is SessionState.CONNECTED and store.session_id not in (0, old))


class MemoryEnvironment(StoreEnvironment):
    def __init__(self) -> None:
        self.tree = MemoryTree()
        self._stores: list[MemoryStore] = []

    async def connect(self, *, operation_timeout_s: float = TIMEOUT_S) -> MetadataStore:
        self._stores.append(self.tree.connect(operation_timeout_s=operation_timeout_s))
        return self._stores[-1]

    async def suspend(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        self.tree.suspend(store)

    async def resume(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        self.tree.resume(store)

    async def end_session(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        self.tree.expire(store)

    def lose_next_write(self, store: MetadataStore, *, applied: bool) -> None:
        assert isinstance(store, MemoryStore)
        store.lose_next_write(applied=applied)

    def lose_next_read(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        store.fail_next(MetadataUnavailable("connection lost"))

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@dataclass(frozen=True)
class SecureServer:
    """A server with a secure port, its authority, and files for a client that it accepts."""

    spec: ServerSpec
    folder: Path
    authority: Authority
    certificate: tuple[Path, Path]
    """Files of the server's certificate and its key."""

    @classmethod
    def make(cls, folder: Path) -> "SecureServer":
        """Write the files. The server is not started."""
        authority = Authority(folder)
        issued = authority.issue("server")
        (folder / "credentials").write_text("bindery:first password\n")
        secure = SecurePort(free_port(), in_one_file(*issued), authority.ca_file)
        spec = ServerSpec(folder / "zookeeper", free_port(), tick_ms=200, session_timeout_ms_min=400, secure=secure)
        return cls(spec, folder, authority, issued)

    @property
    def hosts(self) -> str:
        assert self.spec.secure is not None
        return f"{self.spec.host}:{self.spec.secure.port}"

    @property
    def files(self) -> AccessFiles:
        return AccessFiles(
            ca_file=str(self.authority.ca_file),
            credentials_file=str(self.folder / "credentials"),
            new_nodes=NewNodes.CREATOR,
        )

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts of a proxy."""
        towards_clients = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        towards_clients.load_cert_chain(*self.certificate)
        return towards_clients, ssl.create_default_context(cafile=self.authority.ca_file)


class ZooKeeperEnvironment(StoreEnvironment):
    """Each store connects to the server through its own proxy; by TLS and with credentials if there is `secure`.

    `chroot`: the node that is the root of the stores; empty: ZooKeeper's own.
    """

    def __init__(self, host: str, port: int, *, secure: SecureServer | None = None, chroot: str = "") -> None:
        self._address = (host, port)
        self._secure = secure
        self._chroot = chroot
        self._proxies: dict[MetadataStore, Proxy] = {}

    async def connect(self, *, operation_timeout_s: float = TIMEOUT_S) -> MetadataStore:
        if self._secure is None:
            proxy, access = Proxy(*self._address), None
        else:
            host, port = self._secure.hosts.split(":")
            proxy, access = Proxy(host, int(port), self._secure.contexts()), self._secure.files.load()
        await proxy.start()
        hosts = proxy.host_port + self._chroot
        store = await ZooKeeperStore.connect(hosts, operation_timeout_s=operation_timeout_s, access=access)
        self._proxies[store] = proxy
        return store

    async def suspend(self, store: MetadataStore) -> None:
        self._proxies[store].cut()
        await until(lambda: store.session_state is not SessionState.CONNECTED)

    async def resume(self, store: MetadataStore) -> None:
        self._proxies[store].restore()
        await until(lambda: store.session_state is SessionState.CONNECTED)

    async def end_session(self, store: MetadataStore) -> None:
        """Take over the session with a second connection, and close it."""
        assert isinstance(store, ZooKeeperStore)
        client = store._client
        host, port = self._address
        thief = KazooClient(f"{host}:{port}", client_id=(client._session_id, client._session_passwd))

        def steal() -> None:
            thief.start(timeout=TIMEOUT_S)
            thief.stop()
            thief.close()

        await asyncio.to_thread(steal)

    def lose_next_write(self, store: MetadataStore, *, applied: bool) -> None:
        self._proxies[store].lose_next(WRITE_TYPES, applied=applied)

    def lose_next_read(self, store: MetadataStore) -> None:
        self._proxies[store].lose_next(READ_TYPES, applied=True)

    async def close(self) -> None:
        for store, proxy in self._proxies.items():
            proxy.restore()
            await store.close()
            await proxy.close()

    async def wipe(self) -> None:
        """Delete the nodes of an earlier test, and create the chroot."""
        await make_chroot(f"{self._address[0]}:{self._address[1]}{self._chroot}")
        store = await self.connect()
        for name in await store.children("/"):
            if name != "zookeeper":
                await remove_tree(store, f"/{name}")


async def remove_tree(store: MetadataStore, path: str) -> None:
    with contextlib.suppress(NoSuchNode):
        for name in await store.children(path):
            await remove_tree(store, f"{path}/{name}")
        await store.delete(path, version=None)


async def until(condition, *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `condition()` holds. Raises TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def until_answered(store: MetadataStore) -> None:
    """Sync until a response arrives within the operation timeout. All earlier requests are processed by then."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(MetadataUnavailable):
                await store.sync("/")
                return

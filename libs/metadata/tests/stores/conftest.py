"""The tests of stores also run below a chroot; and by TLS, with credentials, and with nodes that only their creator may
use."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from store_environments import MemoryEnvironment, SecureServer, StoreEnvironment, ZooKeeperEnvironment


@pytest.fixture(scope="session")
def secure_zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    """One real server with a secure port for all tests."""
    secure = SecureServer.make(tmp_path_factory.mktemp("secure"))
    server = EmbeddedZooKeeper(secure.spec)
    asyncio.run(server.start())
    yield secure
    asyncio.run(server.stop())


@pytest.fixture(
    params=[
        "memory",
        pytest.param("zookeeper", marks=pytest.mark.integration),
        pytest.param("zookeeper/some/chroot", marks=pytest.mark.integration),
        pytest.param("secure_zookeeper", marks=pytest.mark.integration),
    ]
)
def server(request: pytest.FixtureRequest) -> ServerSpec | SecureServer | None:
    """Replaces the fixture of the folder above."""
    return None if request.param == "memory" else request.getfixturevalue(request.param.partition("/")[0])


@pytest.fixture
async def environment(
    request: pytest.FixtureRequest, server: ServerSpec | SecureServer | None
) -> AsyncIterator[StoreEnvironment]:
    """Replaces the fixture of the folder above."""
    if server is None:
        environment: StoreEnvironment = MemoryEnvironment()
    else:
        spec, secure = (server.spec, server) if isinstance(server, SecureServer) else (server, None)
        _, slash, path = request.node.callspec.params["server"].partition("/")
        chroot = slash + path
        environment = ZooKeeperEnvironment(spec.host, spec.client_port, secure=secure, chroot=chroot)
        await environment.wipe()
    yield environment
    await environment.close()

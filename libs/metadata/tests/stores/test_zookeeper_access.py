"""Connections to ZooKeeper by TLS and with credentials: what is refused, and what continues."""

import asyncio
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, MetadataUnavailable, Unauthorized, VersionConflict
from bindery_metadata.stores.access_lists import OPEN_LIST, Kind, NewNodes, kind_of, list_of
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, SecurePort, ServerSpec
from bindery_metadata.stores.store import Create, MetadataStore, SessionState
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, VARIABLES, AccessFiles, ConnectionRefused
from bindery_metadata.stores.zookeeper_connections import Crossing, LoopHandler
from bindery_simulation.certificates.authority import Authority, in_one_file
from store_environments import SecureServer, ZooKeeperEnvironment, free_port, remove_tree, until

pytestmark = pytest.mark.timeout(300)

REFUSED_AFTER_S = 5.0
"""Time in seconds after which a connection that is refused is given up."""
CONNECTED_AFTER_S = 30.0
"""Maximum time in seconds of other connections."""


@pytest.fixture
def files(secure_zookeeper: SecureServer, tmp_path: Path) -> AccessFiles:
    """Files of a client; the credentials are a copy of its own."""
    credentials = tmp_path / "credentials"
    credentials.write_text((secure_zookeeper.folder / "credentials").read_text())
    return replace(secure_zookeeper.files, credentials_file=str(credentials))


async def refused(hosts: str, files: AccessFiles) -> ZooKeeperStore:
    return await ZooKeeperStore.connect(hosts, access=files.load(), connect_timeout_s=REFUSED_AFTER_S)


async def connect(hosts: str, files: AccessFiles) -> ZooKeeperStore:
    return await ZooKeeperStore.connect(hosts, access=files.load(), connect_timeout_s=CONNECTED_AFTER_S)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_come_from_the_environment() -> None:
    assert AccessFiles.of({}) == NO_ACCESS
    environment = {variable: f"/{option}" for option, variable in VARIABLES.items()} | {
        "BINDERY_ZOOKEEPER_NEW_NODES": "Shared"
    }
    assert AccessFiles.of(environment) == AccessFiles(
        ca_file="/ca_file",
        certificate_file="/certificate_file",
        key_file="/key_file",
        credentials_file="/credentials_file",
        new_nodes=NewNodes.SHARED,
    )
    with pytest.raises(BadRequest, match="BINDERY_ZOOKEEPER_NEW_NODES must be one of open, creator, shared"):
        AccessFiles.of({"BINDERY_ZOOKEEPER_NEW_NODES": "closed"})


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (AccessFiles(new_nodes=NewNodes.CREATOR), "BINDERY_ZOOKEEPER_CREDENTIALS_FILE"),
        (AccessFiles(certificate_file="c", key_file="k"), "BINDERY_ZOOKEEPER_CA_FILE"),
        (AccessFiles(ca_file="c", certificate_file="c"), "BINDERY_ZOOKEEPER_KEY_FILE"),
    ],
)
def test_options_that_need_others_name_them(files: AccessFiles, missing: str) -> None:
    with pytest.raises(BadRequest, match=missing):
        files.load()


@pytest.mark.parametrize(
    "content", [b"", b"  ", b"text", b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"]
)
def test_an_unusable_authority_is_refused(tmp_path: Path, content: bytes) -> None:
    """Also an empty file, with which Python would trust the authorities of the operating system."""
    (tmp_path / "ca").write_bytes(content)
    with pytest.raises(BadRequest, match="BINDERY_ZOOKEEPER_CA_FILE"):
        AccessFiles(ca_file=str(tmp_path / "ca")).load()


def test_a_missing_file_is_refused_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"zookeeper_access\.credentials_file"):
        AccessFiles(credentials_file=str(tmp_path / "none")).load(lambda option: f"zookeeper_access.{option}")


def test_host_names_are_always_checked(tmp_path: Path) -> None:
    tls = AccessFiles(ca_file=str(Authority(tmp_path).ca_file)).load().presented.tls
    assert tls is not None
    assert tls.check_hostname
    assert tls.verify_mode is ssl.CERT_REQUIRED
    assert tls.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(tls.get_ca_certs()) == 1


def test_reprs_contain_no_secret(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("bindery:secretword")
    access = AccessFiles(credentials_file=str(tmp_path / "credentials")).load()
    assert "secretword" not in f"{access!r}{access.presented!r}"


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.integration
async def test_the_name_in_the_server_list_must_be_in_the_certificate(tmp_path: Path, files: AccessFiles) -> None:
    """kazoo's own TLS would accept this server."""
    authority = Authority(tmp_path)
    both = in_one_file(*authority.issue("other", hosts=["zookeeper.example.com"]))
    spec = ServerSpec(tmp_path / "zk", free_port(), secure=SecurePort(free_port(), both, authority.ca_file))
    assert spec.secure
    async with EmbeddedZooKeeper(spec):
        with pytest.raises(ConnectionRefused, match="certificate is refused"):
            await refused(f"127.0.0.1:{spec.secure.port}", replace(files, ca_file=str(authority.ca_file)))
        with pytest.raises(ConnectionRefused, match="Hostname mismatch"):
            await refused(f"localhost:{spec.secure.port}", replace(files, ca_file=str(authority.ca_file)))


@pytest.mark.integration
async def test_a_name_in_the_certificate_is_accepted(secure_zookeeper: SecureServer, files: AccessFiles) -> None:
    port = secure_zookeeper.hosts.rpartition(":")[2]
    store = await connect(f"localhost:{port}", files)
    await store.sync("/")
    await store.close()


@pytest.mark.integration
async def test_servers_of_another_authority_are_refused(
    secure_zookeeper: SecureServer, files: AccessFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged once, however often the connection is attempted."""
    stranger = Authority(tmp_path, "stranger")
    with pytest.raises(ConnectionRefused, match="check the server list and ca_file"):
        await refused(secure_zookeeper.hosts, replace(files, ca_file=str(stranger.ca_file)))
    assert [record.message for record in caplog.records].count("zookeeper_connection_refused") == 1


@pytest.mark.integration
async def test_a_port_without_tls_is_refused(secure_zookeeper: SecureServer, files: AccessFiles) -> None:
    with pytest.raises(ConnectionRefused, match="secureClientPort"):
        await refused(secure_zookeeper.spec.hosts, files)


@pytest.mark.integration
async def test_a_client_certificate_is_presented(tmp_path: Path, files: AccessFiles) -> None:
    authority = Authority(tmp_path)
    both, own = in_one_file(*authority.issue("server", hosts=["127.0.0.1"])), authority.issue("client")
    secure = SecurePort(free_port(), both, authority.ca_file, client_certificates=True)
    files = replace(files, ca_file=str(authority.ca_file))
    async with EmbeddedZooKeeper(ServerSpec(tmp_path / "zk", free_port(), secure=secure)):
        # With TLS 1.3, the server refuses the client after the handshake, by closing the connection.
        with pytest.raises(MetadataUnavailable):
            await refused(f"127.0.0.1:{secure.port}", files)
        with_certificate = replace(files, certificate_file=str(own[0]), key_file=str(own[1]))
        store = await connect(f"127.0.0.1:{secure.port}", with_certificate)
        await store.create("/node")
        assert (await store.access_list("/node")).entries == list_of(
            NewNodes.CREATOR, store.access.presented.credentials
        )
        await store.close()


async def test_a_record_with_several_responses_is_read_at_once(tmp_path: Path) -> None:
    """The operating system reports the socket once; the rest of the record is in OpenSSL's memory."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    towards_clients = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    towards_clients.load_cert_chain(certificate, key)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with towards_clients.wrap_socket(theirs, server_side=True) as server:
            server.sendall(b"two responses")
            server.recv(1)

    serving = threading.Thread(target=serve)
    serving.start()
    tls = AccessFiles(ca_file=str(authority.ca_file)).load().presented.tls
    assert tls
    with await asyncio.to_thread(tls.wrap_socket, ours, server_hostname="localhost") as client:
        handler = LoopHandler(Crossing(asyncio.get_running_loop()), lambda: None, lambda *_: client)
        assert handler.select([client], [], [], 30)[0] == [client]
        assert await asyncio.to_thread(client.recv, 3) == b"two"
        assert handler.select([client], [], [], 30) == ([client], [], [])
        assert client.recv(100) == b" responses"
        assert handler.select([client], [], [], 0.01) == ([], [], [])
        client.sendall(b"x")
    await asyncio.to_thread(serving.join)


# --- credentials and access lists -------------------------------------------------------------------------------------


@pytest.fixture
async def secured(secure_zookeeper: SecureServer, files: AccessFiles):
    """A store whose nodes belong to its credentials, with the node /protected/child."""
    store = await connect(secure_zookeeper.hosts, files)
    await remove_tree(store, "/protected")
    await store.multi([Create("/protected", b"x"), Create("/protected/child")])
    yield store
    await remove_tree(store, "/protected")
    await store.close()


@pytest.mark.integration
@pytest.mark.parametrize("credentials", [None, "bindery:wrong\n", "stranger:first password\n"])
async def test_clients_without_the_credentials_can_do_nothing(
    secure_zookeeper: SecureServer, secured: ZooKeeperStore, tmp_path: Path, credentials: str | None
) -> None:
    files = NO_ACCESS
    if credentials:
        (tmp_path / "others").write_text(credentials)
        files = AccessFiles(credentials_file=str(tmp_path / "others"))
    stranger = await connect(secure_zookeeper.spec.hosts, files)
    for attempt in (
        stranger.get("/protected"),
        stranger.children("/protected"),
        stranger.set("/protected", b"y", version=None),
        stranger.create("/protected/new"),
        stranger.delete("/protected/child", version=None),
        stranger.access_list("/protected"),
        stranger.set_access_list("/protected", OPEN_LIST, version=None),
        stranger.multi([Create("/protected/new")]),
    ):
        with pytest.raises(Unauthorized, match="credentials_file"):
            await attempt
    await stranger.close()
    assert await secured.children("/protected") == ["child"]
    assert (await secured.get("/protected")).data == b"x"


@pytest.mark.integration
async def test_shared_nodes_can_be_read_by_everybody(
    secure_zookeeper: SecureServer, secured: ZooKeeperStore, files: AccessFiles
) -> None:
    sharing = await connect(secure_zookeeper.hosts, replace(files, new_nodes=NewNodes.SHARED))
    await sharing.create("/protected/shared", b"z")
    stranger = await connect(secure_zookeeper.spec.hosts, NO_ACCESS)
    assert (await stranger.get("/protected/shared")).data == b"z"
    with pytest.raises(Unauthorized):
        await stranger.set("/protected/shared", b"", version=None)
    await secured.set("/protected/shared", b"", version=None)
    await stranger.close()
    await sharing.close()


@pytest.mark.integration
async def test_lists_are_replaced_at_the_expected_version(secured: ZooKeeperStore) -> None:
    path = "/protected/child"
    before = await secured.access_list(path)
    assert (before.version, before.is_ephemeral, before.children_count) == (0, False, 0)
    await secured.set_access_list(path, OPEN_LIST, version=0)
    assert (await secured.access_list(path)).entries == OPEN_LIST
    with pytest.raises(VersionConflict):
        await secured.set_access_list(path, before.entries, version=0)
    await secured.set_access_list(path, before.entries, version=None)
    assert (await secured.access_list(path)).version == 2


@pytest.mark.integration
async def test_a_new_session_presents_the_credentials(secure_zookeeper: SecureServer) -> None:
    spec = secure_zookeeper.spec
    environment = ZooKeeperEnvironment(spec.host, spec.client_port, secure=secure_zookeeper)
    await environment.wipe()
    store = await environment.connect()
    await store.create("/kept", b"x")
    await environment.expire(store)
    assert (await store.get("/kept")).data == b"x"
    await environment.suspend(store)
    await environment.resume(store)
    assert (await store.get("/kept")).data == b"x"
    await remove_tree(store, "/kept")
    await environment.close()


async def reconnect(environment: ZooKeeperEnvironment, store: MetadataStore) -> None:
    await environment.suspend(store)
    await environment.resume(store)


@pytest.mark.integration
async def test_changed_credentials_are_presented_by_the_next_connection(secure_zookeeper: SecureServer) -> None:
    """Both lines are presented, and new nodes belong to the first. An unusable file changes nothing."""
    spec, path = secure_zookeeper.spec, secure_zookeeper.folder / "credentials"
    environment = ZooKeeperEnvironment(spec.host, spec.client_port, secure=secure_zookeeper)
    before = path.read_text()
    store = await environment.connect()
    assert isinstance(store, ZooKeeperStore)
    await remove_tree(store, "/rotated")
    try:
        await store.create("/rotated")
        path.write_text(f"bindery:second password\n{before}")
        await reconnect(environment, store)
        credentials = store.access.presented.credentials
        await store.create("/rotated/new")
        assert kind_of((await store.access_list("/rotated")).entries, credentials) is Kind.PREVIOUS
        assert kind_of((await store.access_list("/rotated/new")).entries, credentials) is Kind.CREATOR
        path.write_text("")
        await reconnect(environment, store)
        assert store.access.failure is not None
        assert await store.children("/rotated") == ["new"]
        await remove_tree(store, "/rotated")
    finally:
        path.write_text(before)
        await environment.close()


@pytest.mark.integration
async def test_a_store_connects_again_after_a_restart_of_the_server(tmp_path: Path) -> None:
    secure = SecureServer.make(tmp_path)
    async with EmbeddedZooKeeper(secure.spec):
        store = await connect(secure.hosts, secure.files)
        await store.create("/kept", b"x")
    await until(lambda: store.session_state is not SessionState.CONNECTED)
    async with EmbeddedZooKeeper(secure.spec):
        assert (await store.get("/kept")).data == b"x"
        await store.close()

"""Connections of kazoo's thread to ZooKeeper servers: how long one server may take."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from bindery_metadata.stores.access_lists import Credential
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles
from bindery_metadata.stores.zookeeper_connections import Connections
from bindery_simulation.certificates.authority import Authority

SESSION_TIMEOUT_S = 60.0
SERVERS = 300
"""So that one server has 0.2 s."""


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def connections(files: AccessFiles, presented: list[Sequence[Credential]] | None = None) -> Connections:
    return Connections(files.load(), servers=SERVERS, present=(presented if presented is not None else []).append)


def test_a_server_that_is_silent_in_the_handshake_has_its_share_of_the_session_timeout(
    silent: tuple[str, int], tmp_path: Path
) -> None:
    opening = connections(AccessFiles(ca_file=str(Authority(tmp_path).ca_file)))
    began_s = time.monotonic()
    with pytest.raises(ConnectionError):
        opening.open(silent, "localhost", SESSION_TIMEOUT_S)
    assert 0.1 < time.monotonic() - began_s < SESSION_TIMEOUT_S / 2
    assert opening.refusal == (
        f"localhost:{silent[1]}: the server does not answer the TLS handshake; is it a secureClientPort?"
    )


def test_bytes_that_come_one_by_one_do_not_extend_the_share(tmp_path: Path) -> None:
    """The deadline is that of the whole handshake, not of each read."""
    record = bytes.fromhex("160303400002003ffc0303") + bytes(16_000)  # the beginning of a ServerHello that never ends
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            for position in range(len(record)):
                try:
                    connection.sendall(record[position : position + 1])
                except OSError:
                    break
                if ended.wait(0.01):
                    break

    with socket.create_server(("127.0.0.1", 0)) as server:
        dripping = threading.Thread(target=drip, args=(server,))
        dripping.start()
        opening = connections(AccessFiles(ca_file=str(Authority(tmp_path).ca_file)))
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            opening.open(server.getsockname(), "localhost", SESSION_TIMEOUT_S)
        assert time.monotonic() - began_s < SESSION_TIMEOUT_S / 2
        ended.set()
        dripping.join()


def test_a_connection_without_tls_presents_the_credentials(silent: tuple[str, int], tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("bindery:password\n")
    presented: list[Sequence[Credential]] = []
    with connections(AccessFiles(credentials_file=str(tmp_path / "credentials")), presented).open(
        silent, "localhost", None
    ) as connection:
        assert not isinstance(connection, ssl.SSLSocket)
    assert [[credential.secret for credential in one] for one in presented] == [["bindery:password"]]


async def test_after_a_refusal_a_connection_that_succeeds_clears_it(silent: tuple[str, int], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    opening = connections(AccessFiles(ca_file=str(authority.ca_file)))
    with pytest.raises(ConnectionError):
        await asyncio.to_thread(opening.open, silent, "localhost", SESSION_TIMEOUT_S)
    assert opening.refusal is not None
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls) as server:
        connection = await asyncio.to_thread(opening.open, server.sockets[0].getsockname(), "localhost", 60 * SERVERS)
        connection.close()
    assert opening.refusal is None


def test_without_files_nothing_is_presented(silent: tuple[str, int]) -> None:
    presented: list[Sequence[Credential]] = []
    connections(NO_ACCESS, presented).open(silent, "localhost", None).close()
    assert [list(one) for one in presented] == [[]]

"""Real bookies that require TLS and a token, or a certificate; the client with and without them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bindery_client.connection.security import ClientSecurity, load_security
from bindery_client.settings import ClientSettings
from bindery_core.errors import BadRequest, BinderyError
from bindery_core.ids import EntryId
from bindery_identity.tokens import sign
from bindery_simulation.certificates import CA, OTHER_CA, certificate, key
from fake_cluster import QUICK
from ledger_client_contract import LedgerClientContract, MakeClient
from real_cluster import Clients, RealCluster

pytestmark = pytest.mark.integration
SIGNING_KEY = "a signing key of at least thirty-two bytes"
SERVER_TLS = ["--tls-certificate-file", str(certificate("bookie")), "--tls-key-file", str(key("bookie"))]
SHORT_TIMEOUTS = replace(QUICK, add_timeout_s=1.0, add_quorum_timeout_s=1.0)


def start(directory: Path, arguments: list[str]) -> Iterator[RealCluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = RealCluster(directory, zookeeper_port=port, bookie_arguments=arguments)
    try:
        asyncio.run(cluster.start())
        yield cluster
    finally:
        asyncio.run(cluster.stop())


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster that requires TLS and a signed token."""
    directory = tmp_path_factory.mktemp("tokens")
    keys = directory / "keys"
    keys.write_text(SIGNING_KEY + "\n")
    yield from start(
        directory, [*SERVER_TLS, "--tls-required", "--auth-provider", "token", "--auth-keys-file", str(keys)]
    )


@pytest.fixture(scope="module")
def with_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    yield from start(
        tmp_path_factory.mktemp("certificates"),
        [*SERVER_TLS, "--tls-ca-file", str(CA), "--auth-provider", "certificate", "--auth-allowed-names", "broker"],
    )


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_bytes(sign(SIGNING_KEY.encode(), subject="broker-1") + b"\n")
    return file


@pytest.mark.parametrize("wire_version", [2, 3])
class TestContractOverTlsWithAToken(LedgerClientContract):
    @pytest.fixture
    async def make_client(
        self, with_tokens: RealCluster, token_file: Path, wire_version: int
    ) -> AsyncIterator[MakeClient]:
        security = load_security(ca_file=CA, token_file=token_file)
        async with Clients(with_tokens, ClientSettings(wire_version=wire_version), security) as make:
            yield make


async def add_and_read(
    cluster: RealCluster, security: ClientSecurity, settings: ClientSettings = SHORT_TIMEOUTS
) -> None:
    async with Clients(cluster, settings, security) as make:
        writer = await (await make()).create()
        await writer.add_many([b"a", b"b"])
        reader = await (await make()).open(writer.ledger_id)
        assert [entry.payload for entry in await reader.read(EntryId(0), EntryId(1))] == [b"a", b"b"]


@pytest.mark.parametrize("wire_version", [2, 3])
async def test_an_allowed_certificate_is_sufficient(with_certificates: RealCluster, wire_version: int) -> None:
    security = load_security(ca_file=CA, certificate_file=certificate("client"), key_file=key("client"))
    await add_and_read(with_certificates, security, ClientSettings(wire_version=wire_version))


@pytest.mark.parametrize("wire_version", [2, 3])
@pytest.mark.parametrize("name", [None, "guest", "stranger"])
async def test_any_other_certificate_is_rejected(
    with_certificates: RealCluster, name: str | None, wire_version: int
) -> None:
    files = {} if name is None else {"certificate_file": certificate(name), "key_file": key(name)}
    security = load_security(ca_file=CA, **files)  # type: ignore[arg-type]
    with pytest.raises(BinderyError):
        await add_and_read(with_certificates, security, replace(SHORT_TIMEOUTS, wire_version=wire_version))


@pytest.mark.parametrize("wire_version", [2, 3])
@pytest.mark.parametrize("case", ["clear text", "no token", "another's token", "an untrusted authority"])
async def test_a_client_without_tls_or_a_valid_token_is_rejected(
    with_tokens: RealCluster, tmp_path: Path, token_file: Path, case: str, wire_version: int
) -> None:
    if case == "clear text":
        security = load_security(token_file=token_file)
    elif case == "no token":
        security = load_security(ca_file=CA)
    elif case == "another's token":
        wrong = tmp_path / "wrong"
        wrong.write_bytes(sign(b"k" * 32, subject="broker-1"))
        security = load_security(ca_file=CA, token_file=wrong)
    else:
        security = load_security(ca_file=OTHER_CA, token_file=token_file)
    with pytest.raises(BinderyError):
        await add_and_read(with_tokens, security, replace(SHORT_TIMEOUTS, wire_version=wire_version))


async def test_logs_contain_no_secrets(with_tokens: RealCluster, token_file: Path) -> None:
    token = token_file.read_text().strip()
    security = load_security(ca_file=CA, token_file=token_file)
    await add_and_read(with_tokens, security, ClientSettings())
    logs = "".join(path.read_text(errors="replace") for path in with_tokens.directory.glob("bookie-*/log"))
    assert token not in logs
    assert SIGNING_KEY not in logs
    assert token not in repr(security)


def test_the_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    """Bookies accept each line of their file of secrets, so that a client may have the same file."""
    file = tmp_path / "tokens"
    for text in (b"the new token", b"\n  the new token \r\nthe-old-token\n"):
        file.write_bytes(text)
        assert load_security(token_file=file).token == b"the new token"
    for empty in (b"", b" \n\r\n"):
        file.write_bytes(empty)
        with pytest.raises(BadRequest, match="the token file is empty"):
            load_security(token_file=file)

"""Authentication and TLS: tokens, server certificates and client certificates.

The token clusters offer TLS and require a token. They have one bookie of Bindery, one of Apache, or one of each with
Qw=2, so that every entry needs both. Apache's bookie supports Bindery's token protocol by TokenAuth.java. The mutual
cluster has only a Bindery bookie, which requires TLS and authenticates clients by their certificates.
"""

import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
from bindery_client.connection.security import ClientSecurity
from bindery_client.settings import ClientSettings
from bindery_simulation import certificates

from e2e.interop.actors import Actor, JavaActor, OurActor
from e2e.interop.clusters import Cluster, Clusters, our_client, start_bookies
from e2e.interop.clusters import Connect as OurConnect
from e2e.interop.conftest import JAVA_SETTINGS, Side
from e2e.interop.java import Refused

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]

UNAUTHORIZED: Final = "UnauthorizedAccess (-102)"
CLOSED: Final = "NotEnoughBookies (-6)"
"""Error of Apache's client if the bookies close every connection."""
REFUSED: Final = f"{UNAUTHORIZED} or {CLOSED}"
"""Error of Apache's client if bookies refuse its authentication. The client registers the request after it has begun to
connect. If the bookie's answer and the end of the connection come first, the request finds a closed connection."""
NONE_LEFT: Final = "NotEnoughBookies"
"""Error of Bindery's client in this case."""
TOKEN: Final = "correct-horse-battery-staple"
RACING_ATTEMPTS: Final = 4
"""Attempts of Apache's v2 client, with TLS and a token, at a cluster that has a bookie of Apache. On a busy machine, a
connection can fail because of the race that TokenAuth.java describes."""
SESSION_TIMEOUT_S: Final = 30
"""Session timeout of bookies that are never killed. A cluster of two, both of which every ledger needs, could otherwise
create none while a busy machine delays one of them for a few seconds."""
KINDS: Final = {"bindery": ("bindery",), "apache": ("apache",), "mixed": ("bindery", "apache")}

Connect = Callable[..., Awaitable[Actor]]
NUMBERS: Final = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def token_clusters(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cluster]:
    secrets = Path(tmp_path_factory.mktemp("secrets")) / "tokens"
    secrets.write_text(TOKEN + "\n")
    options = ("--auth-provider", "token", "--auth-secrets-file", str(secrets), *our_tls())
    found = {}
    for name, kinds in KINDS.items():
        cluster = found[name] = await clusters.neighbour(f"token-{name}")
        for kind in kinds:
            settings = {"bookieAuthProviderFactoryClass": "TokenAuth$Bookie", "interopToken": TOKEN, **apache_tls()}
            clusters.add_bookie(cluster, kind, settings=settings, options=options, session_timeout_s=SESSION_TIMEOUT_S)
    await start_bookies(*found.values())
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mutual_cluster(clusters: Clusters) -> Cluster:
    cluster = await clusters.neighbour("mutual")
    clusters.add_bookie(
        cluster, "bindery", options=("--auth-provider", "certificate", "--auth-allowed-names", "broker", *our_tls())
    )
    await start_bookies(cluster)
    return cluster


def our_tls() -> tuple[str, ...]:
    return (
        *("--tls-certificate-file", str(certificates.certificate("bookie"))),
        *("--tls-key-file", str(certificates.key("bookie"))),
        *("--tls-ca-file", str(certificates.CA)),
    )


def apache_tls() -> dict[str, str]:
    return {
        "tlsProvider": "JDK",
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
        "tlsKeyStoreType": "PEM",
        "tlsKeyStore": str(certificates.key("bookie")),
        "tlsCertificatePath": str(certificates.certificate("bookie")),
        "tlsTrustStoreType": "PEM",
        "tlsTrustStore": str(certificates.CA),
    }


def java_token(text: str, *, is_after_tls: bool) -> dict[str, str]:
    """Settings of a Java client with this token. `is_after_tls`: see TokenAuth.java."""
    return {
        "clientAuthProviderFactoryClass": "TokenAuth$Client",
        "interopToken": text,
        "interopTokenAfterTls": str(is_after_tls).lower(),
    }


def java_tls(*, name: str, ca: Path) -> dict[str, str]:
    """Settings of a Java client with TLS and, if given, the client certificate `name`."""
    settings = {
        "tlsProvider": "JDK",
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
        "clientTrustStoreType": "PEM",
        "clientTrustStore": str(ca),
        "tlsHostnameVerificationEnabled": "true",
    }
    if name:
        settings |= {
            "tlsClientAuthentication": "true",
            "clientKeyStoreType": "PEM",
            "clientKeyStore": str(certificates.key(name)),
            "tlsCertificatePath": str(certificates.certificate(name)),
        }
    return settings


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ours() -> AsyncIterator[OurConnect]:
    async with our_client() as connect:
        yield connect


@pytest.fixture
def connect(side: Side, clusters: Clusters, ours: OurConnect) -> Connect:
    """A function that connects a client of this column's kind and protocol."""

    async def connect(cluster: Cluster, *, token: str = "", ca: Path | None = None, name: str = "") -> Actor:
        if not side.is_java:
            security = ClientSecurity(tls=our_context(ca, name) if ca else None, token=token.encode() or None)
            settings = ClientSettings(wire_version=2 if side.is_v2 else 3)
            client = await ours(cluster.zookeeper, root=cluster.root, settings=settings, security=security)
            return OurActor(client, name="secure")
        is_after_tls = side.is_v2 and ca is not None and cluster.name == "token-bindery"
        actor = JavaActor(
            clusters.driver,
            name=f"secure {next(NUMBERS)}",
            uri=cluster.uri,
            settings={
                **JAVA_SETTINGS["v2" if side.is_v2 else "v3"],
                **(java_token(token, is_after_tls=is_after_tls) if token else {}),
                **(java_tls(name=name, ca=ca) if ca else {}),
            },
        )
        await actor.connect()
        return actor

    return connect


def our_context(ca: Path, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if name:
        context.load_cert_chain(certificates.certificate(name), certificates.key(name))
    return context


async def write_and_read(actor: Actor, cluster: Cluster) -> None:
    """Write to all bookies of the cluster, and read with recovery."""
    copies = len(cluster.bookies)
    writer = await actor.create(e=copies, qw=copies, qa=copies)
    await writer.add(20)
    reader = await actor.open(writer.ledger)
    assert await reader.read(0, 19) == 20


async def test_token(side: Side, token_clusters: dict[str, Cluster], connect: Connect) -> None:
    """token: the right one"""
    cluster = token_clusters[side.column.cluster]
    await write_and_read(await connect(cluster, token=TOKEN), cluster)


async def test_wrong_token(side: Side, token_clusters: dict[str, Cluster], connect: Connect) -> None:
    """token: a wrong one"""
    cluster = token_clusters[side.column.cluster]
    actor = await connect(cluster, token="something else entirely")
    await side.refused(write_and_read(actor, cluster), java=CLOSED if side.is_v2 else REFUSED, ours=NONE_LEFT)


async def test_no_token(side: Side, token_clusters: dict[str, Cluster], connect: Connect) -> None:
    """token: none, although bookies require one"""
    cluster = token_clusters[side.column.cluster]
    await side.refused(
        write_and_read(await connect(cluster), cluster),
        java=UNAUTHORIZED,
        ours="Unauthorized" if side.is_v2 else NONE_LEFT,
    )


async def test_token_unasked(side: Side, connect: Connect) -> None:
    """token: sent to bookies that do not require one"""
    actor = await connect(side.cluster, token=TOKEN)
    writer = await actor.create()
    await writer.add(5)


async def test_tls(side: Side, token_clusters: dict[str, Cluster], connect: Connect) -> None:
    """TLS: the bookie's certificate and host name verified, then a token"""
    cluster = token_clusters[side.column.cluster]
    is_racing = side.is_java and side.is_v2 and side.column.cluster != "bindery"
    for left in reversed(range(RACING_ATTEMPTS if is_racing else 1)):
        try:
            await write_and_read(await connect(cluster, ca=certificates.CA, token=TOKEN), cluster)
        except Refused as error:
            if not left or str(error) != CLOSED:
                raise
        else:
            return


async def test_tls_other_authority(side: Side, token_clusters: dict[str, Cluster], connect: Connect) -> None:
    """TLS: a client that does not trust the bookie's authority"""
    cluster = token_clusters[side.column.cluster]
    actor = await connect(cluster, ca=certificates.OTHER_CA, token=TOKEN)
    await side.refused(write_and_read(actor, cluster), java=CLOSED, ours=NONE_LEFT)


async def test_mutual(side: Side, mutual_cluster: Cluster, connect: Connect) -> None:
    """mutual TLS: a client whose certificate is on the list"""
    if side.column.cluster != "bindery":
        side.say("-")
        return
    await write_and_read(await connect(mutual_cluster, ca=certificates.CA, name="client"), mutual_cluster)


@pytest.mark.parametrize("who", ["not on the list", "of another authority", "not shown"])
async def test_mutual_refused(side: Side, mutual_cluster: Cluster, connect: Connect, who: str) -> None:
    """mutual TLS: a client whose certificate is {who}"""
    if side.column.cluster != "bindery":
        side.say("-")
        return
    name = {"not on the list": "guest", "of another authority": "stranger", "not shown": ""}[who]
    actor = await connect(mutual_cluster, ca=certificates.CA, name=name)
    # In v2, the bookie's error is a v3 frame, which may end the connection before the add is answered.
    await side.refused(write_and_read(actor, mutual_cluster), java=REFUSED if name == "guest" else CLOSED, ours="")


async def test_clear_where_tls_is_required(side: Side, mutual_cluster: Cluster, connect: Connect) -> None:
    """clear text to a bookie that requires TLS"""
    if side.column.cluster != "bindery":
        side.say("-")
        return
    await side.refused(write_and_read(await connect(mutual_cluster), mutual_cluster), java=UNAUTHORIZED, ours=NONE_LEFT)

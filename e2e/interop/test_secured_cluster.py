"""Apache's shell and client on a cluster whose ZooKeeper and bookies are secured.

| part      | requires                                                                                         |
|-----------|--------------------------------------------------------------------------------------------------|
| ZooKeeper | TLS with a certificate of the client; the columns of the table are the access lists of the nodes |
| bookies   | TLS and a token                                                                                  |

Programs of Apache present no credentials of ZooKeeper's scheme `digest`: with `shared` they can read the nodes, with
`creator` they cannot. The table shows the innermost exception of commands that are refused. The commands run in one JVM
whose ZooKeeper client uses TLS.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

import pytest
import pytest_asyncio
from bindery_metadata.stores.embedded import SecurePort
from bindery_metadata.stores.zookeeper_access import AccessFiles
from bindery_simulation import certificates
from bindery_simulation.certificates.authority import Authority, in_one_file

from e2e.interop.actors import JAVA_TIMEOUTS, Handle, JavaActor
from e2e.interop.clusters import Cluster, Clusters, run_cli, start_bookies
from e2e.interop.conftest import JAVA_SETTINGS, SECURED_TABLE
from e2e.interop.java import Driver, Refused, apache_shell, write_conf, zookeeper_tls
from e2e.interop.processes import free_port
from e2e.interop.table import Table
from e2e.interop.test_security import SESSION_TIMEOUT_S, TOKEN, java_tls, java_token, our_tls

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]

ENTRIES: Final = 5
METADATA_FAILED: Final = "ZK (-9)"
"""Error of Apache's client if ZooKeeper refuses a request."""
DELETED: Final = "NoSuchLedgerExistsOnMetadataServer (-25)"
MODES: Final = ("open", "shared", "creator")
only_open = pytest.mark.parametrize("mode", ["open"], indirect=True)
"""Cases that end before the access lists matter."""

READS: Final = {
    "listbookies -rw": r"^BookieID:{bookie}, IP:127\.0\.0\.1",
    "bookieinfo": r"^BookieID:{bookie},.*Free: \d+\(.*Total: \d+\(",
    "cookie_get $bookie": r'^bookieHost: "{bookie}"',
    "whatisinstanceid": r"InstanceId: [0-9a-f-]{{36}}$",
    "listledgers -meta": r"^ledgerID: {ledger}\n.*state=CLOSED.*lastEntryId=4",
    "ledgermetadata -ledgerid $ledger": r"^ledgerID: {ledger}\n.*state=CLOSED.*lastEntryId=4",
    "readledger -ledgerid $ledger": r"^-+ Lid={ledger}, Eid=4, EntrySize=510 -+$",
    "readledger -ledgerid $ledger -b $holder -fe 0 -le 5": r"^-+ Lid={ledger}, Eid=4 -+$",
    "listunderreplicated": r"^Under replicated ledger count: 0$",
}
"""Pattern of the output by command. Apache's `-le` is exclusive with `-b`."""
WRITES: Final = {
    "simpletest -ensemble 2 -writeQuorum 2 -ackQuorum 2 -numEntries 20": ("^20 entries written to ledger", "ZK"),
    "recover -f -l $ledger $holder": ("^Construct admin", "LedgerRecovery"),
    "lostbookierecoverydelay -s 17": ("^Successfully set LostBookieRecoveryDelay value in ZK: 17$", "NoAuth"),
    "deleteledger -f -ledgerid $doomed": ("", "ZK"),
}
"""Pattern of the output, and exception with the list `shared`, by command."""
SILENT: Final = "bookieinfo"
"""Command that prints nothing if it cannot read ZooKeeper."""
CLOSED: Final = "BookieHandleNotAvailable"
"""Exception if the bookie has closed the connection before the client registers its request."""
REFUSED_BY_BOOKIES: Final = {
    "without a token": "UnauthorizedAccess",
    "with a wrong token": f"UnauthorizedAccess or {CLOSED}",
    "with the token before TLS": f"UnauthorizedAccess or {CLOSED}",
    "without TLS": f"UnauthorizedAccess or {CLOSED}",
    "with TLS that trusts another authority": f"Security or {CLOSED}",
}
REFUSED_BY_ZOOKEEPER: Final = {
    "without TLS": "not an SSL/TLS record",
    "without a certificate": "Empty client certificate chain",
    "with TLS that trusts another authority": "Received fatal alert: certificate_unknown",
}
"""Reason in the log of ZooKeeper's server; the exception of the client is always ConnectionLoss."""
WAITED_MS: Final = (1_500, 6_000, 24_000)
"""Time in ms that a command waits for ZooKeeper, by attempt: on a busy machine, the first may end before a reason."""


@dataclass(frozen=True)
class Secured:
    cluster: Cluster
    options: tuple[str, ...]
    """Options of a JVM whose ZooKeeper client uses TLS with a certificate."""
    tools: Driver
    """Such a JVM."""
    client: JavaActor
    """Client that connected before the access lists were changed."""
    ledger: int
    """Closed ledger on one bookie."""
    doomed: Mapping[str, int]
    """Ledger that `deleteledger` names, by access list."""

    @property
    def conf(self) -> Path:
        return self.cluster.directory / "bk.conf"

    async def shell(self, command: str) -> tuple[int, str]:
        return await self.tools.shell(self.conf, *command.split())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(clusters: Clusters) -> AsyncIterator[Secured]:
    folder = clusters.directory / "authority"
    folder.mkdir()
    authority = Authority(folder)
    (folder / "credentials").write_text("bindery:interop-password\n")
    certificate, key = authority.issue("bookies")
    access = AccessFiles(
        ca_file=str(authority.ca_file),
        certificate_file=str(certificate),
        key_file=str(key),
        credentials_file=str(folder / "credentials"),
    )
    server = in_one_file(*authority.issue("server"))
    port = SecurePort(free_port(), server, authority.ca_file, client_certificates=True)
    key_store = in_one_file(*authority.issue("tools"))
    java_options = zookeeper_tls(authority=authority.ca_file, key_store=key_store)
    tools = Driver(log=clusters.directory / "tools.log", options=java_options)
    try:
        cluster, _ = await asyncio.gather(clusters.new_cluster("secured", secure=port, access=access), tools.start())
        await run_cli("cluster", "init", "--zookeeper", cluster.zookeeper, access=access)
        (folder / "tokens").write_text(TOKEN + "\n")
        options = (
            *("--auth-provider", "token", "--auth-secrets-file", str(folder / "tokens")),
            *(*our_tls(), "--tls-required", *zookeeper_options(access)),
        )
        for _ in range(2):
            clusters.add_bookie(cluster, "bindery", options=options, session_timeout_s=SESSION_TIMEOUT_S)
        await start_bookies(cluster)
        client = JavaActor(tools, name="secured", uri=cluster.uri, settings={**JAVA_SETTINGS["v3"], **bookie_access()})
        await client.connect()
        ledgers = [(await written(client)).ledger for _ in range(3)]
        doomed = dict(zip(MODES, (ledgers[1], ledgers[2], ledgers[2]), strict=True))
        found = Secured(cluster, java_options, tools, client, ledgers[0], doomed)
        write_conf(found.conf, shell_settings(cluster, bookie_access()))
        yield found
    finally:
        await tools.stop()


def zookeeper_options(access: AccessFiles) -> tuple[str, ...]:
    """Options of a Bindery service."""
    return (
        *("--zookeeper-access-ca-file", access.ca_file),
        *("--zookeeper-access-certificate-file", access.certificate_file),
        *("--zookeeper-access-key-file", access.key_file),
        *("--zookeeper-access-credentials-file", access.credentials_file),
    )


def bookie_access() -> dict[str, str]:
    """Settings of Apache's programs for the bookies."""
    return {**java_tls(name="", ca=certificates.CA), **java_token(TOKEN, is_after_tls=True)}


def shell_settings(
    cluster: Cluster, access: Mapping[str, str], *, zookeeper_ms: int = 1000 * SESSION_TIMEOUT_S
) -> dict[str, str]:
    """Content of a configuration file. `zookeeper_ms`: time in ms that a command waits for ZooKeeper."""
    return {**cluster.shell_settings, **JAVA_TIMEOUTS, **access, "zkTimeout": str(zookeeper_ms)}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=MODES)
async def mode(request: pytest.FixtureRequest, secured: Secured) -> str:
    """Access list of all nodes of the cluster. Its services create open ones; `acls apply` replaces their lists."""
    chosen: str = request.param
    if chosen != "open":
        words = ("cluster", "acls", "apply", "--mode", chosen, "--allow-open-sessions", "--yes")
        await run_cli(*words, "--zookeeper", secured.cluster.zookeeper, access=secured.cluster.access)
    return chosen


@pytest.fixture
def table_place(mode: str) -> tuple[Table, str, list[str]]:
    return SECURED_TABLE, mode, []


@pytest.fixture
def say(table_place: tuple[Table, str, list[str]]) -> Callable[[str], None]:
    return table_place[2].append


async def written(client: JavaActor) -> Handle:
    """A closed ledger on one bookie."""
    writer = await client.create(e=1, qw=1, qa=1)
    await writer.add(ENTRIES)
    await writer.close()
    return writer


async def holders(secured: Secured, mode: str) -> list[str | None]:
    """The bookies of the ledger and of the one to be deleted; None: deleted, or not readable."""
    found: list[str | None] = []
    for ledger in (secured.ledger, secured.doomed[mode]):
        try:
            ((holder,),) = (segment["ensemble"] for segment in (await secured.client.metadata(ledger))["segments"])
            found.append(holder)
        except Refused as error:
            if error.name not in (METADATA_FAILED, DELETED):
                raise
            found.append(None)
    return found


async def facts(secured: Secured, mode: str) -> dict[str, str]:
    """Values of the variables in commands."""
    bookie = secured.cluster.bookies[0].id
    holder, _ = await holders(secured, mode)
    return {
        "bookie": bookie,
        "holder": holder or bookie,
        "ledger": str(secured.ledger),
        "doomed": str(secured.doomed[mode]),
    }


def last_exception(text: str) -> str:
    """Name of the innermost exception of the last stack trace, without BK and Exception."""
    names = re.findall(r"^(?:Caused by: )?(?:\w+\.)+(?:\w+\$)?(?:BK)?(\w+)Exception\b", text, re.MULTILINE)
    assert names, text
    name: str = names[-1]
    return name


@pytest.mark.parametrize("command", READS)
async def test_reading_command(secured: Secured, mode: str, say: Callable[[str], None], command: str) -> None:
    """`bookkeeper shell {command}`"""
    values = await facts(secured, mode)
    status, text = await secured.shell(Template(command).substitute(values))
    if mode == "creator" and command == SILENT:
        assert (status, text) == (0, "")
        say("no output")
    elif mode == "creator":
        assert last_exception(text) == "NoAuth", text
        say("refused: NoAuth")
    else:
        pattern = READS[command].format(**{name: re.escape(value) for name, value in values.items()})
        assert status == 0, text
        assert re.search(pattern, text, re.MULTILINE), text
        assert "Exception" not in text, text


@pytest.mark.parametrize("command", WRITES)
async def test_writing_command(secured: Secured, mode: str, say: Callable[[str], None], command: str) -> None:
    """`bookkeeper shell {command}`"""
    before = await holders(secured, mode)
    status, text = await secured.shell(Template(command).substitute(await facts(secured, mode)))
    after = await holders(secured, mode)
    pattern, with_shared = WRITES[command]
    if mode == "open":
        assert status == 0, text
        assert re.search(pattern, text, re.MULTILINE), text
        assert "Exception" not in text, text
        changed = [old != new for old, new in zip(before, after, strict=True)]
        assert changed == [command.startswith("recover"), command.startswith("deleteledger")]
    else:
        assert after == before
        expected = with_shared if mode == "shared" else "NoAuth"
        assert last_exception(text) == expected, text
        say(f"refused: {expected}")


async def test_client_writes(secured: Secured, mode: str, say: Callable[[str], None]) -> None:
    """Apache's client creates and writes a ledger"""
    if mode == "open":
        await written(secured.client)
        return
    with pytest.raises(Refused) as caught:
        await written(secured.client)
    assert caught.value.name == METADATA_FAILED
    say(f"refused: {METADATA_FAILED}")


async def test_client_reads(secured: Secured, mode: str, say: Callable[[str], None]) -> None:
    """Apache's client reads a ledger"""
    if mode != "creator":
        reader = await secured.client.open(secured.ledger, recover=False)
        assert await reader.read(0, ENTRIES - 1) == ENTRIES
        return
    with pytest.raises(Refused) as caught:
        await secured.client.open(secured.ledger, recover=False)
    assert caught.value.name == METADATA_FAILED
    say(f"refused: {METADATA_FAILED}")


@only_open
@pytest.mark.parametrize("how", REFUSED_BY_BOOKIES)
async def test_bookies_refuse(secured: Secured, mode: str, say: Callable[[str], None], how: str) -> None:
    """bookies: `readledger` {how}"""
    tls, token = java_tls(name="", ca=certificates.CA), java_token(TOKEN, is_after_tls=True)
    settings = {
        "without a token": tls,
        "with a wrong token": {**tls, **java_token("something else entirely", is_after_tls=True)},
        "with the token before TLS": {**tls, **java_token(TOKEN, is_after_tls=False)},
        "without TLS": java_token(TOKEN, is_after_tls=False),
        "with TLS that trusts another authority": {**java_tls(name="", ca=certificates.OTHER_CA), **token},
    }[how]
    conf = secured.cluster.directory / "refused.conf"
    write_conf(conf, shell_settings(secured.cluster, settings))
    status, text = await secured.tools.shell(conf, "readledger", "-ledgerid", str(secured.ledger))
    assert status == 1, text
    assert last_exception(text) in REFUSED_BY_BOOKIES[how].split(" or "), text
    assert "Eid=" not in text
    say(f"refused: {REFUSED_BY_BOOKIES[how]}")


@only_open
@pytest.mark.parametrize("how", REFUSED_BY_ZOOKEEPER)
async def test_zookeeper_refuses(
    secured: Secured, mode: str, say: Callable[[str], None], tmp_path: Path, how: str
) -> None:
    """ZooKeeper: `listbookies` {how}"""
    properties = {
        "without TLS": {"zookeeper.client.secure": "false"},
        "without a certificate": {"zookeeper.ssl.keyStore.location": ""},
        "with TLS that trusts another authority": {
            "zookeeper.ssl.trustStore.location": str(Authority(tmp_path, "other").ca_file)
        },
    }[how]
    conf = secured.cluster.directory / "refused.conf"
    log = secured.cluster.server.server.log_path
    before = log.stat().st_size
    for waited_ms in WAITED_MS:
        write_conf(conf, shell_settings(secured.cluster, bookie_access(), zookeeper_ms=waited_ms))
        _, text = await secured.tools.shell(conf, "listbookies", "-rw", properties=properties)
        assert last_exception(text) == "ConnectionLoss", text
        assert "BookieID" not in text
        if REFUSED_BY_ZOOKEEPER[how].encode() in log.read_bytes()[before:]:
            break
    else:
        pytest.fail(f"{log} does not have the reason {REFUSED_BY_ZOOKEEPER[how]}")
    say("refused: ConnectionLoss")


@only_open
async def test_shell_process(secured: Secured, mode: str) -> None:
    """`bookkeeper shell listbookies` in a JVM of its own"""
    status, text = await apache_shell(secured.conf, "listbookies", "-rw", options=secured.options)
    assert status == 0, text
    assert all(f"BookieID:{bookie.id}" in text for bookie in secured.cluster.bookies), text

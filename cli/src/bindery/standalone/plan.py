"""Plan the processes of a standalone cluster: commands, ports and data directories. Pure: no I/O.

| process     | ports (i from 0, plus the offset)                                      | data              |
|-------------|------------------------------------------------------------------------|-------------------|
| zookeeper-i | 2181+i clients; 2888+i, 3888+i between servers, if there are several   | data/zookeeper-i  |
| bookie-i    | 3181+i BookKeeper protocol, 8000+i HTTP admin and metrics              | data/bookie-i     |
| broker-i    | 8080+i HTTP API (6650+i is reserved for the Pulsar protocol)           | none              |
| auditor-i   | 8090+i HTTP: status and control of recovery, metrics                   | none              |

The id of a bookie is its name (`bookie-0`), not its address, so the same data can be used with another port offset.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from bindery_metadata.stores.embedded import SecurePort, ServerSpec
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, VARIABLES, AccessFiles

from bindery.standalone.directory import StandaloneError
from bindery.standalone.options import Options
from bindery.standalone.secured import Secured

ZOOKEEPER_PORT: Final = 2181
ZOOKEEPER_PEER_PORT: Final = 2888
ZOOKEEPER_ELECTION_PORT: Final = 3888
BOOKIE_PORT: Final = 3181
BOOKIE_HTTP_PORT: Final = 8000
BROKER_HTTP_PORT: Final = 8080
BROKER_PULSAR_PORT: Final = 6650
AUDITOR_HTTP_PORT: Final = 8090
LOST_BOOKIE_DELAY_S: Final = 10
"""Seconds that a bookie may be down before its ledgers are re-replicated. Shorter than the default of an auditor: the
supervisor restarts a bookie within seconds, and the effect of `stop bookie-2` should be visible soon."""
HOST: Final = "127.0.0.1"
PORT_MAX: Final = 65535
SESSION_TIMEOUT_S: Final = 4
"""Seconds without a heartbeat after which ZooKeeper expires a session. A restarted process waits for the expiry of its
old session, so this is the delay after a crash. Over loopback, a live process never misses heartbeats for this long."""


class Kind(StrEnum):
    ZOOKEEPER = "zookeeper"
    BOOKIE = "bookie"
    BROKER = "broker"
    AUDITOR = "auditor"


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """Plan of one process."""

    name: str
    kind: Kind
    ports: tuple[tuple[str, int], ...]
    """(use, port); the first port answers probes."""
    command: tuple[str, ...]
    ca_file: str = ""
    """CA of the port that answers probes; empty: it has no TLS."""

    @property
    def probe_port(self) -> int:
        return self.ports[0][1]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Plan of all processes of the cluster."""

    options: Options
    zookeeper_servers: str
    """The connect string, `host:port,host:port`."""
    zookeepers: tuple[ProcessPlan, ...]
    bookies: tuple[ProcessPlan, ...]
    brokers: tuple[ProcessPlan, ...]
    auditors: tuple[ProcessPlan, ...] = ()
    access: AccessFiles = NO_ACCESS
    """How processes and commands connect to ZooKeeper."""
    secured: Secured | None = None

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """Return all processes in the order in which they start."""
        return (*self.zookeepers, *self.bookies, *self.brokers, *self.auditors)

    @property
    def broker_urls(self) -> list[str]:
        return [http_url(plan) for plan in self.brokers]

    @property
    def auditor_urls(self) -> list[str]:
        return [http_url(plan) for plan in self.auditors]


def http_url(plan: ProcessPlan) -> str:
    """Return the URL of the first port of a process."""
    return f"{'https' if plan.ca_file else 'http'}://{HOST}:{plan.probe_port}"


ZooKeeperCommand = Callable[[ServerSpec, Sequence[ServerSpec]], Sequence[str]]
"""(one server, all servers if there are several) -> the command that runs the server."""


def plan_cluster(
    options: Options,
    *,
    root: Path,
    zookeeper_command: ZooKeeperCommand,
    access: AccessFiles = NO_ACCESS,
    secured: Secured | None = None,
) -> ClusterPlan:
    """Return the plan for `options`. `access`: how the services connect to ZooKeeper. `secured`: its secrets; None:
    the ports are open.

    Raises StandaloneError if two processes would share a port, if a port is out of range, or if `access` requires TLS
    from the cluster's own ZooKeeper, which has none.
    """
    if access.ca_file and not options.zookeeper and secured is None:
        raise StandaloneError(
            f"{VARIABLES['ca_file']} is set, but the ZooKeeper that this command starts has no TLS: unset it, or name "
            "servers with TLS with --zookeeper"
        )
    at = options.port_offset
    count = 0 if options.zookeeper else options.zookeepers
    members = [
        ServerSpec(
            data_dir=root / f"{Kind.ZOOKEEPER}-{i}",
            client_port=0 if secured else ZOOKEEPER_PORT + at + i,
            server_id=i + 1,
            host=HOST,
            quorum_port=ZOOKEEPER_PEER_PORT + at + i,
            election_port=ZOOKEEPER_ELECTION_PORT + at + i,
            secure=None if secured is None else _secure_port(secured, ZOOKEEPER_PORT + at + i),
        )
        for i in range(count)
    ]
    servers = options.zookeeper or ",".join(member.hosts for member in members)
    ca_file = "" if secured is None else secured.ca_file
    zookeepers = []
    for member in members:
        ports = [("clients", int(member.hosts.rpartition(":")[2]))]
        if count > 1:
            ports += [("peers", member.quorum_port), ("election", member.election_port)]
        command = tuple(zookeeper_command(member, members if count > 1 else ()))
        zookeepers.append(ProcessPlan(member.data_dir.name, Kind.ZOOKEEPER, tuple(ports), command, ca_file))
    connection = ("--zookeeper", servers, *_access_flags(access))
    services = (
        *(_bookie(i, at=at, connection=connection, root=root) for i in range(options.bookies)),
        *(_broker(i, at=at, connection=connection) for i in range(options.brokers)),
        *(_auditor(i, at=at, connection=connection) for i in range(options.auditors)),
    )
    if secured is not None:
        services = tuple(
            replace(plan, command=(*plan.command, *secured.flags(plan.kind, plan.name)), ca_file=ca_file)
            for plan in services
        )
    bookies, brokers, auditors = (
        tuple(plan for plan in services if plan.kind is kind) for kind in (Kind.BOOKIE, Kind.BROKER, Kind.AUDITOR)
    )
    plan = ClusterPlan(options, servers, tuple(zookeepers), bookies, brokers, auditors, access, secured)
    _check_ports(plan)
    return plan


def _secure_port(secured: Secured, port: int) -> SecurePort:
    return SecurePort(
        port=port, key_store=Path(secured.file(f"{Kind.ZOOKEEPER}.pem")), trust_store=Path(secured.ca_file)
    )


def _access_flags(access: AccessFiles) -> tuple[str, ...]:
    """Return the flags that services need for `access`: none for what is not configured."""
    return tuple(
        word
        for option in VARIABLES
        if (value := getattr(access, option)) != getattr(NO_ACCESS, option)
        for word in (f"--zookeeper-access-{option.replace('_', '-')}", str(value))
    )


def _bookie(i: int, *, at: int, connection: tuple[str, ...], root: Path) -> ProcessPlan:
    name = f"{Kind.BOOKIE}-{i}"
    port, http_port = BOOKIE_PORT + at + i, BOOKIE_HTTP_PORT + at + i
    command = (
        *(sys.executable, "-m", "bindery_bookie"),
        *("--bookie-id", name),
        *("--port", str(port)),
        *("--http-port", str(http_port)),
        *connection,
        *("--zookeeper-session-timeout-s", str(SESSION_TIMEOUT_S)),
        *("--journal-dir", str(root / name / "journal")),
        *("--ledger-dir", str(root / name / "ledgers")),
    )
    return ProcessPlan(name, Kind.BOOKIE, (("HTTP", http_port), ("BookKeeper protocol", port)), command)


def _broker(i: int, *, at: int, connection: tuple[str, ...]) -> ProcessPlan:
    name = f"{Kind.BROKER}-{i}"
    port = BROKER_HTTP_PORT + at + i
    command = (
        *(sys.executable, "-m", "bindery_broker"),
        *("--port", str(port)),
        *connection,
        *("--zookeeper-session-ms", str(1000 * SESSION_TIMEOUT_S)),
    )
    return ProcessPlan(name, Kind.BROKER, (("HTTP", port),), command)


def _auditor(i: int, *, at: int, connection: tuple[str, ...]) -> ProcessPlan:
    name = f"{Kind.AUDITOR}-{i}"
    port = AUDITOR_HTTP_PORT + at + i
    command = (
        *(sys.executable, "-m", "bindery_auditor"),
        *("--name", name),
        *("--port", str(port)),
        *connection,
        *("--zookeeper-session-timeout-s", str(SESSION_TIMEOUT_S)),
        *("--lost-bookie-delay-s", str(LOST_BOOKIE_DELAY_S)),
    )
    return ProcessPlan(name, Kind.AUDITOR, (("HTTP", port),), command)


def _check_ports(plan: ClusterPlan) -> None:
    owner: dict[int, str] = {}
    for process in plan.processes:
        for use, port in process.ports:
            what = f"{process.name} ({use})"
            if not 1 <= port <= PORT_MAX:
                raise StandaloneError(
                    f"port {port} of {what} is not between 1 and {PORT_MAX}: choose another --port-offset "
                    f"(it is {plan.options.port_offset})"
                )
            if port in owner:
                raise StandaloneError(f"{owner[port]} and {what} would both use port {port}: ask for fewer processes")
            owner[port] = what

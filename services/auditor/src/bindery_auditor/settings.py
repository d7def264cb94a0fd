"""Settings of the auditor process."""

import socket
from typing import Annotated

from bindery_kit.access.audit_settings import AuditLogSettings
from bindery_kit.admin.token_settings import AdminTokenSettings
from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.http_settings import AdminHttpSettings
from bindery_kit.configuration.settings import SettingsConfigDict, group
from bindery_kit.configuration.tls_settings import HttpTlsSettings
from bindery_kit.configuration.zookeeper_access import ZooKeeperAccessSettings
from bindery_recovery.bookie_access import BookieAccess
from bindery_recovery.settings import RecoverySettings


class ClientSettings(BookieAccess):
    """Credentials that the auditor presents to bookies, and the racks on which it places copies."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_CLIENT_")


class AdminSettings(AdminTokenSettings):
    """Tokens of operators for the HTTP API. If they are configured, requests that change something need
    `Authorization: Bearer <token>`. Give them to the bookies too (`BOOKIE_ADMIN_...`)."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_ADMIN_")

    reader_roles: str = "*"
    """Names of the clients that may read the state of recovery, separated by commas: subjects of signed tokens. `*`:
    everybody, also without a token. Probes and metrics are always open."""

    operator_roles: str = "*"
    """Names of the clients that may change recovery. `*`: every client whose token is accepted."""


class AuditSettings(AuditLogSettings):
    """The audit log: one JSON line before each change of recovery, one before its answer, and one for each refused
    request (401, 403)."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_AUDIT_LOG_")


class PortTlsSettings(HttpTlsSettings):
    """TLS on the HTTP port. The files are followed: new connections use the newest ones."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_HTTP_TLS_")


class PortSettings(AdminHttpSettings):
    """Checks and limits of the HTTP port. They apply to all clients, authenticated or not."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_HTTP_")

    tls: PortTlsSettings = group(PortTlsSettings)
    """TLS on the HTTP port."""


class ZooKeeperAccess(ZooKeeperAccessSettings):
    """TLS and credentials for ZooKeeper. Files are read again before each connection if they have changed."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_ZOOKEEPER_ACCESS_")


class AuditorSettings(RecoverySettings):
    """The auditor: finds under-replicated ledgers, copies their entries, and reports its progress."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_")

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback requires `admin` tokens, or --insecure, with which the API
    is read-only there."""

    port: Annotated[int, Ge(0), Le(65_535)] = 8090
    """HTTP port. 0: any free port."""

    insecure: bool = False
    """Allow addresses that other machines can reach although no tokens are configured. Requests that change something
    are then refused."""

    name: str = ""
    """Unique name of this auditor in the election, in locks and in reports. Empty: `host:port`."""

    zookeeper: str = "127.0.0.1:2181"
    """ZooKeeper servers: `host:port`, separated by commas. A path after the last one is the chroot, the node that is
    used as the root of ZooKeeper: `a:2181,b:2181/messaging`."""

    zookeeper_session_timeout_s: Annotated[float, Ge(1), Le(600)] = 10.0
    """ZooKeeper session timeout in seconds: failover to another auditor and the release of locks take this long."""

    zookeeper_connect_timeout_s: Annotated[float, Ge(0), Le(86_400)] = 0.0
    """Maximum seconds that the start waits for ZooKeeper and for an initialized cluster. After that the process ends
    with exit code 1. 0: no limit."""

    ledgers_root: str = "/ledgers"
    """Root znode of the ledger metadata, as created by `bindery cluster init`."""

    admin: AdminSettings = group(AdminSettings)
    """Tokens of operators."""

    client: ClientSettings = group(ClientSettings)
    """Credentials that the auditor presents to bookies, and the racks on which it places copies."""

    zookeeper_access: ZooKeeperAccess = group(ZooKeeperAccess)
    """TLS, credentials and access lists of the connection to ZooKeeper."""
    audit_log: AuditSettings = group(AuditSettings)
    """Record of changes and refused requests."""

    http: PortSettings = group(PortSettings)
    """Checks and limits of the HTTP port."""

    stop_timeout_s: Annotated[float, Gt(0)] = 10.0
    """Maximum seconds of a stop, in which copies in progress are abandoned, and locks and leadership are released."""

    log_level: str = "info"
    """Minimum level of log events: debug, info, warning or error."""

    def resolved_name(self, *, port: int) -> str:
        """Return the name of this auditor. `port`: the bound port."""
        if self.name:
            return self.name
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104 - compared
        return f"{host}:{port}"

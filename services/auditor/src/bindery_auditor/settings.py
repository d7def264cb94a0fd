"""Settings of the auditor process."""

import socket
from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import SettingsConfigDict, group
from bindery_recovery.bookie_access import BookieAccess
from bindery_recovery.settings import RecoverySettings


class ClientSettings(BookieAccess):
    """How the auditor gets past the bookies, when they ask."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_CLIENT_")


class AuditorSettings(RecoverySettings):
    """The auditor: finds ledgers that lack copies, has them copied, and says what it does."""

    model_config = SettingsConfigDict(env_prefix="AUDITOR_")

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs --insecure, and changes nothing without --admin-token-file."""

    port: Annotated[int, Ge(0), Le(65_535)] = 8090
    """HTTP port; 0 takes a free one."""

    insecure: bool = False
    """Listen where other machines can connect; whoever can, reads what is healed and why not."""

    admin_token_file: str = ""
    """File of secrets, one a line. Requests that change something then need `Authorization: Bearer <one of them>`."""

    name: str = ""
    """Who this is, in the election, in locks and in reports; no two may be called the same. Empty: `host:port`."""

    zookeeper: str = "127.0.0.1:2181"
    """ZooKeeper servers, `host:port` separated by commas."""

    zookeeper_session_timeout_s: Annotated[float, Ge(1), Le(600)] = 10.0
    """Another auditor takes over so long after this one died; its locks stand so long. Seconds."""

    zookeeper_connect_timeout_s: Annotated[float, Ge(0), Le(86_400)] = 0.0
    """How long the start waits for ZooKeeper, and for a cluster in it, before the process gives up with exit code 1.
    Seconds; 0: for ever."""

    ledgers_root: str = "/ledgers"
    """Root of the ledgers' metadata in ZooKeeper, as `bindery cluster init` made it."""

    client: ClientSettings = group(ClientSettings)
    """How the auditor gets past the bookies."""

    stop_timeout_s: Annotated[float, Gt(0)] = 10.0
    """Longest that a stop takes: copies under way are abandoned, locks and the office given up. Seconds."""

    log_level: str = "info"
    """debug, info, warning or error."""

    def resolved_name(self, *, port: int) -> str:
        """`port`: the one bound."""
        if self.name:
            return self.name
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104 - compared
        return f"{host}:{port}"

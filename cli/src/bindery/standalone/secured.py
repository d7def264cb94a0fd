"""The security of a standalone cluster with --secure: its secrets, and the settings of its processes.

| port             | encryption | clients                                                                              |
|------------------|------------|--------------------------------------------------------------------------------------|
| ZooKeeper        | TLS        | can use nodes only with the credentials (`creator`)                                  |
| bookie, entries  | START_TLS  | a token of broker, bookie, auditor or admin                                          |
| bookie, HTTP     | TLS        | changes and contents of entries need the token of admin                              |
| broker, HTTP     | TLS        | a token; admin may do everything, others what they are permitted                     |
| auditor, HTTP    | TLS        | the token of admin                                                                   |

Probes and metrics need no token. The secrets are in `secrets/` below the data directory
(`bindery_identity.cluster_secrets`), with two files for users:

| file         | content                                                                        |
|--------------|--------------------------------------------------------------------------------|
| admin.header | header line with the token of admin, for `curl -H @FILE`                       |
| environment  | environment variables with which `bindery` commands use the cluster            |

The certificates are for localhost and the loopback addresses, so the cluster can be used on this machine only. Each
start renews certificates and tokens that are near their end; they are valid for a year.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bindery_metadata.stores.access_lists import NewNodes
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, VARIABLES, AccessFiles

from bindery.common.url_options import CA_FILE, TOKEN_FILE

if TYPE_CHECKING:
    from bindery_identity.cluster_secrets import Made

DIRECTORY: Final = "secrets"
ADMIN: Final = "admin"
"""Role of the user of the cluster: a super-user of brokers, and the operator of bookies and auditors."""
BROKER: Final = "broker"
BOOKIE: Final = "bookie"
AUDITOR: Final = "auditor"
ZOOKEEPER: Final = "zookeeper"
HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""Hosts of the certificates."""
HEADER: Final = f"{ADMIN}.header"
ENVIRONMENT: Final = "environment"


@dataclass(frozen=True, slots=True)
class Secured:
    """The files of a secure cluster in `root`, its data directory, and the settings that name them."""

    root: Path

    def file(self, name: str) -> str:
        return str(self.root / DIRECTORY / name)

    @property
    def ca_file(self) -> str:
        return self.file("ca.crt")

    def access(self) -> AccessFiles:
        """Return how processes and commands connect to ZooKeeper."""
        return AccessFiles(
            ca_file=self.ca_file, credentials_file=self.file("zookeeper.credentials"), new_nodes=NewNodes.CREATOR
        )

    def flags(self, kind: str, name: str) -> tuple[str, ...]:
        """Return the flags of a process. `kind`: BROKER, BOOKIE or AUDITOR."""
        certificate, key = self.file(f"{kind}.crt"), self.file(f"{kind}.key")
        keys, token = self.file("tokens.pub"), self.file(f"{kind}.token")
        common = (
            *("--http-tls-certificate-file", certificate, "--http-tls-key-file", key),
            *("--audit-log-file", str(self.root / "logs" / f"{name}.audit.log")),
        )
        if kind == BOOKIE:
            return (
                *common,
                *("--tls-required", "--tls-certificate-file", certificate, "--tls-key-file", key),
                *("--auth-provider", "token", "--auth-keys-file", keys),
                *("--auth-client-roles", _roles(BROKER, BOOKIE, AUDITOR, ADMIN)),
                *("--auth-recovery-roles", _roles(BOOKIE, AUDITOR, ADMIN), "--auth-admin-roles", ADMIN),
                *("--repair-token-file", token, "--repair-ca-file", self.ca_file),
            )
        bookies = ("--client-token-file", token, "--client-ca-file", self.ca_file)
        if kind == BROKER:
            return (
                *common,
                *bookies,
                *("--auth-tokens-keys-file", keys, "--auth-proxy-roles", BROKER, "--auth-broker-token-file", token),
                *("--authorization-enabled", "--authorization-super-user-roles", _roles(ADMIN, BROKER)),
                *("--peers-ca-file", self.ca_file),
            )
        return (
            *common,
            *bookies,
            *("--admin-keys-file", keys, "--admin-reader-roles", ADMIN, "--admin-operator-roles", ADMIN),
        )

    def variables(self, *, url: str, zookeeper: str, access: AccessFiles) -> dict[str, str]:
        """Return the environment with which `bindery` commands use the cluster. `url`: of a broker; empty: none."""
        variables = {
            "BINDERY_URL": url,
            CA_FILE.variable: self.ca_file,
            TOKEN_FILE.variable: self.file(f"{ADMIN}.token"),
            "BINDERY_ZOOKEEPER": zookeeper,
            **access.variables(),
            "BINDERY_CLIENT_CA_FILE": self.ca_file,
            "BINDERY_CLIENT_TOKEN_FILE": self.file(f"{ADMIN}.token"),
        }
        return {name: value for name, value in variables.items() if value}

    def create(self, *, now_s: float, url: str, zookeeper: str, access: AccessFiles) -> "Sequence[Made]":
        """Create the secrets that are missing and renew those near their end. Raises BadRequest."""
        from bindery_identity.cluster_secrets import Wanted, create
        from bindery_identity.secret_directory import SecretDirectory

        wanted = Wanted(
            servers=dict.fromkeys((ZOOKEEPER, BOOKIE, BROKER, AUDITOR), HOSTS),
            roles=(ADMIN, BOOKIE, BROKER, AUDITOR),
            zookeeper=True,
        )
        made = create(self.root / DIRECTORY, wanted, now_s=now_s)
        directory = SecretDirectory(self.root / DIRECTORY)
        with directory.locked():
            token = (directory.read(f"{ADMIN}.token") or b"").strip()
            directory.write(HEADER, b"Authorization: Bearer " + token + b"\n", secret=True)
            exports = [
                f"export {name}={shlex.quote(value)}\n"
                for name, value in self.variables(url=url, zookeeper=zookeeper, access=access).items()
            ]
            directory.write(ENVIRONMENT, "".join(exports).encode(), secret=True)
        return made

    def curl_options(self) -> str:
        """Return the options with which curl trusts the cluster and authenticates. The token is not one of them."""
        return shlex.join(["--cacert", self.ca_file, "-H", f"@{self.file(HEADER)}"])


def is_secured(root: Path) -> bool:
    """Return whether the cluster in this data directory was started with --secure before."""
    return (root / DIRECTORY).is_dir()


def has_open_metadata(root: Path) -> bool:
    """Return whether the cluster in this data directory was only started without --secure."""
    return not is_secured(root) and any(root.glob(f"{ZOOKEEPER}-*"))


def access_of(secured: Secured | None, environment: AccessFiles, *, zookeeper: str | None) -> AccessFiles:
    """Return how the processes connect to ZooKeeper: to their own with its secrets, to another one as configured.

    Raises BadRequest if --secure would leave the nodes in another ZooKeeper open.
    """
    from bindery_core.errors import BadRequest

    if secured is None:
        return environment
    if zookeeper is None:
        return secured.access()
    if environment.new_nodes is NewNodes.OPEN or environment == NO_ACCESS:
        raise BadRequest(
            f"--secure with --zookeeper needs credentials of that ZooKeeper: set {VARIABLES['credentials_file']} and "
            f"{VARIABLES['new_nodes']}=creator, and {VARIABLES['ca_file']} if it has TLS; or leave out --zookeeper"
        )
    return environment


def _roles(*names: str) -> str:
    return ",".join(names)

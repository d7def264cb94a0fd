"""ZooKeeperAccessSettings: TLS, credentials and access lists of a service's connection to ZooKeeper.

A service subclasses it with its own `env_prefix` and uses the subclass as its settings group `zookeeper_access`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from bindery_identity.tls import TlsFiles, client_tls
from bindery_metadata.stores.access_lists import NewNodes

from bindery_kit.configuration.settings import Settings

if TYPE_CHECKING:
    from bindery_metadata.stores.zookeeper_access import ZooKeeperAccess


class ZooKeeperAccessSettings(Settings):
    """TLS and credentials for ZooKeeper. Files are read again before each connection if they have changed."""

    ca_file: str = ""
    """Certificates of the authority that signed the ZooKeeper servers' certificates (PEM). The servers' names are
    always checked, and `zookeeper` must list the servers' `secureClientPort`. Empty: no TLS."""

    certificate_file: str = ""
    """Certificate to present to ZooKeeper (PEM), if the servers require one. Empty: none."""

    key_file: str = ""
    """The key of that certificate (PEM, not encrypted)."""

    credentials_file: str = ""
    """File with `user:password` per line for ZooKeeper's scheme `digest`. All are presented; new nodes belong to the
    first. Empty: no credentials."""

    new_nodes: NewNodes = NewNodes.OPEN
    """Access list of new nodes. open: every client of ZooKeeper may change them. creator: only clients with the first
    credentials may read or change them. shared: every client may read them, only clients with the first credentials
    may change them."""

    def certificate(self, *, now_s: Callable[[], float]) -> TlsFiles | None:
        """Return the files of the certificate that is presented to ZooKeeper, to show when it expires; None: there is
        none. `now_s`: seconds since 1970. Raises BadRequest for files that cannot be used, and for a certificate that
        has expired."""
        if not (self.ca_file and self.certificate_file):
            return None
        return client_tls(
            ca_file=self.ca_file, certificate_file=self.certificate_file, key_file=self.key_file, now_s=now_s
        )

    def load(self) -> "ZooKeeperAccess":
        """Read the files. Raises BadRequest for settings that contradict each other and for unusable files."""
        from bindery_metadata.stores.zookeeper_access import AccessFiles

        return AccessFiles(**dict(self)).load(name_of=lambda option: f"zookeeper_access.{option}")

"""Settings of a service's ledger client: the credentials that it presents to bookies that require authentication, and
the racks on which it places ledgers.

A service subclasses `BookieAccess` with its own `env_prefix` and uses the subclass as its settings group `client`.
"""

from collections.abc import Callable
from typing import Annotated

from bindery_client.connection.security import PLUGIN, ClientSecurity, SecurityFiles
from bindery_client.settings import ClientSettings
from bindery_kit.configuration.bounds import Ge, Le
from bindery_kit.configuration.settings import Settings


class BookieAccess(Settings):
    """Credentials for bookies that require authentication, and the racks of new replicas."""

    token_file: str = ""
    """File that holds the token to present."""

    plugin: str = PLUGIN
    """Name of the bookies' authentication plugin (their `auth.plugin`)."""

    ca_file: str = ""
    """Certificates of the authority that signed the bookies' certificates (PEM). Empty: no TLS."""

    certificate_file: str = ""
    """Client certificate to present (PEM). Empty: none."""

    key_file: str = ""
    """The key of that certificate (PEM, not encrypted)."""

    check_hostname: bool = True
    """Whether a bookie's certificate must contain the host name that the client connects to."""

    min_racks_per_write_quorum: Annotated[int, Ge(1), Le(100)] = 2
    """Minimum number of racks of each write quorum, as far as it has that many bookies. Placement prefers more anyway.
    Source: BookKeeper's minNumRacksPerWriteQuorum."""

    enforce_min_racks_per_write_quorum: bool = False
    """Whether ledgers are not created, and lost bookies not replaced, if write quorums would be on fewer racks. False:
    the minimum is a preference. Source: BookKeeper's enforceMinNumRacksPerWriteQuorum."""

    def settings(self) -> ClientSettings:
        """Return the settings of the ledger client."""
        return ClientSettings(
            min_racks_per_write_quorum=self.min_racks_per_write_quorum,
            enforce_min_racks_per_write_quorum=self.enforce_min_racks_per_write_quorum,
        )

    def load(self, *, now_s: Callable[[], float]) -> ClientSecurity:
        """Read the files. `now_s`: seconds since 1970. Raises BadRequest for files that cannot be used, and for a
        certificate that has expired."""
        return SecurityFiles(
            token_file=self.token_file,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            auth_plugin=self.plugin,
            check_hostname=self.check_hostname,
        ).load(now_s=now_s)

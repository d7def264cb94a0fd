"""Settings of the credentials that a service's ledger client presents to bookies that require authentication.

A service subclasses `BookieAccess` with its own `env_prefix` and uses the subclass as its settings group `client`.
"""

from collections.abc import Callable

from bindery_client.connection.security import PLUGIN, ClientSecurity, SecurityFiles
from bindery_kit.configuration.settings import Settings


class BookieAccess(Settings):
    """Credentials for bookies that require authentication."""

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

"""BookieAccess: the settings by which a service's ledger client gets past the bookies, when they ask who is there.

A service subclasses it for its own `env_prefix` and has it as the group `client`.
"""

from bindery_client.connection.security import PLUGIN, ClientSecurity, SecurityFiles
from bindery_kit.configuration.settings import Settings


class BookieAccess(Settings):
    """How this process gets past the bookies, when they ask."""

    token_file: str = ""
    """File that holds the token to show."""

    plugin: str = PLUGIN
    """Name of the bookies' authentication (their `auth.plugin`)."""

    ca_file: str = ""
    """Certificates of the authority that signed the bookies' (PEM). Empty: no TLS."""

    certificate_file: str = ""
    """The certificate to show (PEM). Empty: none."""

    key_file: str = ""
    """The key of that certificate (PEM, not encrypted)."""

    check_hostname: bool = True
    """Whether a bookie's certificate must name the host that it is reached by."""

    def load(self) -> ClientSecurity:
        """Read the files. Raises BadRequest for those that are no use."""
        return SecurityFiles(
            token_file=self.token_file,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            auth_plugin=self.plugin,
            check_hostname=self.check_hostname,
        ).load()

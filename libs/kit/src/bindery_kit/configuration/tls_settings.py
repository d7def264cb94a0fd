"""HttpTlsSettings: TLS on an HTTP port, from files that may change while the process runs."""

from collections.abc import Callable
from typing import Annotated

from bindery_core.errors import BadRequest
from bindery_identity.tls import ClientCertificates, TlsFiles, client_tls, server_tls

from bindery_kit.configuration.bounds import Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict


class HttpTlsSettings(Settings):
    """TLS on the HTTP port. The files are followed: new connections use the newest ones. A service subclasses it with
    its own `env_prefix` and uses the subclass as the group `tls` of its HTTP settings."""

    model_config = SettingsConfigDict(env_prefix="BINDERY_HTTP_TLS_")

    certificate_file: str = ""
    """File of the certificate of the HTTP port and of the intermediate certificates (PEM). Empty: no TLS. A changed
    file is used for new connections within about a second."""

    key_file: str = ""
    """File of the private key of that certificate (PEM, not encrypted). Empty: the key is in the certificate's file."""

    ca_file: str = ""
    """File of the CA certificates that may sign certificates of clients (PEM)."""

    client_certificates: ClientCertificates = ClientCertificates.NONE
    """none: clients present no certificate; optional: a certificate that the CA did not sign is refused; required:
    clients without a certificate are refused, also probes and scrapers of metrics."""

    handshake_timeout_s: Annotated[float, Gt(0), Le(600)] = 10.0
    """Maximum seconds from a connection to the end of its TLS handshake; a longer one ends the connection."""

    @property
    def is_set(self) -> bool:
        return bool(self.certificate_file)

    def load(self, *, now_s: Callable[[], float]) -> TlsFiles | None:
        """Return the TLS of the port; None: it has none. `now_s`: seconds since 1970.

        Raises BadRequest for settings that contradict each other and for files that cannot be used.
        """
        if not self.certificate_file:
            if self.key_file or self.ca_file or self.client_certificates is not ClientCertificates.NONE:
                raise BadRequest("TLS of the HTTP port needs http.tls.certificate_file")
            return None
        if self.client_certificates is not ClientCertificates.NONE and not self.ca_file:
            raise BadRequest("http.tls.client_certificates needs http.tls.ca_file")
        try:
            return server_tls(
                certificate_file=self.certificate_file,
                key_file=self.key_file,
                ca_file=self.ca_file,
                client_certificates=self.client_certificates,
                now_s=now_s,
            )
        except BadRequest as error:
            raise BadRequest(f"cannot use the files of http.tls: {error}") from error


class PeerTlsSettings(Settings):
    """How a service reaches the HTTP ports of its peers. A service subclasses it with its own `env_prefix`."""

    model_config = SettingsConfigDict(env_prefix="BINDERY_PEERS_")

    ca_file: str = ""
    """File of the CA certificates that sign the certificates of peers (PEM). Empty: those that the system trusts."""

    certificate_file: str = ""
    """File of the certificate presented to peers (PEM). Empty: none."""

    key_file: str = ""
    """File of the private key of that certificate (PEM, not encrypted). Empty: it is in the certificate's file."""

    server_name: str = ""
    """Name that the certificates of peers must contain, if they are reached by addresses that no certificate can name,
    as pods are. Empty: the host of their URL."""

    def load(self, *, now_s: Callable[[], float]) -> TlsFiles:
        """Return the TLS of connections to peers whose address begins with https. `now_s`: seconds since 1970.

        Raises BadRequest for settings that contradict each other, for files that cannot be used, and for a certificate
        that has expired.
        """
        if self.key_file and not self.certificate_file:
            raise BadRequest("peers.key_file needs peers.certificate_file")
        try:
            return client_tls(
                ca_file=self.ca_file,
                certificate_file=self.certificate_file,
                key_file=self.key_file,
                server_name=self.server_name,
                now_s=now_s,
            )
        except BadRequest as error:
            raise BadRequest(f"cannot use the files of peers: {error}") from error

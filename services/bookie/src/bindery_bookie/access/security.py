"""Security: what the ledger port asks of its clients, from settings and the files that they name.

The only module here that reads secrets. They are read once, at the start; no error names more than a file and a line.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from bindery_core.auth_token import SharedSecrets, SignedTokens, TokenVerifier
from bindery_core.errors import BadRequest
from bindery_kit.admin.access import Access
from bindery_kit.configuration.bounds import Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict

from bindery_bookie.access.authentication import Authenticator, CertificateAuthenticator, Gate, TokenAuthenticator


class AuthProvider(StrEnum):
    NONE = "none"
    TOKEN = "token"  # noqa: S105
    CERTIFICATE = "certificate"


class AuthSettings(Settings):
    """How clients show who they are. All bookies and clients of a cluster need the same."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_AUTH_")

    provider: AuthProvider = AuthProvider.NONE
    """none; token: clients send a shared secret or a signed token; certificate: mutual TLS."""

    plugin: str = "bindery"
    """Name under which clients authenticate. Source: BookKeeper's auth providers each have one."""

    secrets_file: str = ""
    """File of shared secrets, one a line; any of them will do, so that one can be replaced. For `token`."""

    keys_file: str = ""
    """File of keys that tokens are signed with (HS256), one a line. For `token`, instead of `secrets_file`."""

    allowed_names: str = ""
    """Names, joined by commas, of which a client's certificate must carry one, as common or alternative name. Empty:
    every certificate that the authority signed. For `certificate`."""

    timeout_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """A client that has not authenticated by then is disconnected. Seconds."""


class TlsSettings(Settings):
    """TLS on the ledger port, which clients ask for after connecting (START_TLS)."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_TLS_")

    certificate_file: str = ""
    """The bookie's certificate, with those between it and its authority (PEM). Empty: no TLS."""

    key_file: str = ""
    """The key of that certificate (PEM, not encrypted)."""

    ca_file: str = ""
    """Certificates of the authorities that may sign clients' certificates (PEM). Needed for `certificate`."""

    required: bool = False
    """Serve nothing in clear. Off, TLS is offered and not insisted on."""

    handshake_timeout_s: Annotated[float, Gt(0), Le(600)] = 10.0
    """A handshake that takes longer ends the connection. Seconds. Source: BookKeeper's startTLSTimeoutSecs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Shared by all connections."""

    tls: ssl.SSLContext | None = None
    tls_required: bool = False
    handshake_timeout_s: float = 10.0
    authenticator: Authenticator | None = None
    auth_timeout_s: float = 30.0

    def gate(self) -> Gate | None:
        """For a new connection; None when everything passes anyhow."""
        if self.authenticator is None and not self.tls_required:
            return None
        return Gate(self.authenticator, tls_required=self.tls_required)


OPEN = Security()
"""Nobody is asked anything, nothing is encrypted."""


def load_security(auth: AuthSettings, tls: TlsSettings, *, now_s: Callable[[], float]) -> Security:
    """`now_s`: seconds of 1970. Raises BadRequest for settings that contradict each other and files that are no use."""
    context = _tls_context(auth, tls)
    return Security(
        tls=context,
        tls_required=tls.required or auth.provider is AuthProvider.CERTIFICATE,
        handshake_timeout_s=tls.handshake_timeout_s,
        authenticator=_authenticator(auth, now_s),
        auth_timeout_s=auth.timeout_s,
    )


def admin_access(auth: AuthSettings, *, now_s: Callable[[], float]) -> Access | None:
    """What the admin port asks of its clients; None: nothing. Raises BadRequest as `load_security`."""
    if auth.provider is AuthProvider.NONE:
        return None
    has_secrets = bool(auth.secrets_file or auth.keys_file)
    return Access(_verifier(auth) if has_secrets else None, now_s=now_s)


def _authenticator(auth: AuthSettings, now_s: Callable[[], float]) -> Authenticator | None:
    match auth.provider:
        case AuthProvider.NONE:
            return None
        case AuthProvider.CERTIFICATE:
            allowed = [name.strip() for name in auth.allowed_names.split(",") if name.strip()]
            return CertificateAuthenticator(plugin=auth.plugin, allowed=allowed)
        case AuthProvider.TOKEN:
            return TokenAuthenticator(_verifier(auth), plugin=auth.plugin, now_s=now_s)


def _verifier(auth: AuthSettings) -> TokenVerifier:
    if bool(auth.secrets_file) == bool(auth.keys_file):
        raise BadRequest("token authentication needs one of auth.secrets_file and auth.keys_file")
    if auth.secrets_file:
        return SharedSecrets(read_secrets(auth.secrets_file))
    return SignedTokens(read_secrets(auth.keys_file))


def read_secrets(path: str) -> list[bytes]:
    """Lines that are not empty, without the blanks around them."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read the file of secrets: {error.strerror}", path=path) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _tls_context(auth: AuthSettings, tls: TlsSettings) -> ssl.SSLContext | None:
    mutual = auth.provider is AuthProvider.CERTIFICATE
    if not tls.certificate_file:
        if tls.required or mutual or tls.key_file or tls.ca_file:
            raise BadRequest("TLS needs tls.certificate_file")
        return None
    if mutual and not tls.ca_file:
        raise BadRequest("authentication by certificate needs tls.ca_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate_file, tls.key_file or None, password=lambda: b"")
        if tls.ca_file:
            context.load_verify_locations(tls.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(
            f"cannot use the TLS files: {error.strerror or error}",
            certificate_file=tls.certificate_file, key_file=tls.key_file, ca_file=tls.ca_file,
        ) from error  # fmt: skip
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context

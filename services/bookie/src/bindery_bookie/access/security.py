"""Security: the authentication and TLS that the ports require, from settings and the files that they name.

No other module of the bookie reads secrets. They are read once, at the start; errors contain a file name and a line
number at most.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from bindery_core.auth_token import TokenVerifier
from bindery_core.errors import BadRequest
from bindery_kit.admin.access import Access, AdminAccess, load_verifier
from bindery_kit.admin.token_settings import AdminTokenSettings
from bindery_kit.configuration.bounds import Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict
from bindery_kit.http.listening import is_loopback

from bindery_bookie.access.authentication import Authenticator, CertificateAuthenticator, Gate, TokenAuthenticator


class AuthProvider(StrEnum):
    NONE = "none"
    TOKEN = "token"  # noqa: S105
    CERTIFICATE = "certificate"


class AuthSettings(Settings):
    """Authentication of clients. All bookies and clients of a cluster must use the same."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_AUTH_")

    provider: AuthProvider = AuthProvider.NONE
    """none: no authentication; token: clients send a shared secret or a signed token; certificate: mutual TLS."""

    plugin: str = "bindery"
    """Name of the authentication plugin that clients must use. Source: each auth provider of BookKeeper has a name."""

    secrets_file: str = ""
    """File of shared secrets for `token`, one per line. Each of them is accepted, so that secrets can be replaced."""

    keys_file: str = ""
    """File of keys that sign tokens (HS256) for `token`, one per line as text or base64, or `file:///path` of a file
    that is one key, as Pulsar writes them. Instead of `secrets_file`."""

    audience: str = ""
    """Name of the bookies in the claim `aud` of signed tokens; others are refused. Empty: tokens with an audience are
    refused. Source: Pulsar's tokenAudience."""

    allowed_names: str = ""
    """Names for `certificate`, separated by commas: the certificate of a client must contain one of them as its common
    name or an alternative name. Empty: every certificate that the CA signed is accepted."""

    timeout_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Seconds after which a client that has not authenticated is disconnected."""


class TlsSettings(Settings):
    """TLS on the ledger port, which clients request after they have connected (START_TLS)."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_TLS_")

    certificate_file: str = ""
    """File of the bookie's certificate and of the intermediate certificates (PEM). Empty: no TLS."""

    key_file: str = ""
    """File of the private key of that certificate (PEM, not encrypted)."""

    ca_file: str = ""
    """File of the CA certificates that may sign certificates of clients (PEM). Required for `certificate`."""

    required: bool = False
    """Refuse requests in clear text. Otherwise TLS is optional."""

    handshake_timeout_s: Annotated[float, Gt(0), Le(600)] = 10.0
    """Maximum seconds of a TLS handshake; a longer one ends the connection. Source: BookKeeper's
    startTLSTimeoutSecs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The authentication and TLS of the ledger port. Shared by all connections."""

    tls: ssl.SSLContext | None = None
    tls_required: bool = False
    handshake_timeout_s: float = 10.0
    authenticator: Authenticator | None = None
    auth_timeout_s: float = 30.0

    def gate(self) -> Gate | None:
        """Return the gate of a new connection; None if every request is allowed."""
        if self.authenticator is None and not self.tls_required:
            return None
        return Gate(self.authenticator, tls_required=self.tls_required)


OPEN = Security()
"""No authentication and no TLS."""


def load_security(auth: AuthSettings, tls: TlsSettings, *, now_s: Callable[[], float]) -> Security:
    """Return the authentication and TLS that the settings describe. `now_s`: seconds since 1970.

    Raises BadRequest for settings that contradict each other and for unusable files.
    """
    context = _tls_context(auth, tls)
    return Security(
        tls=context,
        tls_required=tls.required or auth.provider is AuthProvider.CERTIFICATE,
        handshake_timeout_s=tls.handshake_timeout_s,
        authenticator=_authenticator(auth, now_s),
        auth_timeout_s=auth.timeout_s,
    )


CLUSTER_HINT: Final = (
    "changes of the cluster need an operator's token on a port that other machines can reach. Set admin.token_file "
    "(BOOKIE_ADMIN_TOKEN_FILE) of this bookie to the auditor's file of tokens, or send the request to an auditor"
)
"""Why a bookie without tokens of operators refuses a change of the cluster."""


def admin_access(
    auth: AuthSettings, admin: AdminTokenSettings, *, host: str, now_s: Callable[[], float]
) -> AdminAccess:
    """Return the checks of requests to the admin API (the table in `bindery_kit.admin.access`).

    `host`: the address of the port. `now_s`: seconds since 1970. Raises BadRequest.
    """
    by_operators = admin.access(now_s=now_s)
    if by_operators is not None:
        return AdminAccess(own=by_operators, cluster=by_operators)
    own = access_by_provider(auth, now_s=now_s)
    cluster = own if is_loopback(host) else Access(None, now_s=now_s, hint=CLUSTER_HINT)
    return AdminAccess(own=own, cluster=cluster)


def access_by_provider(auth: AuthSettings, *, now_s: Callable[[], float]) -> Access | None:
    """Return the check of requests by the tokens of the ledger port; None if it needs none. Raises BadRequest."""
    if auth.provider is AuthProvider.NONE:
        return None
    has_secrets = bool(auth.secrets_file or auth.keys_file)
    hint = "set admin.token_file, auth.secrets_file or auth.keys_file of this bookie"
    return Access(_verifier(auth) if has_secrets else None, now_s=now_s, hint=hint)


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
    return load_verifier(
        secrets_file=auth.secrets_file,
        keys_file=auth.keys_file,
        audience=auth.audience,
        names=("auth.secrets_file", "auth.keys_file"),
    )


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
            certificate_file=tls.certificate_file,
            key_file=tls.key_file,
            ca_file=tls.ca_file,
        ) from error
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context

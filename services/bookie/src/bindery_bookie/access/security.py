"""Security: the authentication and TLS that the ports require, from settings and the files that they name.

No other module of the bookie reads secrets. Errors contain a file name and a line number at most. The files of tokens,
keys and certificates are followed.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from bindery_core.errors import BadRequest
from bindery_identity.tls import ClientCertificates, TlsFiles, server_tls
from bindery_identity.tokens import TokenVerifier
from bindery_kit.access.allowed_names import AllowedNames
from bindery_kit.admin.access import Access, AdminAccess, Follow, load_verifier, once
from bindery_kit.admin.token_settings import AdminTokenSettings
from bindery_kit.configuration.bounds import Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict
from bindery_kit.http.listening import is_loopback

from bindery_bookie.access.authentication import Authenticator, CertificateAuthenticator, Gate, TokenAuthenticator
from bindery_bookie.access.roles import NO_ROLES, Roles
from bindery_bookie.access.sessions import Sessions


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
    """File of keys that sign tokens for `token`: secrets (HS256), one per line as text or base64, and public keys
    (RS256, ES256, ...) as PEM; or `file:///path` of a file that is one key, as Pulsar writes them. Instead of
    `secrets_file`."""

    audience: str = ""
    """Name of the bookies in the claim `aud` of signed tokens; others are refused. Empty: tokens with an audience are
    refused. Source: Pulsar's tokenAudience."""

    allowed_names: str = ""
    """Names for `certificate`, separated by commas: the certificate of a client must contain one of them as its common
    name or an alternative name. Empty: every certificate that the CA signed is accepted."""

    timeout_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Seconds after which a client that has not authenticated is disconnected."""

    client_roles: str = "*"
    """Names of the clients that may write and read entries on the ledger port, separated by commas: subjects of tokens,
    or names in certificates. Brokers, bookies and auditors need this role. `*`: every client that has authenticated."""

    recovery_roles: str = "*"
    """Names of the clients that may list the entries of a ledger, and read entries and passwords over HTTP. Bookies and
    auditors need this role. `*`: every client that has authenticated."""

    admin_roles: str = "*"
    """Names of the clients that may change this bookie, or the cluster, over HTTP. `*`: every client whose token is
    accepted."""


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
    """Makes each handshake with the newest files."""
    tls_files: TlsFiles | None = None
    """The files of `tls`, for their poller."""
    tls_required: bool = False
    handshake_timeout_s: float = 10.0
    authenticator: Authenticator | None = None
    auth_timeout_s: float = 30.0
    roles: Roles = NO_ROLES
    tokens: TokenVerifier | None = None
    """Verifies the tokens of `authenticator`; None if it uses none. The HTTP port shares it."""
    sessions: Sessions | None = None
    """Ends connections whose credentials are not accepted any more. None: those accepted once remain accepted."""

    def gate(self) -> Gate | None:
        """Return the gate of a new connection; None if every request is allowed."""
        if self.authenticator is None and not self.tls_required:
            return None
        return Gate(self.authenticator, tls_required=self.tls_required)


OPEN = Security()
"""No authentication and no TLS."""


def load_security(
    auth: AuthSettings, tls: TlsSettings, *, now_s: Callable[[], float], follow: Follow = once
) -> Security:
    """Return the authentication and TLS that the settings describe. `now_s`: seconds since 1970. `follow`: gets the
    files whose changes take effect.

    Raises BadRequest for settings that contradict each other and for unusable files.
    """
    files = _tls_files(auth, tls, now_s=now_s)
    tokens = _verifier(auth, follow) if auth.provider is AuthProvider.TOKEN else None
    return Security(
        tls=None if files is None else files.context,
        tls_files=files,
        tls_required=tls.required or auth.provider is AuthProvider.CERTIFICATE,
        handshake_timeout_s=tls.handshake_timeout_s,
        authenticator=_authenticator(auth, tokens, now_s),
        tokens=tokens,
        auth_timeout_s=auth.timeout_s,
        roles=load_roles(auth),
        sessions=Sessions(now_s=now_s),
    )


def load_roles(auth: AuthSettings) -> Roles:
    """Return who has which role. Raises BadRequest for text that is not names, and for roles on the ledger port of
    clients without a name."""
    roles = Roles(
        client=AllowedNames.parse(auth.client_roles, setting="auth.client_roles"),
        recovery=AllowedNames.parse(auth.recovery_roles, setting="auth.recovery_roles"),
        admin=AllowedNames.parse(auth.admin_roles, setting="auth.admin_roles"),
    )
    limited = [
        setting
        for setting, names in (("auth.client_roles", roles.client), ("auth.recovery_roles", roles.recovery))
        if not names.is_everybody
    ]
    if limited and auth.provider is AuthProvider.NONE:
        raise BadRequest(
            f"{limited[0]} names clients, but the ledger port authenticates no client: set auth.provider, or "
            f"{limited[0]}=*"
        )
    if limited and auth.provider is AuthProvider.TOKEN and auth.secrets_file:
        raise BadRequest(
            f"{limited[0]} names clients, but shared secrets name no client: use signed tokens (auth.keys_file instead "
            f"of auth.secrets_file), or {limited[0]}=*"
        )
    return roles


CLUSTER_HINT: Final = (
    "changes of the cluster need an operator's token on a port that other machines can reach. Set admin.token_file "
    "(BOOKIE_ADMIN_TOKEN_FILE) of this bookie to the auditor's file of tokens, or send the request to an auditor"
)
"""Why a bookie without tokens of operators refuses a change of the cluster."""


def admin_access(
    auth: AuthSettings,
    admin: AdminTokenSettings,
    *,
    host: str,
    now_s: Callable[[], float],
    tokens: TokenVerifier | None = None,
    follow: Follow = once,
) -> AdminAccess:
    """Return the checks of requests to the admin API (the table in `bindery_kit.admin.access`).

    `host`: the address of the port. `now_s`: seconds since 1970. `tokens`: `Security.tokens`, so that their file is
    read and followed once; None: read here if `auth` needs it. `follow`: as of `load_security`. Raises BadRequest.
    """
    by_operators = admin.access(now_s=now_s, follow=follow)
    if by_operators is not None:
        return AdminAccess(own=by_operators, cluster=by_operators)
    own = access_by_provider(auth, now_s=now_s, tokens=tokens, follow=follow)
    cluster = own if is_loopback(host) else Access(None, now_s=now_s, hint=CLUSTER_HINT)
    return AdminAccess(own=own, cluster=cluster)


def access_by_provider(
    auth: AuthSettings, *, now_s: Callable[[], float], tokens: TokenVerifier | None = None, follow: Follow = once
) -> Access | None:
    """Return the check of requests by the tokens of the ledger port; None if it needs none. `tokens`: as of
    `admin_access`. Raises BadRequest."""
    if auth.provider is AuthProvider.NONE:
        return None
    if tokens is None and (auth.secrets_file or auth.keys_file):
        tokens = _verifier(auth, follow)
    hint = "set admin.token_file, auth.secrets_file or auth.keys_file of this bookie"
    return Access(tokens, now_s=now_s, hint=hint)


def _authenticator(
    auth: AuthSettings, tokens: TokenVerifier | None, now_s: Callable[[], float]
) -> Authenticator | None:
    match auth.provider:
        case AuthProvider.NONE:
            return None
        case AuthProvider.CERTIFICATE:
            allowed = [name.strip() for name in auth.allowed_names.split(",") if name.strip()]
            return CertificateAuthenticator(plugin=auth.plugin, allowed=allowed)
        case AuthProvider.TOKEN:
            assert tokens is not None
            return TokenAuthenticator(tokens, plugin=auth.plugin, now_s=now_s)


def _verifier(auth: AuthSettings, follow: Follow) -> TokenVerifier:
    return load_verifier(
        secrets_file=auth.secrets_file,
        keys_file=auth.keys_file,
        audience=auth.audience,
        names=("auth.secrets_file", "auth.keys_file"),
        follow=follow,
    )


def _tls_files(auth: AuthSettings, tls: TlsSettings, *, now_s: Callable[[], float]) -> TlsFiles | None:
    mutual = auth.provider is AuthProvider.CERTIFICATE
    if not tls.certificate_file:
        if tls.required or mutual or tls.key_file or tls.ca_file:
            raise BadRequest("TLS needs tls.certificate_file")
        return None
    if mutual and not tls.ca_file:
        raise BadRequest("authentication by certificate needs tls.ca_file")
    try:
        return server_tls(
            certificate_file=tls.certificate_file,
            key_file=tls.key_file,
            ca_file=tls.ca_file,
            client_certificates=ClientCertificates.REQUIRED if mutual else ClientCertificates.NONE,
            now_s=now_s,
        )
    except BadRequest as error:
        raise BadRequest(
            f"cannot use the TLS files: {error}",
            certificate_file=tls.certificate_file,
            key_file=tls.key_file,
            ca_file=tls.ca_file,
        ) from error

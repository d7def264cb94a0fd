"""AuthenticationSettings: how the clients of a port authenticate. Nothing is required by default.

A service subclasses it with its own `env_prefix` and uses the subclass as its settings group `auth`. The names follow
Pulsar's: tokenSecretKey and tokenPublicKey, tokenAuthClaim, tokenAudience, tokenAudienceClaim, anonymousUserRole,
proxyRoles, brokerClientAuthenticationParameters; and those of its AuthenticationProviderOpenID.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.authenticator import Authenticator, CertificateRole, PasswordVerifier
from bindery_identity.basic import Passwords
from bindery_identity.followed import FollowedFile, FollowedFiles
from bindery_identity.keys import key_file
from bindery_identity.openid import IssuerKeys, OpenIdTokens, key_set_file, parse_issuers
from bindery_identity.tls import TlsFiles, client_tls
from bindery_identity.tokens import FollowedTokens, SignedTokens, TokenVerifier, is_subject, unverified

from bindery_kit.access.own_token import OwnToken
from bindery_kit.configuration.bounds import Gt, Le
from bindery_kit.configuration.settings import Settings, check


class AuthenticationSettings(Settings):
    """Authentication of clients. It is required as soon as a file of keys or passwords, OpenID issuers, or a role of
    certificates are configured."""

    tokens_keys_file: str = ""
    """File of the keys that sign the tokens of clients: public keys (PEM) and secrets, several at a time; or
    `file:///path` of a file that is one key, as `pulsar tokens` writes it. A changed file is read within seconds.
    Source: Pulsar's tokenPublicKey and tokenSecretKey."""

    tokens_role_claim: str = "sub"
    """Name of the claim that is the role of the client. Source: Pulsar's tokenAuthClaim."""

    tokens_audience: str = ""
    """Name of this service in the audience of tokens; others are refused. Empty: tokens with an audience are refused.
    Source: Pulsar's tokenAudience."""

    tokens_audience_claim: str = "aud"
    """Name of the claim that is the audience. Source: Pulsar's tokenAudienceClaim."""

    tokens_issuer: str = ""
    """Value that the claim `iss` of tokens must have. Empty: any issuer whose key is configured."""

    openid_issuers: str = ""
    """URLs of the OpenID Connect issuers whose tokens are accepted, separated by commas, as in the claim `iss` of their
    tokens: https only. Their keys are fetched in the background. `URL=FILE` reads the key set (JWKS) from a file
    instead. Source: Pulsar's openIDAllowedTokenIssuers."""

    openid_audiences: str = ""
    """Names of this service in the audience (`aud`) of tokens of OpenID issuers, separated by commas: a token must
    contain one of them. Required with `openid_issuers`. Source: Pulsar's openIDAllowedAudiences."""

    openid_role_claim: str = "sub"
    """Name of the claim that is the role of the client in tokens of OpenID issuers. Source: Pulsar's
    openIDRoleClaim."""

    openid_ca_file: str = ""
    """File of the CA certificates that sign the certificates of OpenID issuers (PEM). Empty: those that the system
    trusts. Source: Pulsar's openIDTokenIssuerTrustCertsFilePath."""

    openid_refresh_s: Annotated[float, Gt(0), Le(86_400)] = 600.0
    """Seconds between two reads of an issuer's keys. A token with an unknown key causes an earlier read, at most every
    30 seconds. Source: Pulsar's openIDCacheRefreshAfterWriteSeconds, 18 hours there."""

    openid_keys_max_age_s: Annotated[float, Gt(0), Le(30 * 86_400)] = 86_400.0
    """Seconds for which keys remain in force while the issuer does not answer; then its tokens are refused. Source:
    Pulsar's openIDCacheExpirationSeconds."""

    passwords_file: str = ""
    """File of names and passwords, as `htpasswd -m` writes it. A changed file is read within seconds. Source: Pulsar's
    basicAuthConf."""

    certificate_role: CertificateRole = CertificateRole.NONE
    """Name in the certificate of a client that is its role: common_name, dns or uri; none: certificates do not
    authenticate clients."""

    anonymous_role: str = ""
    """Role of clients without credentials. Empty: they are refused. Source: Pulsar's anonymousUserRole."""

    proxy_roles: str = ""
    """Roles of proxies, separated by commas: they name the client of each request in the header `bindery-role`. Other
    clients may not send that header. The role of the brokers themselves must be one of them. Source: Pulsar's
    proxyRoles."""

    broker_token_file: str = ""
    """File of the token with which this broker authenticates at other brokers. A changed file is read within seconds.
    Empty: it passes on the credentials of clients, and its own requests have none. Source: Pulsar's
    brokerClientAuthenticationParameters."""

    metrics: bool = False
    """Require authentication for /metrics, too. Probes never need it. Source: Pulsar's authenticateMetricsEndpoint."""

    @property
    def is_set(self) -> bool:
        """Whether clients must authenticate."""
        has_files = bool(self.tokens_keys_file or self.passwords_file or self.openid_issuers)
        return has_files or self.certificate_role is not CertificateRole.NONE

    @property
    def admits_everybody(self) -> bool:
        """Whether a client without credentials is served."""
        return not self.is_set or bool(self.anonymous_role)

    @check
    def _consistent(self) -> None:
        others = (
            self.anonymous_role,
            self.proxy_roles,
            self.broker_token_file,
            self.tokens_audience,
            self.tokens_issuer,
        )
        if not self.is_set and (any(others) or self.metrics):
            raise ValueError(
                "authentication needs auth.tokens_keys_file, auth.openid_issuers, auth.passwords_file or "
                "auth.certificate_role"
            )
        if self.openid_issuers and not self.audiences_of_openid:
            raise ValueError("auth.openid_issuers needs the names of this service in tokens: set auth.openid_audiences")
        if not self.openid_issuers and (self.openid_audiences or self.openid_ca_file):
            raise ValueError("auth.openid_audiences and auth.openid_ca_file need auth.openid_issuers")
        if not self.openid_role_claim:
            raise ValueError("auth.openid_role_claim must be the name of a claim")
        try:
            parse_issuers(self.openid_issuers)
        except BadRequest as error:
            raise ValueError(f"auth.openid_issuers: {error}") from error
        if self.anonymous_role and not is_subject(self.anonymous_role):
            raise ValueError("auth.anonymous_role must be printable text")
        if self.anonymous_role and self.anonymous_role in self.roles_of_proxies:
            raise ValueError(
                f"auth.anonymous_role ({self.anonymous_role}) must not be one of auth.proxy_roles: every client "
                "without credentials could act for every role. Remove it from one of them"
            )
        if self.broker_token_file and not self.roles_of_proxies:
            raise ValueError(
                "auth.broker_token_file needs the role of that token in auth.proxy_roles, so that other brokers accept "
                "the requests of clients that this broker passes on. `bindery tokens show --token-file FILE` shows the "
                "role (sub)"
            )

    @property
    def roles_of_proxies(self) -> frozenset[str]:
        return frozenset(filter(None, (role.strip() for role in self.proxy_roles.split(","))))

    @property
    def audiences_of_openid(self) -> frozenset[str]:
        return frozenset(filter(None, (name.strip() for name in self.openid_audiences.split(","))))

    def openid(self, *, follow: Callable[[FollowedFiles[Any]], None]) -> tuple[IssuerKeys, ...]:
        """Return the OpenID issuers, for `authenticator` and for who fetches their keys. `follow`: gets the files of
        key sets.

        Raises BadRequest for unusable files.
        """
        found = []
        for url, path in parse_issuers(self.openid_issuers):
            file = None
            if path:
                file = key_set_file(path)
                follow(file)
            found.append(
                IssuerKeys(
                    url,
                    audiences=self.audiences_of_openid,
                    role_claim=self.openid_role_claim,
                    max_age_s=self.openid_keys_max_age_s,
                    file=file,
                )
            )
        return tuple(found)

    def openid_tls(self) -> TlsFiles:
        """Return the TLS of connections to OpenID issuers. Raises BadRequest."""
        try:
            return client_tls(ca_file=self.openid_ca_file)
        except BadRequest as error:
            raise BadRequest(f"cannot use auth.openid_ca_file: {error}") from error

    def authenticator(
        self,
        *,
        now_s: Callable[[], float],
        follow: Callable[[FollowedFiles[Any]], None],
        issuers: Sequence[IssuerKeys] = (),
        own_role: Callable[[], str | None] = lambda: None,
    ) -> Authenticator | None:
        """Return the authenticator; None if clients need not authenticate. `now_s`: seconds since 1970. `follow`: gets
        the files, whose changes take effect if they are followed. `issuers`: the result of `openid`. `own_role`:
        returns the role of this process's own token, which the other processes of the service have, too.

        Raises BadRequest for unusable files.
        """
        assert len(issuers) == len(parse_issuers(self.openid_issuers))
        if not self.is_set:
            return None
        tokens: TokenVerifier | None = None
        if self.tokens_keys_file:
            path, parse = key_file(self.tokens_keys_file)

            def verifier(content: bytes) -> TokenVerifier:
                return SignedTokens(
                    parse(content),
                    audience=self.tokens_audience or None,
                    issuer=self.tokens_issuer or None,
                    role_claim=self.tokens_role_claim,
                    audience_claim=self.tokens_audience_claim,
                )

            keys = FollowedFile(path, verifier, what="the file of keys (auth.tokens_keys_file)")
            follow(keys)
            tokens = FollowedTokens(keys)
        if issuers:
            tokens = OpenIdTokens(issuers, others=tokens)
        passwords: PasswordVerifier | None = None
        if self.passwords_file:
            file = FollowedFile(self.passwords_file, Passwords, what="the file of passwords (auth.passwords_file)")
            follow(file)
            passwords = _FollowedPasswords(file)
        return Authenticator(
            now_s=now_s,
            tokens=tokens,
            passwords=passwords,
            certificate_role=self.certificate_role,
            anonymous_role=self.anonymous_role or None,
            proxy_roles=self.roles_of_proxies,
            own_role=own_role,
        )

    def own_token(
        self,
        *,
        authenticator: Authenticator | None,
        follow: Callable[[FollowedFiles[Any]], None],
        super_users: frozenset[str] | None = None,
    ) -> OwnToken | None:
        """Return the credentials for other brokers; None if none are configured. `authenticator`: that of clients,
        which other brokers have, too. `super_users`: roles that may do everything; None: roles are not checked.

        Raises BadRequest if the file cannot be used, if other brokers with these settings would refuse the token, or if
        its role may not do what brokers do for one another. Whether the token of an OpenID issuer whose keys are
        fetched is good is not known yet, so it is not verified.
        """
        if not self.broker_token_file or authenticator is None:
            return None

        def check_role(role: str) -> None:
            if role not in self.roles_of_proxies:
                raise BadRequest(
                    "the role of the token in auth.broker_token_file must be one of auth.proxy_roles, so that other "
                    "brokers accept the requests of clients that this broker passes on: add the role there",
                    role=role,
                )
            if super_users is not None and role not in super_users:
                raise BadRequest(
                    "the role of the token in auth.broker_token_file must be one of authorization.super_user_roles, "
                    "because both roles of a request that a broker passes on are checked: add the role there",
                    role=role,
                )

        token = OwnToken(
            self.broker_token_file,
            role_claim=self.tokens_role_claim,
            role_claims={url: self.openid_role_claim for url, _ in parse_issuers(self.openid_issuers)},
            check=check_role,
        )
        fetched = {url for url, path in parse_issuers(self.openid_issuers) if not path}
        try:
            if unverified(token.text)[1].get("iss") not in fetched:
                authenticator.by_token(token.text)
        except Unauthorized as error:
            raise BadRequest(
                f"other brokers would refuse the token in auth.broker_token_file: {error.message}. Create one with the "
                "key that belongs to auth.tokens_keys_file (`bindery tokens create`)",
                role=token.role,
            ) from None
        follow(token.file)
        return token


class _FollowedPasswords:
    def __init__(self, file: FollowedFile[Passwords]) -> None:
        self._file = file

    def verify(self, name: str, password: bytes) -> str:
        return self._file.value.verify(name, password)

    def remembers(self, name: str, password: bytes) -> bool:
        return self._file.value.remembers(name, password)

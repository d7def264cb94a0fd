"""Tokens of OpenID Connect: identity providers sign them, and publish their keys.

    OpenIdTokens -- iss --> IssuerKeys -- kid --> key

| check                  | rule                                                                                        |
|------------------------|---------------------------------------------------------------------------------------------|
| iss                    | equals the URL of a configured issuer, character by character                               |
| signature              | by a key of that issuer, whose type decides the algorithms (`bindery_identity.jwks`)        |
| aud                    | required: contains one of the configured audiences                                          |
| exp                    | required                                                                                    |
| nbf, iat               | as of other tokens (`bindery_identity.tokens`); Pulsar requires both                        |
| role                   | the claim `role_claim`: text, or a list whose first text counts, as in Pulsar               |

A token of an issuer that is not configured is verified with the keys of other signed tokens, if there are any. No key
verifies tokens of another issuer than its own.

The keys of an issuer come from a file, or are fetched by the owner of an IssuerKeys: it calls `replace` with each set
that it read. Until the first one, and if the newest one is older than `max_age_s`, all tokens of the issuer are
refused.
`on_unknown_key` is called for each token whose `kid` is not in the set, because the issuer may have published new keys;
it must bound how often they are fetched, since anybody can send such tokens.

Source: OpenID Connect Core 1.0 section 3.1.3.7, OpenID Connect Discovery 1.0; Pulsar's AuthenticationProviderOpenID
with openIDAllowedTokenIssuers, openIDAllowedAudiences and openIDRoleClaim.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final
from urllib.parse import urlsplit

from bindery_core.errors import BadRequest, Unauthorized

from bindery_identity.followed import FollowedFile
from bindery_identity.jwks import parse_jwks
from bindery_identity.keys import Key
from bindery_identity.principal import Method
from bindery_identity.tokens import Bearer, SignedTokens, TokenVerifier, unverified

ISSUERS_MAX: Final = 16
"""Maximum number of issuers."""
URL_SIZE_MAX: Final = 1024
"""Maximum characters of the URL of an issuer."""


class IssuerKeys:
    """The newest keys of one issuer, and the tokens that they verify. `max_age_s`: seconds after which keys that were
    fetched are no longer trusted. `file`: the key set is this followed file, and `replace` is not called."""

    def __init__(
        self,
        url: str,
        *,
        audiences: Collection[str],
        role_claim: str = "sub",
        max_age_s: float,
        file: FollowedFile[list[Key]] | None = None,
    ) -> None:
        self.url = url
        self.file = file
        self.on_unknown_key: Callable[[], None] = _nothing
        self.read_at_s: float | None = None
        """When the keys were fetched, in seconds since 1970; None: never, or they come from a file."""
        self._audiences = frozenset(audiences)
        self._role_claim = role_claim
        self._max_age_s = max_age_s
        self._keys: Sequence[Key] = ()
        self._verifier: SignedTokens | None = None
        if file is not None:
            self._use(file.value)

    @property
    def count(self) -> int:
        """Number of keys, trusted or not."""
        return len(self._keys)

    def replace(self, keys: Sequence[Key], *, now_s: float) -> bool:
        """Trust these keys and no others from now on. Return whether they differ from those before. `now_s`: seconds
        since 1970."""
        self.read_at_s = now_s
        if _identities(keys) == _identities(self._keys):  # the verified tokens stay remembered
            return False
        self._use(keys)
        return True

    def verify(self, token: bytes, name: object, *, now_s: float) -> Bearer:
        """Return whom a token of this issuer names. `name`: its `kid`. Raises Unauthorized."""
        if self.file is not None and self.file.value is not self._keys:
            self._use(self.file.value)
        if self._verifier is None or not self._is_trusted(now_s):
            raise Unauthorized(
                "the keys of the token's issuer have not been read, or are too old; retry, and see the service's log",
                issuer=self.url,
            )
        if name is not None and all(key.name not in (name, None) for key in self._keys):
            self.on_unknown_key()
            raise Unauthorized(
                "the token's issuer has published no key of this name (kid); if it is new, retry in a minute",
                issuer=self.url,
            )
        return self._verifier.verify(token, now_s=now_s)

    def _is_trusted(self, now_s: float) -> bool:
        return self.file is not None or (self.read_at_s is not None and now_s < self.read_at_s + self._max_age_s)

    def _use(self, keys: Sequence[Key]) -> None:
        self._keys = keys
        self._verifier = SignedTokens(
            keys,
            audience=self._audiences,
            issuer=self.url,
            role_claim=self._role_claim,
            must_expire=True,
            method=Method.OIDC,
        )


class OpenIdTokens:
    """Verifies the tokens of several issuers. `others`: verifies all other tokens; None: they are refused."""

    def __init__(self, issuers: Sequence[IssuerKeys], *, others: TokenVerifier | None = None) -> None:
        self.issuers = tuple(issuers)
        self._by_url = {issuer.url: issuer for issuer in issuers}
        self._others = others

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        header, claims = unverified(token)
        url = claims.get("iss")
        issuer = self._by_url.get(url) if isinstance(url, str) else None
        if issuer is not None:
            return issuer.verify(token, header.get("kid"), now_s=now_s)
        if self._others is not None:
            return self._others.verify(token, now_s=now_s)
        raise Unauthorized("token is of an issuer that is not configured")


def parse_issuers(text: str) -> list[tuple[str, str]]:
    """Return (URL, path of its key set) of each issuer in a list that is separated by commas; the path is empty if the
    keys are fetched. `URL=PATH` names a file. Raises BadRequest."""
    found: dict[str, str] = {}
    for item in filter(None, (one.strip() for one in text.split(","))):
        url, separator, path = item.partition("=")
        if not is_https(url) or (separator and not path):
            raise BadRequest(
                "an OpenID issuer must be https://HOST[:PORT][/PATH], or https://...=FILE to read its key set from a "
                "file; without query, fragment, user or password",
                issuer=url[:URL_SIZE_MAX],
            )
        if url in found:
            raise BadRequest("an OpenID issuer is listed twice", issuer=url)
        found[url] = path
    if len(found) > ISSUERS_MAX:
        raise BadRequest("too many OpenID issuers", issuers=len(found), issuers_max=ISSUERS_MAX)
    return list(found.items())


def key_set_file(path: str) -> FollowedFile[list[Key]]:
    """Return the followed file of a key set. Raises BadRequest."""
    return FollowedFile(path, parse_jwks, what="the file of an OpenID key set")


def is_https(url: object) -> bool:
    """Return whether `url` is an absolute https URL without query, fragment, user and password."""
    if not isinstance(url, str) or len(url) > URL_SIZE_MAX or not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    has_more = "?" in url or "#" in url or "@" in parts.netloc
    return url.startswith("https://") and bool(parts.hostname) and port != 0 and not has_more


def _identities(keys: Sequence[Key]) -> list[tuple[object, ...]]:
    """Return what makes keys equal: objects of `cryptography` for the same key are."""
    return [(key.algorithms, key.name, key.material.public_numbers()) for key in keys]


def _nothing() -> None:
    """Keys of files are not fetched."""

"""Tokens that authenticate a client to a service: shared secrets, and signed tokens that name their bearer.

A signed token is a JSON Web Token in its compact form:

    base64url({"alg":"HS256","typ":"JWT"}) . base64url(CLAIMS) . base64url(signature)

signature is that of the bytes before the second dot. base64url is written without padding. The key decides which values
of `alg` are possible (`bindery_identity.keys`). A token with the header parameter `kid` is verified with the keys of
that name and with the keys without a name; one without `kid` with all keys.

| claim         | required             | rule                                                                   |
|---------------|----------------------|------------------------------------------------------------------------|
| sub           | yes                  | 1 to SUBJECT_SIZE_MAX printable characters: the bearer, whom logs name |
| aud           | if one is configured | a string or a list of strings that contains the configured audience    |
| iss           | if one is configured | equals the configured issuer                                           |
| exp, nbf, iat | no                   | seconds since 1970: finite numbers; iat is not compared with the clock |
| others        | no                   | ignored                                                                |

The claims of the bearer and of the audience may have other names: Pulsar's `tokenAuthClaim` and `tokenAudienceClaim`.
Of a list of bearers, the first counts, as in Pulsar.

A token with an audience is refused by a verifier that has none: it was issued for another service (RFC 7519 section
4.1.3). Pulsar accepts it unless `tokenAudienceClaim` is set; like Pulsar with that setting, a verifier with an audience
refuses tokens without one.

Also refused, although the signature is right: the header parameter `crit`, because none of its extensions is supported;
a member that occurs twice; JSON that is not UTF-8; base64url that is not canonical.

A verified token is remembered until it expires, by its digest, so that its signature is not verified for each request.
A change of the keys makes a new verifier, which remembers nothing.

Tokens are sent unencrypted: without TLS, they can be intercepted. Neither tokens nor keys appear in an error, a log
line or a repr. Source: RFC 7515, 7519, 8725; Pulsar's AuthenticationProviderToken.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol

from bindery_core.errors import BadRequest, Unauthorized

from bindery_identity.followed import FollowedFiles
from bindery_identity.keys import Key, secret_key

TOKEN_SIZE_MAX: Final = 8192
"""Maximum bytes of a token; a longer one is rejected."""
SECRET_SIZE_MIN: Final = 16
"""Minimum bytes of a shared secret: a shorter one can be guessed."""
CLOCK_SKEW_S: Final = 30.0
"""Maximum difference in seconds between the clocks of the signer and the verifier."""
SUBJECT_SIZE_MAX: Final = 256
"""Maximum characters of a subject: log lines and records contain it."""
SHARED_SUBJECT: Final = "shared-secret"
"""Subject that is reported for a shared secret, because a secret does not name its bearer."""
REMEMBERED_MAX: Final = 10_000
"""Maximum number of verified tokens that are remembered; the oldest is forgotten first."""


class Bearer(NamedTuple):
    """Whom a token names."""

    subject: str
    expires_at_s: float | None = None
    """From when the token is refused, in seconds since 1970: its `exp` and CLOCK_SKEW_S; None: never."""


class TokenVerifier(Protocol):
    """Verifies the tokens that clients present."""

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        """Return whom the token names. `now_s`: seconds since 1970.

        Raises Unauthorized, with the reason and without the token.
        """
        ...


class SharedSecrets:
    """Accepts a token that equals one of the configured secrets.

    More than one secret may be configured, so that clients can change from an old secret to a new one.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        if not secrets:
            raise BadRequest("no shared secret is configured")
        if any(len(secret) < SECRET_SIZE_MIN for secret in secrets):
            raise BadRequest("shared secret is too short", size_min=SECRET_SIZE_MIN)
        if any(len(secret) > TOKEN_SIZE_MAX for secret in secrets):
            raise BadRequest("shared secret is too long", size_max=TOKEN_SIZE_MAX)
        self._digests = [_sha256(secret) for secret in secrets]

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        # Digests have one length, and all are compared: timing reveals neither which secret nor how much of it matched.
        digest = _sha256(token[:TOKEN_SIZE_MAX])
        if len(token) > TOKEN_SIZE_MAX or not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the token is not a shared secret of this service")
        return Bearer(SHARED_SUBJECT)


class SignedTokens:
    """Accepts a token that names its bearer and was signed with one of the configured keys.

    `keys`: bytes are a secret key. `audience`: name of this service in tokens; None if they must not have an audience.
    `issuer`: None accepts tokens of all issuers that have a key. `role_claim`, `audience_claim`: names of the claims.
    """

    def __init__(
        self,
        keys: Sequence[Key | bytes],
        *,
        audience: str | None = None,
        issuer: str | None = None,
        role_claim: str = "sub",
        audience_claim: str = "aud",
    ) -> None:
        if not keys:
            raise BadRequest("no signing key is configured")
        self._keys = tuple(secret_key(key) if isinstance(key, bytes) else key for key in keys)
        self._audience = audience
        self._issuer = issuer
        self._role_claim = role_claim
        self._audience_claim = audience_claim
        self._remembered: dict[bytes, tuple[Bearer, float]] = {}
        """By the digest of a token: its bearer, and from when it is valid."""

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        if len(token) > TOKEN_SIZE_MAX or token.count(b".") != 2:
            raise Unauthorized("not a signed token")
        digest = _sha256(token)
        known = self._remembered.get(digest)
        if known is not None:
            bearer, starts_at_s = known
            if starts_at_s <= now_s and (bearer.expires_at_s is None or now_s < bearer.expires_at_s):
                return bearer
            del self._remembered[digest]
        bearer, starts_at_s = self._verify(token, now_s)
        if len(self._remembered) >= REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[digest] = bearer, starts_at_s
        return bearer

    def _verify(self, token: bytes, now_s: float) -> tuple[Bearer, float]:
        signed, _, signature_text = token.rpartition(b".")
        header_text, _, claims_text = signed.partition(b".")
        self._check_signature(_object(header_text), signed, _decode(signature_text))
        claims = _object(claims_text)
        subject = self._subject(claims)
        self._check_audience(claims, subject)
        if self._issuer is not None and claims.get("iss") != self._issuer:
            raise Unauthorized("token is of another issuer", subject=subject)
        expires_at_s = _time(claims, "exp", default=math.inf) + CLOCK_SKEW_S
        starts_at_s = _time(claims, "nbf", default=-math.inf) - CLOCK_SKEW_S
        if now_s >= expires_at_s:
            raise Unauthorized("token has expired", subject=subject)
        if now_s < starts_at_s:
            raise Unauthorized("token is not valid yet", subject=subject)
        _time(claims, "iat", default=now_s)
        return Bearer(subject, expires_at_s if expires_at_s < math.inf else None), starts_at_s

    def _check_signature(self, header: Mapping[str, Any], signed: bytes, signature: bytes) -> None:
        algorithm, name = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or not any(algorithm in key.algorithms for key in self._keys):
            raise Unauthorized("token is signed with an algorithm for which no key is configured")
        if "crit" in header:
            raise Unauthorized("token requires an extension (crit) that is not supported")
        keys = [key for key in self._keys if algorithm in key.algorithms and name in (key.name, None)]
        if name is not None:
            keys += [key for key in self._keys if algorithm in key.algorithms and key.name is None]
        # All keys are tried, so that timing does not reveal which one has signed.
        if not sum(key.verifies(algorithm, signed, signature) for key in keys):
            raise Unauthorized("token has a wrong signature")

    def _subject(self, claims: Mapping[str, Any]) -> str:
        subject = claims.get(self._role_claim)
        if isinstance(subject, list) and subject and self._role_claim != "sub":
            subject = subject[0]
        if not isinstance(subject, str) or not subject:
            raise Unauthorized("token has no subject", **_named(self._role_claim, "sub"))
        if not is_subject(subject):
            raise Unauthorized(
                f"the subject of the token has more than {SUBJECT_SIZE_MAX} characters, or one that is not printable"
            )
        return subject

    def _check_audience(self, claims: Mapping[str, Any], subject: str) -> None:
        facts = {"subject": subject, **_named(self._audience_claim, "aud")}
        if self._audience_claim not in claims:
            if self._audience is not None:
                raise Unauthorized("token has no audience, and this service requires one", **facts)
            return
        found = claims[self._audience_claim]
        audiences = [found] if isinstance(found, str) else found
        if not isinstance(audiences, list) or not all(isinstance(one, str) for one in audiences):
            raise Unauthorized("token contains an invalid audience", **facts)
        if self._audience is None:
            raise Unauthorized("token is for an audience, and this service has none configured", **facts)
        if self._audience not in audiences:
            raise Unauthorized("token is for another audience", **facts)


class FollowedTokens:
    """The verifier of a followed file of keys or secrets."""

    def __init__(self, file: FollowedFiles[TokenVerifier]) -> None:
        self.file = file

    def verify(self, token: bytes, *, now_s: float) -> Bearer:
        return self.file.value.verify(token, now_s=now_s)


def sign(
    key: Key | bytes,
    *,
    subject: str,
    expires_at_s: int | None = None,
    issued_at_s: int | None = None,
    audience: str | Sequence[str] | None = None,
    algorithm: str | None = None,
    header: Mapping[str, str] | None = None,
) -> bytes:
    """Return a token for `subject`, valid until `expires_at_s` (seconds since 1970; None: without limit).

    `issued_at_s`: seconds since 1970; None: the token does not say when it was made.
    `key`: bytes are a secret key. `audience`: one or more services that may accept the token; None: a token without an
    audience. `algorithm`: None is the first one of the key. `header`: further header parameters. Raises BadRequest for
    an algorithm that the key is not for.
    """
    assert is_subject(subject)
    key = secret_key(key) if isinstance(key, bytes) else key
    algorithm = algorithm or key.algorithms[0]
    if algorithm not in key.algorithms:
        raise BadRequest(f"the key cannot be used with {algorithm}, but with {', '.join(key.algorithms)}")
    claims: dict[str, Any] = {"sub": subject}
    if audience is not None:
        claims["aud"] = audience if isinstance(audience, str) else list(audience)
    if issued_at_s is not None:
        claims["iat"] = issued_at_s
    if expires_at_s is not None:
        claims["exp"] = expires_at_s
    parameters = {**(header or {}), "alg": algorithm, "typ": "JWT"}
    if key.name is not None:
        parameters["kid"] = key.name
    signed = _encode(_json(parameters)) + b"." + _encode(_json(claims))
    return signed + b"." + _encode(key.sign(signed, algorithm))


def unverified(token: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the claims of a token of one's own, without verification of its signature.

    Never use them to authenticate a client. Raises Unauthorized if it is not a signed token.
    """
    if len(token) > TOKEN_SIZE_MAX or token.count(b".") != 2:
        raise Unauthorized("not a signed token")
    header, claims, signature = token.split(b".")
    _decode(signature)
    return _object(header), _object(claims)


def is_subject(name: str) -> bool:
    """Return whether `name` can be the name of a client: logs contain it, so it must not forge or hide parts of them.

    Control characters, line separators, bidirectional and other format characters are not printable.
    """
    return 0 < len(name) <= SUBJECT_SIZE_MAX and name.isprintable()


def _named(claim: str, usual: str) -> dict[str, str]:
    return {} if claim == usual else {"claim": claim}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _decode(text: bytes) -> bytes:
    try:
        decoded = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise Unauthorized("not a signed token") from None
    if _encode(decoded) != text:  # padding, characters of the other alphabet, unused bits
        raise Unauthorized("not a signed token")
    return decoded


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(_decode(text).decode(), object_pairs_hook=_members, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Unauthorized("not a signed token") from None
    if not isinstance(found, dict):
        raise Unauthorized("not a signed token")
    return found


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raise Unauthorized for a member that occurs twice, because programs differ in which one they use."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Unauthorized("token contains a member twice")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _time(claims: Mapping[str, Any], name: str, *, default: float) -> float:
    if name not in claims:
        return default
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unauthorized("token contains an invalid time", claim=name)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise Unauthorized("token contains an invalid time", claim=name)
    return seconds

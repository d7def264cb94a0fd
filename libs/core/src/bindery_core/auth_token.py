"""Tokens that authenticate a client to a bookie: shared secrets, and signed tokens that name their bearer.

A signed token is a JSON Web Token in its compact form, algorithm HS256:

    base64url({"alg":"HS256","typ":"JWT"}) . base64url({"sub":NAME[,"exp":SECONDS][,"nbf":SECONDS]}) . base64url(mac)

mac is the HMAC-SHA256 of the bytes before the second dot under the signing key. base64url is written without padding.
Times are seconds since 1970. No other algorithm is accepted, whatever the header names. Tokens are sent unencrypted:
without TLS, they can be intercepted. Neither tokens nor keys appear in an error, a log line or a repr.
Source: RFC 7515, 7519.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

from bindery_core.errors import BadRequest, Unauthorized

TOKEN_SIZE_MAX: Final = 8192
"""Maximum bytes of a token; a longer one is rejected."""
KEY_SIZE_MIN: Final = 32
"""Minimum bytes of a signing key: a key shorter than the digest would weaken it. Source: RFC 7518 section 3.2."""
SECRET_SIZE_MIN: Final = 16
"""Minimum bytes of a shared secret: a shorter one can be guessed."""
CLOCK_SKEW_S: Final = 30.0
"""Maximum difference in seconds between the clocks of the signer and the verifier."""
SHARED_SUBJECT: Final = "shared-secret"
"""Subject that is reported for a shared secret, because a secret does not name its bearer."""

_HEADER: Final = b'{"alg":"HS256","typ":"JWT"}'


class TokenVerifier(Protocol):
    """Verifies the tokens that clients present."""

    def verify(self, token: bytes, *, now_s: float) -> str:
        """Return the token's subject. `now_s`: seconds since 1970.

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
        self._digests = [_sha256(secret) for secret in secrets]

    def verify(self, token: bytes, *, now_s: float) -> str:
        # Digests have one length, and all are compared: timing reveals neither which secret nor how much of it matched.
        digest = _sha256(token[:TOKEN_SIZE_MAX])
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the token is not a shared secret of this bookie")
        return SHARED_SUBJECT


class SignedTokens:
    """Accepts a token that names its bearer and was signed with one of the configured keys."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise BadRequest("no signing key is configured")
        if any(len(key) < KEY_SIZE_MIN for key in keys):
            raise BadRequest("signing key is too short", size_min=KEY_SIZE_MIN)
        self._keys = tuple(keys)

    def verify(self, token: bytes, *, now_s: float) -> str:
        if len(token) > TOKEN_SIZE_MAX or token.count(b".") != 2:
            raise Unauthorized("not a signed token")
        signed, _, mac_text = token.rpartition(b".")
        mac = _decode(mac_text)
        if not sum(hmac.compare_digest(mac, _mac(key, signed)) for key in self._keys):
            raise Unauthorized("token has a wrong signature")
        header_text, _, claims_text = signed.partition(b".")
        if _object(header_text).get("alg") != "HS256":
            raise Unauthorized("token is not signed with HS256")
        claims = _object(claims_text)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not subject:
            raise Unauthorized("token has no subject")
        if now_s > _time(claims, "exp", default=now_s) + CLOCK_SKEW_S:
            raise Unauthorized("token has expired", subject=subject)
        if now_s < _time(claims, "nbf", default=now_s) - CLOCK_SKEW_S:
            raise Unauthorized("token is not valid yet", subject=subject)
        return subject


def sign(key: bytes, *, subject: str, expires_at_s: int | None = None) -> bytes:
    """Return a token for `subject`, valid until `expires_at_s` (seconds since 1970; None: without limit)."""
    assert subject
    assert len(key) >= KEY_SIZE_MIN
    claims: dict[str, Any] = {"sub": subject}
    if expires_at_s is not None:
        claims["exp"] = expires_at_s
    signed = _encode(_HEADER) + b"." + _encode(json.dumps(claims, separators=(",", ":")).encode())
    return signed + b"." + _encode(_mac(key, signed))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _mac(key: bytes, signed: bytes) -> bytes:
    return hmac.new(key, signed, "sha256").digest()


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _decode(text: bytes) -> bytes:
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise Unauthorized("not a signed token") from None


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(_decode(text))
    except (ValueError, RecursionError):
        raise Unauthorized("not a signed token") from None
    if not isinstance(found, dict):
        raise Unauthorized("not a signed token")
    return found


def _time(claims: dict[str, Any], name: str, *, default: float) -> float:
    value = claims.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unauthorized("token contains an invalid time", claim=name)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise Unauthorized("token contains an invalid time", claim=name)
    return seconds

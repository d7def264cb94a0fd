"""Tokens by which a client shows a bookie who it is: shared secrets, and signed tokens that name their bearer.

A signed token is a JSON Web Token in its compact form, algorithm HS256, as every tool for such tokens writes it:

    base64url({"alg":"HS256","typ":"JWT"}) . base64url({"sub":NAME[,"exp":SECONDS][,"nbf":SECONDS]}) . base64url(mac)

mac is the HMAC-SHA256 of all before the second dot under the key; base64url has no padding; times are seconds of 1970.
No other algorithm is taken, whatever the header asks for. Tokens travel as they are: without TLS anybody on the way
can take one. Neither tokens nor keys ever appear in an error, a log line or a repr.
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
"""Bytes of a token that are looked at; a longer one is none."""
KEY_SIZE_MIN: Final = 32
"""Bytes of a signing key: shorter than the digest would be the weakest part. Source: RFC 7518 section 3.2."""
SECRET_SIZE_MIN: Final = 16
"""Bytes of a shared secret: below, it can be guessed."""
CLOCK_SKEW_S: Final = 30.0
"""How far the clocks of who signs and who verifies may be apart."""
SHARED_SUBJECT: Final = "shared-secret"
"""Who the bearer of a shared secret is: nobody in particular."""

_HEADER: Final = b'{"alg":"HS256","typ":"JWT"}'


class TokenVerifier(Protocol):
    def verify(self, token: bytes, *, now_s: float) -> str:
        """Whom the token names; `now_s`: seconds of 1970. Raises Unauthorized, which says why but not what."""
        ...


class SharedSecrets:
    """The token is one of a few secrets: several, so that one can be replaced while the other is still in use."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        if not secrets:
            raise BadRequest("no shared secret is configured")
        if any(len(secret) < SECRET_SIZE_MIN for secret in secrets):
            raise BadRequest("shared secret is too short", size_min=SECRET_SIZE_MIN)
        self._digests = [_sha256(secret) for secret in secrets]

    def verify(self, token: bytes, *, now_s: float) -> str:
        # Digests have one length, and all are compared: time tells neither which secret nor how much of it was right.
        digest = _sha256(token[:TOKEN_SIZE_MAX])
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the token is not a shared secret of this bookie")
        return SHARED_SUBJECT


class SignedTokens:
    """The token names its bearer and was signed with one of a few keys."""

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
    """A token for `subject`, valid until `expires_at_s` (seconds of 1970; None: for ever)."""
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

"""Tokens that authenticate a client to a service: shared secrets, and signed tokens that name their bearer.

A signed token is a JSON Web Token in its compact form, algorithm HS256:

    base64url({"alg":"HS256","typ":"JWT"}) . base64url(CLAIMS) . base64url(mac)

mac is the HMAC-SHA256 of the bytes before the second dot under the signing key. base64url is written without padding.

| claim         | required             | rule                                                                   |
|---------------|----------------------|------------------------------------------------------------------------|
| sub           | yes                  | 1 to SUBJECT_SIZE_MAX printable characters: the bearer, whom logs name |
| aud           | if one is configured | a string or a list of strings that contains the configured audience    |
| exp, nbf, iat | no                   | seconds since 1970: finite numbers; iat is not compared with the clock |
| others        | no                   | ignored                                                                |

A token with an audience is refused by a verifier that has none: it was issued for another service (RFC 7519 section
4.1.3). Pulsar accepts it unless `tokenAudienceClaim` is set; like Pulsar with that setting, a verifier with an audience
refuses tokens without one.

Also refused, although the signature is right: any other algorithm; the header parameter `crit`, because none of its
extensions is supported; a member that occurs twice; JSON that is not UTF-8; base64url that is not canonical.

Tokens are sent unencrypted: without TLS, they can be intercepted. Neither tokens nor keys appear in an error, a log
line or a repr. Source: RFC 7515, 7519, 8725; Pulsar's AuthenticationProviderToken.
"""

import base64
import binascii
import hashlib
import hmac
import json
import math
from collections.abc import Sequence
from typing import Any, Final, NoReturn, Protocol

from bindery_core.errors import BadRequest, Unauthorized

TOKEN_SIZE_MAX: Final = 8192
"""Maximum bytes of a token; a longer one is rejected."""
KEY_SIZE_MIN: Final = 32
"""Minimum bytes of a signing key: a key shorter than the digest would weaken it. Source: RFC 7518 section 3.2."""
SECRET_SIZE_MIN: Final = 16
"""Minimum bytes of a shared secret: a shorter one can be guessed."""
CLOCK_SKEW_S: Final = 30.0
"""Maximum difference in seconds between the clocks of the signer and the verifier."""
SUBJECT_SIZE_MAX: Final = 256
"""Maximum characters of a subject: log lines and records contain it."""
SHARED_SUBJECT: Final = "shared-secret"
"""Subject that is reported for a shared secret, because a secret does not name its bearer."""

_HEADER: Final = b'{"alg":"HS256","typ":"JWT"}'
_PEM: Final = b"-----BEGIN "
_KEY_KINDS: Final = tuple(
    map(bytes.fromhex, ("06092a864886f70d0101", "06072a8648ce3d0201", "06032b6570", "06032b6571"))
)
"""Object identifiers of RSA, EC, Ed25519 and Ed448 keys in DER."""
_DATA: Final = b"data:"
_BASE64: Final = b";base64,"


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
        if any(len(secret) > TOKEN_SIZE_MAX for secret in secrets):
            raise BadRequest("shared secret is too long", size_max=TOKEN_SIZE_MAX)
        self._digests = [_sha256(secret) for secret in secrets]

    def verify(self, token: bytes, *, now_s: float) -> str:
        # Digests have one length, and all are compared: timing reveals neither which secret nor how much of it matched.
        digest = _sha256(token[:TOKEN_SIZE_MAX])
        if len(token) > TOKEN_SIZE_MAX or not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the token is not a shared secret of this service")
        return SHARED_SUBJECT


class SignedTokens:
    """Accepts a token that names its bearer and was signed with one of the configured keys.

    `audience`: name of this service in tokens; None if tokens must not have an audience.
    """

    def __init__(self, keys: Sequence[bytes], *, audience: str | None = None) -> None:
        if not keys:
            raise BadRequest("no signing key is configured")
        if any(_is_key_pair(key) for key in keys):
            raise BadRequest(
                "a signing key is a public or private key or a certificate; HS256 needs a secret key of random bytes"
            )
        if any(len(key) < KEY_SIZE_MIN for key in keys):
            raise BadRequest("signing key is too short", size_min=KEY_SIZE_MIN)
        self._keys = tuple(keys)
        self._audience = audience

    def verify(self, token: bytes, *, now_s: float) -> str:
        if len(token) > TOKEN_SIZE_MAX or token.count(b".") != 2:
            raise Unauthorized("not a signed token")
        signed, _, mac_text = token.rpartition(b".")
        mac = _decode(mac_text)
        if not sum(hmac.compare_digest(mac, _mac(key, signed)) for key in self._keys):
            raise Unauthorized("token has a wrong signature")
        header_text, _, claims_text = signed.partition(b".")
        header = _object(header_text)
        if header.get("alg") != "HS256":
            raise Unauthorized("token is not signed with HS256")
        if "crit" in header:
            raise Unauthorized("token requires an extension (crit) that is not supported")
        claims = _object(claims_text)
        subject = _subject(claims)
        self._check_audience(claims, subject)
        if now_s >= _time(claims, "exp", default=now_s) + CLOCK_SKEW_S:
            raise Unauthorized("token has expired", subject=subject)
        if now_s < _time(claims, "nbf", default=now_s) - CLOCK_SKEW_S:
            raise Unauthorized("token is not valid yet", subject=subject)
        _time(claims, "iat", default=now_s)
        return subject

    def _check_audience(self, claims: dict[str, Any], subject: str) -> None:
        if "aud" not in claims:
            if self._audience is not None:
                raise Unauthorized("token has no audience, and this service requires one", subject=subject)
            return
        found = claims["aud"]
        audiences = [found] if isinstance(found, str) else found
        if not isinstance(audiences, list) or not all(isinstance(one, str) for one in audiences):
            raise Unauthorized("token contains an invalid audience", subject=subject)
        if self._audience is None:
            raise Unauthorized("token is for an audience, and this service has none configured", subject=subject)
        if self._audience not in audiences:
            raise Unauthorized("token is for another audience", subject=subject)


def parse_keys(text: bytes) -> list[bytes]:
    """Return the signing keys in a file that has one per line, without surrounding blanks.

    A line is a key itself, or `data:;base64,<base64 of a key>`. A line that is base64 without that prefix counts as
    both, because `pulsar tokens create-secret-key --base64` writes keys so. The first key of a line is the one to sign
    with. Raises BadRequest with the number of a line that cannot be read.
    """
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if word.startswith(_DATA):
            _, separator, encoded = word.partition(_BASE64)
            key = _base64_or_none(encoded) if separator else None
            if key is None:
                raise BadRequest("a signing key with the prefix data: must be data:;base64,<base64>", line=number)
            keys.append(key)
        elif word:
            keys.append(word)
            key = _base64_or_none(word)
            if key is not None and len(key) >= KEY_SIZE_MIN:
                keys.append(key)
    return keys


def sign(
    key: bytes, *, subject: str, expires_at_s: int | None = None, audience: str | Sequence[str] | None = None
) -> bytes:
    """Return a token for `subject`, valid until `expires_at_s` (seconds since 1970; None: without limit).

    `audience`: one or more services that may accept it; None: a token without an audience.
    """
    assert is_subject(subject)
    assert len(key) >= KEY_SIZE_MIN
    claims: dict[str, Any] = {"sub": subject}
    if audience is not None:
        claims["aud"] = audience if isinstance(audience, str) else list(audience)
    if expires_at_s is not None:
        claims["exp"] = expires_at_s
    signed = _encode(_HEADER) + b"." + _encode(json.dumps(claims, separators=(",", ":")).encode())
    return signed + b"." + _encode(_mac(key, signed))


def is_subject(name: str) -> bool:
    """Return whether `name` can be the name of a client: logs contain it, so it must not forge or hide parts of them.

    Control characters, line separators, bidirectional and other format characters are not printable.
    """
    return 0 < len(name) <= SUBJECT_SIZE_MAX and name.isprintable()


def _is_key_pair(key: bytes) -> bool:
    """Return whether `key` is one of a key pair, in PEM or DER. Whoever knows a public key could sign with it.

    Source: RFC 8725 section 2.1.
    """
    if _PEM in key:
        return True
    if key[:1] != b"\x30":  # DER: a sequence that ends with the key
        return False
    is_long = key[1:2] in (b"\x81", b"\x82") and len(key) == 2 + (key[1] & 3) + int.from_bytes(
        key[2 : 2 + (key[1] & 3)]
    )
    return is_long or (len(key) == 2 + key[1] and any(kind in key for kind in _KEY_KINDS))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _mac(key: bytes, signed: bytes) -> bytes:
    return hmac.new(key, signed, "sha256").digest()


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


def _base64_or_none(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None


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


def _subject(claims: dict[str, Any]) -> str:
    subject = claims.get("sub")
    if not isinstance(subject, str) or not subject:
        raise Unauthorized("token has no subject")
    if not is_subject(subject):
        raise Unauthorized(
            f"the subject of the token has more than {SUBJECT_SIZE_MAX} characters, or one that is not printable"
        )
    return subject


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

"""Keys that sign and verify tokens. The type of a key decides which algorithms it may be used with:

| key                                   | algorithms, by JSON Web Algorithms                                    |
|---------------------------------------|-----------------------------------------------------------------------|
| secret of at least 32 bytes           | HS256; from 48 bytes also HS384; from 64 bytes also HS512             |
| RSA public key of at least 2048 bits  | RS256, RS384, RS512, PS256, PS384, PS512                              |
| EC public key on P-256, P-384, P-521  | ES256, ES384, ES512                                                   |

A token cannot choose another use of a key: with a public key as the secret of HS256, everybody who knows the public
key could sign tokens. For the same reason, whatever looks like one of a key pair is never a secret: PEM, DER, and the
base64 of DER.

A file of keys has one key per line, or PEM blocks, or both:

| line                           | key                                                                              |
|--------------------------------|----------------------------------------------------------------------------------|
| `-----BEGIN PUBLIC KEY-----`   | the PEM block that begins here                                                   |
| `data:;base64,` and base64     | the decoded bytes: a secret, or a public key in DER                              |
| base64 of a public key in DER  | that public key                                                                  |
| other base64                   | a secret: both the text and, if long enough, the decoded bytes                   |
| other text                     | a secret: the text                                                               |
| `kid=NAME` before any of these | the same, with a name. On a line of its own, it names the next key               |

Errors contain neither keys nor parts of them. Source: RFC 7518 sections 3.2 to 3.5, RFC 8725 sections 2.1 and 3.1, the
forms of Pulsar's tokenSecretKey, tokenPublicKey and `pulsar tokens`.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

from bindery_core.errors import BadRequest

KEY_SIZE_MIN: Final = 32
"""Minimum bytes of a secret key: a key shorter than the digest would weaken it. Source: RFC 7518 section 3.2."""
RSA_BITS_MIN: Final = 2048
"""Minimum bits of an RSA key. Source: RFC 7518 section 3.3."""
KEYS_MAX: Final = 100
"""Maximum number of keys in a file: each may be tried for a token."""
NAME_SIZE_MAX: Final = 256
"""Maximum characters of the name of a key."""
HMAC: Final = {"HS256": "sha256", "HS384": "sha384", "HS512": "sha512"}
"""Algorithms of secret keys, and the hash of each."""
RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
EC: Final = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
"""Curves, and the algorithm of each."""
ALGORITHMS: Final = (*HMAC, *RSA, *EC.values())

_PEM: Final = b"-----BEGIN "
_PEM_END: Final = b"-----END "
_KEY_KINDS: Final = tuple(
    map(
        bytes.fromhex,
        ("06092a864886f70d0101", "06072a8648ce3d0201", "06082a8648ce3d030107", "06032b6570", "06032b6571"),
    )
)
"""Object identifiers of RSA, EC, P-256, Ed25519 and Ed448 keys in DER."""
_DATA: Final = b"data:"
_BASE64: Final = b";base64,"
_KID: Final = b"kid="
_FILE: Final = "file:"


@dataclass(frozen=True, slots=True)
class Key:
    """A key that verifies tokens, or, if it is a secret or a private key, also signs them."""

    algorithms: tuple[str, ...]
    """The algorithms that the key may be used with; the first is the one to sign with."""
    material: Any = field(repr=False)
    """The bytes of a secret, or a key object of `cryptography`."""
    name: str | None = None
    """Value of the header parameter `kid` of its tokens; None: the key verifies tokens with any `kid`."""

    @property
    def is_secret(self) -> bool:
        """Whether the same key signs and verifies."""
        return isinstance(self.material, bytes)

    def verifies(self, algorithm: str, signed: bytes, signature: bytes) -> bool:
        """Return whether `signature` is that of `signed`. `algorithm` must be one of `algorithms`."""
        assert algorithm in self.algorithms
        if isinstance(self.material, bytes):
            return hmac.compare_digest(signature, _mac(self.material, algorithm, signed))
        return bool(_asymmetric(algorithm).verify(signed, self.material, signature))

    def sign(self, signed: bytes, algorithm: str) -> bytes:
        """Return the signature of `signed`. The key must be a secret or a private key, not a public key."""
        assert algorithm in self.algorithms
        if isinstance(self.material, bytes):
            return _mac(self.material, algorithm, signed)
        return bytes(_asymmetric(algorithm).sign(signed, self.material))


def secret_key(secret: bytes) -> Key:
    """Return a secret key. Raises BadRequest if it is too short, or one of a key pair."""
    if is_key_pair(secret):
        raise BadRequest(
            "a signing key is a public or private key or a certificate; HS256 needs a secret key of random bytes"
        )
    if len(secret) < KEY_SIZE_MIN:
        raise BadRequest("signing key is too short", size_min=KEY_SIZE_MIN)
    usable = (name for name, digest in HMAC.items() if len(secret) >= hashlib.new(digest).digest_size)
    return Key(tuple(usable), secret)


def public_key(content: bytes) -> Key:
    """Return a public key from PEM or DER (SubjectPublicKeyInfo).

    Raises BadRequest, also for private keys and certificates.
    """
    from cryptography.hazmat.primitives import serialization  # late: most services have only secret keys

    load = serialization.load_pem_public_key if content.lstrip()[:11] == _PEM else serialization.load_der_public_key
    try:
        found = load(content)
    except Exception:  # the library raises errors of many types, some with parts of the key
        raise BadRequest(
            "not a public key that verifies tokens: give an RSA or EC public key (SubjectPublicKeyInfo, PEM or DER), "
            "no private key and no certificate. `openssl pkey -pubout` prints the public key of a private key, "
            "`openssl x509 -pubkey -noout` that of a certificate"
        ) from None
    return key_of(found)


def private_key(content: bytes) -> Key:
    """Return a private key from PEM or DER (PKCS #8; in PEM also the older forms), not encrypted. Raises BadRequest."""
    from cryptography.hazmat.primitives import serialization  # late, as above

    load = serialization.load_pem_private_key if content.lstrip()[:11] == _PEM else serialization.load_der_private_key
    try:
        found = load(content, None)
    except TypeError:
        raise BadRequest("the private key is encrypted; give one without a password") from None
    except Exception:  # as above
        raise BadRequest("not a private key: give an RSA or EC key (PKCS #8, as PEM or DER)") from None
    return key_of(found)


def key_of(material: Any) -> Key:
    """Return the key of a key object of `cryptography`. Raises BadRequest if its type or size verifies no tokens."""
    return Key(_algorithms(material), material)


def key_file(setting: str) -> tuple[str, Callable[[bytes], list[Key]]]:
    """Return the path that a setting names, and the function that reads the keys in the content of that file.

    A URL `file:///path` names a file that is one key, as `pulsar tokens` writes it; anything else is the path of a file
    of lines. Raises BadRequest for another URL.
    """
    if setting[: len(_FILE)].lower() != _FILE:
        return setting, parse_keys
    url = urlsplit(setting)
    if url.netloc not in ("", "localhost") or not url.path.startswith("/") or url.query or url.fragment:
        raise BadRequest("the URL of a key file must be file:///<absolute path>", url=setting)
    return unquote_to_bytes(url.path).decode("utf-8", "surrogateescape"), single_key


def single_key(content: bytes) -> list[Key]:
    """Return the key in a file whose bytes are one key, or the public keys in its PEM blocks. Raises BadRequest."""
    if _PEM in content:
        return parse_keys(content)
    return [public_key(content) if is_key_pair(content) else secret_key(content)]


def parse_keys(text: bytes) -> list[Key]:
    """Return the keys in a file of lines, as the table of the module describes. The first key of a line is the one to
    sign with.

    Raises BadRequest with the number of a line that cannot be read; also for a file without keys.
    """
    if _is_der(text):  # it has no lines
        return [public_key(text)]
    keys: list[Key] = []
    lines = text.splitlines()
    name: str | None = None
    at = 0
    while at < len(lines):
        number = at + 1
        word = lines[at].strip()
        at += 1
        try:
            if word.startswith(_KID):
                given, _, word = word.partition(b" ")
                name = _name(given.removeprefix(_KID))
                word = word.strip()
            if not word:
                continue
            if word.startswith(_PEM):
                block = [word]
                while at < len(lines) and not block[-1].startswith(_PEM_END):
                    block.append(lines[at].strip())
                    at += 1
                found = [public_key(b"\n".join(block) + b"\n")]
            else:
                found = _keys_of_word(word)
        except BadRequest as error:
            raise BadRequest(error.message, **{**error.facts, "line": number}) from None
        keys += [replace(key, name=name) for key in found]
        name = None
        if len(keys) > KEYS_MAX:
            raise BadRequest("too many signing keys", keys_max=KEYS_MAX)
    if not keys:
        raise BadRequest("no signing key is configured")
    return keys


def is_key_pair(key: bytes) -> bool:
    """Return whether `key` is one of a key pair or a certificate, in PEM or DER.

    Source: RFC 8725 section 2.1.
    """
    return _PEM in key or _is_der(key)


def _is_der(key: bytes) -> bool:
    if key[:1] != b"\x30":  # a sequence that ends with the key
        return False
    is_long = key[1:2] in (b"\x81", b"\x82") and len(key) == 2 + (key[1] & 3) + int.from_bytes(
        key[2 : 2 + (key[1] & 3)]
    )
    return is_long or (len(key) == 2 + key[1] and any(kind in key for kind in _KEY_KINDS))


def _keys_of_word(word: bytes) -> list[Key]:
    if word.startswith(_DATA):
        _, separator, encoded = word.partition(_BASE64)
        decoded = _base64_or_none(encoded) if separator else None
        if decoded is None:
            raise BadRequest("a signing key with the prefix data: must be data:;base64,<base64>")
        return single_key(decoded)
    decoded = _base64_or_none(word)
    if decoded is not None and is_key_pair(decoded):
        return single_key(decoded)
    keys = [secret_key(word)]
    if decoded is not None and len(decoded) >= KEY_SIZE_MIN:
        keys.append(secret_key(decoded))
    return keys


def _name(text: bytes) -> str:
    name = text.decode("utf-8", "replace")
    if not name.isprintable() or "\ufffd" in name or not 0 < len(name) <= NAME_SIZE_MAX:
        raise BadRequest("the name of a signing key must be printable text", size_max=NAME_SIZE_MAX)
    return name


def _algorithms(key: Any) -> tuple[str, ...]:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # late, as above

    _asymmetric(RSA[0])  # imported now, so that no request waits for it
    if isinstance(key, rsa.RSAPublicKey | rsa.RSAPrivateKey):
        if key.key_size < RSA_BITS_MIN:
            raise BadRequest("the RSA key is too short", bits=key.key_size, bits_min=RSA_BITS_MIN)
        return RSA
    if isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey) and key.curve.name in EC:
        return (EC[key.curve.name],)
    raise BadRequest("the key is neither RSA nor EC on P-256, P-384 or P-521")


def _mac(secret: bytes, algorithm: str, signed: bytes) -> bytes:
    return hmac.new(secret, signed, HMAC[algorithm]).digest()


def _asymmetric(name: str) -> Any:
    from jwt.algorithms import get_default_algorithms  # late: most services have only secret keys

    if not _asymmetric_algorithms:
        _asymmetric_algorithms.update(get_default_algorithms())
    return _asymmetric_algorithms[name]


_asymmetric_algorithms: dict[str, Any] = {}


def _base64_or_none(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None

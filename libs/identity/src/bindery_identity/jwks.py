"""Read the public keys in a JSON Web Key Set, the document in which an identity provider publishes its keys.

| key in the set                                                | result                                              |
|---------------------------------------------------------------|-----------------------------------------------------|
| `kty` RSA, from 2048 to RSA_BITS_MAX bits                     | a key for RS256 to RS512 and PS256 to PS512         |
| `kty` EC on P-256, P-384 or P-521                             | a key for ES256, ES384 or ES512                     |
| one of these with `alg`                                       | a key for this algorithm, if its type allows it     |
| `use` other than sig, `key_ops` without verify                | left out: it does not verify signatures             |
| a secret or private key (`kty` oct, the member `d`)           | left out: a published secret proves nothing         |
| any other, or with invalid members                            | left out: providers may publish keys of new types   |

The type of a key therefore decides its algorithms (`bindery_identity.keys`), never the token. Source: RFC 7517, and
RFC 7518 section 6.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from bindery_core.errors import BadRequest

from bindery_identity.keys import NAME_SIZE_MAX, Key, key_of

JWKS_SIZE_MAX: Final = 256 * 1024
"""Maximum bytes of a set."""
JWKS_KEYS_MAX: Final = 32
"""Maximum number of keys in a set: each may be tried for a token without `kid`."""
RSA_BITS_MAX: Final = 8192
"""Maximum bits of an RSA key: the time of a verification grows with its square."""
RSA_EXPONENT_MAX: Final = 2**32
"""Maximum public exponent of an RSA key, for the same reason."""
_CURVES: Final = {"P-256": ("SECP256R1", 32), "P-384": ("SECP384R1", 48), "P-521": ("SECP521R1", 66)}
"""Curve: name in `cryptography`, and bytes of a coordinate."""


def parse_jwks(content: bytes) -> list[Key]:
    """Return the keys that verify signatures. Raises BadRequest for what is not a key set, or has no such key."""
    if len(content) > JWKS_SIZE_MAX:
        raise BadRequest("the key set is too large", size_max=JWKS_SIZE_MAX)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise BadRequest("the key set is not JSON") from None
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list):
        raise BadRequest("the key set has no list `keys`; the URL or file must contain a JSON Web Key Set")
    if len(keys) > JWKS_KEYS_MAX:
        raise BadRequest("the key set has too many keys", keys=len(keys), keys_max=JWKS_KEYS_MAX)
    usable = [key for one in keys if isinstance(one, dict) and (key := _key(one)) is not None]
    if not usable:
        raise BadRequest(
            "the key set has no public key that verifies tokens: RSA from 2048 bits, or EC on P-256, P-384 or P-521",
            keys=len(keys),
        )
    return usable


def _key(members: Mapping[str, Any]) -> Key | None:
    """Return the key; None if it is left out."""
    if members.get("use", "sig") != "sig" or "d" in members:
        return None
    operations = members.get("key_ops")
    if operations is not None and (not isinstance(operations, list) or "verify" not in operations):
        return None
    name = members.get("kid")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= NAME_SIZE_MAX):
        return None
    try:
        key = key_of(_public(members))
    except Exception:  # of the library, for numbers that are no key; errors of many types
        return None
    algorithm = members.get("alg")
    if algorithm is None:
        return replace(key, name=name)
    return replace(key, name=name, algorithms=(algorithm,)) if algorithm in key.algorithms else None


def _public(members: Mapping[str, Any]) -> Any:
    """Return a key object of `cryptography`. Raises ValueError, KeyError, or an error of the library."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # late: most services have only secret keys

    match members.get("kty"):
        case "RSA":
            modulus, exponent = _number(members["n"]), _number(members["e"])
            if modulus.bit_length() > RSA_BITS_MAX or exponent > RSA_EXPONENT_MAX:
                raise ValueError("too long")
            return rsa.RSAPublicNumbers(exponent, modulus).public_key()
        case "EC":
            name, size = _CURVES[members["crv"]]
            x, y = _bytes(members["x"]), _bytes(members["y"])
            if len(x) != size or len(y) != size:
                raise ValueError("not a coordinate")
            curve: ec.EllipticCurve = getattr(ec, name)()
            return ec.EllipticCurvePublicNumbers(int.from_bytes(x), int.from_bytes(y), curve).public_key()
    raise ValueError("not a type of keys that verify tokens")


def _number(text: Any) -> int:
    return int.from_bytes(_bytes(text))


def _bytes(text: Any) -> bytes:
    """Decode base64url without padding. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("not text")
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64url") from error

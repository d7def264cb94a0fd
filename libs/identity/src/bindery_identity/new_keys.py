"""Make keys that sign and verify tokens: secret keys, and key pairs in the forms that `bindery_identity.keys` reads."""

import secrets
from typing import Any, Final

from bindery_core.errors import BadRequest

from bindery_identity.keys import EC, HMAC, RSA, RSA_BITS_MIN

KEY_SIZES: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Bytes of a new secret key by its algorithm: those of the digest. Source: RFC 7518 section 3.2."""
PUBLIC_EXPONENT: Final = 65_537


def new_secret_key(algorithm: str) -> bytes:
    """Return a new secret key for an algorithm such as HS256. Raises BadRequest for another algorithm."""
    if algorithm not in HMAC:
        raise BadRequest(f"the algorithm of a secret key is one of {', '.join(HMAC)}", given=algorithm)
    return secrets.token_bytes(KEY_SIZES[algorithm])  # noqa: TID251 (unpredictable)


def new_key_pair(algorithm: str, *, as_pem: bool) -> tuple[bytes, bytes]:
    """Return a new private key and its public key for an algorithm such as ES256, in PEM or DER.

    Raises BadRequest for another algorithm.
    """
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # late: most services make no keys
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    curves: dict[str, Any] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
    if algorithm in curves:
        pair: Any = ec.generate_private_key(curves[algorithm])
    elif algorithm in RSA:
        pair = rsa.generate_private_key(PUBLIC_EXPONENT, RSA_BITS_MIN)
    else:
        raise BadRequest(f"the algorithm of a key pair is one of {', '.join((*RSA, *EC.values()))}", given=algorithm)
    encoding = Encoding.PEM if as_pem else Encoding.DER
    return pair.private_bytes(encoding, PrivateFormat.PKCS8, NoEncryption()), _public(pair, encoding)


def public_key_pem(private_key: Any) -> bytes:
    """Return the public key (PEM) of a private key of the library `cryptography`."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return _public(private_key, Encoding.PEM)


def _public(private_key: Any, encoding: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import PublicFormat

    return bytes(private_key.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo))

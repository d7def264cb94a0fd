"""Key sets of identity providers: which keys are used, and for which algorithms."""

import base64
import json
from typing import Any

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.jwks import JWKS_KEYS_MAX, JWKS_SIZE_MAX, parse_jwks
from bindery_identity.keys import RSA
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

PAIR = rsa.generate_private_key(public_exponent=65537, key_size=2048)
SHORT_PAIR = rsa.generate_private_key(public_exponent=65537, key_size=1024)
CURVE_PAIR = ec.generate_private_key(ec.SECP256R1())


def rsa_jwk(**more: Any) -> dict[str, Any]:
    return {**RSAAlgorithm.to_jwk(PAIR.public_key(), as_dict=True), "key_ops": ["verify"], **more}


def ec_jwk(**more: Any) -> dict[str, Any]:
    return {**ECAlgorithm.to_jwk(CURVE_PAIR.public_key(), as_dict=True), **more}


def parse(*keys: Any) -> list[Any]:
    return parse_jwks(json.dumps({"keys": keys}).encode())


def test_the_type_of_a_key_decides_its_algorithms() -> None:
    found = parse(rsa_jwk(kid="a", use="sig"), ec_jwk(kid="b"), rsa_jwk(kid="c", alg="PS256"), ec_jwk())
    assert [(key.name, key.algorithms) for key in found] == [
        ("a", RSA),
        ("b", ("ES256",)),
        ("c", ("PS256",)),
        (None, ("ES256",)),
    ]
    assert found[0].material == PAIR.public_key()
    assert found[1].material == CURVE_PAIR.public_key()


SECRET = base64.urlsafe_b64encode(b"s" * 32).decode().rstrip("=")


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "oct", "k": SECRET, "kid": "x"},
        {"kty": "OKP", "crv": "Ed25519", "x": SECRET},
        {**json.loads(RSAAlgorithm.to_jwk(PAIR)), "kid": "private"},
        RSAAlgorithm.to_jwk(SHORT_PAIR.public_key(), as_dict=True),
        rsa_jwk(use="enc"),
        rsa_jwk(key_ops=["encrypt"]),
        rsa_jwk(key_ops="verify"),
        rsa_jwk(alg="ES256"),
        rsa_jwk(alg="HS256"),
        rsa_jwk(alg="none"),
        rsa_jwk(kid=7),
        rsa_jwk(kid=""),
        rsa_jwk(kid="k" * 257),
        rsa_jwk(e="AQ"),
        rsa_jwk(e=base64.urlsafe_b64encode(b"\xff" * 8).decode().rstrip("=")),
        rsa_jwk(n=base64.urlsafe_b64encode(b"\xff" * 1025).decode().rstrip("=")),
        rsa_jwk(n="!"),
        rsa_jwk(n=None),
        {"kty": "RSA"},
        ec_jwk(crv="secp256k1"),
        ec_jwk(crv=["P-256"]),
        ec_jwk(crv="P-384"),
        ec_jwk(x=SECRET),
        ec_jwk(x=ec_jwk()["x"] + "AA"),
        "text",
        None,
    ],
)
def test_keys_that_verify_nothing_are_left_out(key: Any) -> None:
    assert [one.name for one in parse(key, ec_jwk(kid="good"))] == ["good"]
    with pytest.raises(BadRequest, match="no public key that verifies tokens"):
        parse(key)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no list `keys`"),
        (b'{"keys":{}}', "no list `keys`"),
        (b'{"keys":[]}', "no public key"),
        (json.dumps({"keys": [{}] * (JWKS_KEYS_MAX + 1)}).encode(), "too many keys"),
        (b" " * (JWKS_SIZE_MAX + 1), "too large"),
    ],
)
def test_documents_that_are_no_key_sets_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse_jwks(content)

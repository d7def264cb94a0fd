"""Keys: every form of a file gives the key that it holds, and no public key ever becomes a secret."""

import base64
import dataclasses

import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.keys import (
    ALGORITHMS,
    EC,
    HMAC,
    KEYS_MAX,
    RSA,
    is_key_pair,
    parse_keys,
    private_key,
    public_key,
    secret_key,
    single_key,
)
from bindery_identity.tokens import SignedTokens, sign
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

NOW = 1_700_000_000.0
RSA_KEY = rsa.generate_private_key(65537, 2048)
PAIRS = {
    "rsa": RSA_KEY,
    "p-256": ec.generate_private_key(ec.SECP256R1()),
    "p-384": ec.generate_private_key(ec.SECP384R1()),
    "p-521": ec.generate_private_key(ec.SECP521R1()),
}
ANY_PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def public(pair: object, encoding: Encoding) -> bytes:
    return pair.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]


def private(pair: object, encoding: Encoding, style: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return pair.private_bytes(encoding, style, NoEncryption())  # type: ignore[attr-defined, no-any-return]


@ANY_PAIR
def test_every_algorithm_of_a_pair_signs_and_verifies(pair: object) -> None:
    signer, verifier = private_key(private(pair, Encoding.DER)), public_key(public(pair, Encoding.DER))
    assert signer.algorithms == verifier.algorithms
    for algorithm in signer.algorithms:
        text = sign(signer, subject="x", algorithm=algorithm)
        assert SignedTokens([verifier]).verify(text, now_s=NOW).subject == "x"
        changed = text[:-8] + (b"AAAAAAAA" if text[-8:] != b"AAAAAAAA" else b"BBBBBBBB")
        with pytest.raises(Unauthorized):
            SignedTokens([verifier]).verify(changed, now_s=NOW)
        with pytest.raises(Unauthorized, match=r"wrong signature|for which no key"):
            SignedTokens([public_key(public(rsa.generate_private_key(65537, 2048), Encoding.DER))]).verify(
                text, now_s=NOW
            )


def test_the_length_of_a_secret_decides_its_algorithms() -> None:
    for size, algorithms in ((32, 1), (47, 1), (48, 2), (63, 2), (64, 3), (200, 3)):
        key = secret_key(b"s" * size)
        assert key.algorithms == tuple(HMAC)[:algorithms]
        for algorithm in key.algorithms:
            assert SignedTokens([key]).verify(sign(key, subject="x", algorithm=algorithm), now_s=NOW).subject == "x"
        with pytest.raises(BadRequest, match="cannot be used with"):
            sign(key, subject="x", algorithm="RS256")
    with pytest.raises(BadRequest, match="too short"):
        secret_key(b"s" * 31)
    assert set(ALGORITHMS) == {*HMAC, *RSA, *EC.values()}


@ANY_PAIR
def test_each_form_of_a_public_key_is_read(pair: object) -> None:
    der, pem = public(pair, Encoding.DER), public(pair, Encoding.PEM)
    signer = private_key(private(pair, Encoding.PEM))
    text = sign(signer, subject="x")
    for keys in (
        single_key(der),
        single_key(pem),
        parse_keys(der),
        parse_keys(pem),
        parse_keys(pem.replace(b"\n", b"\r\n")),
        parse_keys(base64.b64encode(der) + b"\n"),
        parse_keys(b"data:;base64," + base64.b64encode(der)),
        parse_keys(b"data:;base64," + base64.b64encode(pem)),
    ):
        assert len(keys) == 1
        assert not keys[0].is_secret
        assert SignedTokens(keys).verify(text, now_s=NOW).subject == "x"


@ANY_PAIR
def test_a_public_key_is_never_a_secret(pair: object) -> None:
    """Whoever knows the public key could sign tokens with it."""
    der, pem = public(pair, Encoding.DER), public(pair, Encoding.PEM)
    for content in (der, pem):
        with pytest.raises(BadRequest, match="a signing key is a public or private key"):
            secret_key(content)
        for file in (content, base64.b64encode(content), b"data:;base64," + base64.b64encode(content)):
            try:
                keys = parse_keys(file)
            except BadRequest:
                continue
            for secret in (der, pem, base64.b64encode(der), base64.b64encode(pem)):
                text = sign(dataclasses.replace(secret_key(b"s" * 32), material=secret), subject="admin")
                with pytest.raises(Unauthorized):
                    SignedTokens(keys).verify(text, now_s=NOW)


@ANY_PAIR
def test_a_private_key_is_refused_where_a_public_one_is_expected(pair: object) -> None:
    styles = [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL]
    for content in (private(pair, encoding, style) for encoding in (Encoding.PEM, Encoding.DER) for style in styles):
        for file in (content, base64.b64encode(content)):
            with pytest.raises(BadRequest) as refused:
                parse_keys(b"\n" + file) if content.startswith(b"-") else parse_keys(file)
            assert base64.b64encode(content[:20]).decode()[:20] not in str(refused.value)


def test_private_keys_are_read_unless_they_are_encrypted_or_of_another_kind() -> None:
    for style in (PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL):
        assert private_key(private(RSA_KEY, Encoding.PEM, style)).algorithms == RSA
    encrypted = RSA_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    with pytest.raises(BadRequest, match="encrypted"):
        private_key(encrypted)
    other = ed25519.Ed25519PrivateKey.generate()
    with pytest.raises(BadRequest, match="neither RSA nor EC"):
        private_key(private(other, Encoding.DER))
    with pytest.raises(BadRequest, match="neither RSA nor EC"):
        parse_keys(public(other, Encoding.PEM))
    with pytest.raises(BadRequest, match="too short"):
        private_key(private(rsa.generate_private_key(65537, 1024), Encoding.DER))
    with pytest.raises(BadRequest, match="not a private key"):
        private_key(b"something else")


def test_a_file_may_mix_secrets_and_public_keys_and_name_them() -> None:
    secrets = [b"1" * 44, b"2" * 44]
    pem = public(PAIRS["p-256"], Encoding.PEM)
    keys = parse_keys(b"kid=old " + secrets[0] + b"\n\nkid=pair\n" + pem + b"kid=new\n" + secrets[1] + b"\n")
    assert [(key.name, key.is_secret) for key in keys] == [
        ("old", True), ("old", True), ("pair", False), ("new", True), ("new", True)
    ]  # fmt: skip


def test_kid_chooses_among_the_keys_that_have_names() -> None:
    one, other, nameless = (dataclasses.replace(secret_key(bytes([65 + at]) * 32)) for at in range(3))
    one, other = dataclasses.replace(one, name="one"), dataclasses.replace(other, name="other")
    verifier = SignedTokens([one, other, nameless])
    for key in (one, other, nameless):
        assert verifier.verify(sign(key, subject="x"), now_s=NOW).subject == "x"
    without_name = dataclasses.replace(one, name=None)
    assert verifier.verify(sign(without_name, subject="x"), now_s=NOW).subject == "x", "kid is not required"
    for kid in ("other", "unknown"):
        with pytest.raises(Unauthorized, match="wrong signature"):
            verifier.verify(sign(dataclasses.replace(one, name=kid), subject="x"), now_s=NOW)
    assert verifier.verify(sign(dataclasses.replace(nameless, name="any"), subject="x"), now_s=NOW).subject == "x"


@pytest.mark.parametrize("line", [b"data:", b"data:;base64,?", b"data:;base64,abc", b"data:,abc", b"data:;base32,abc",
                                  b"short", b"kid= " + b"k" * 32, b"kid=\x07 " + b"k" * 32,
                                  b"-----BEGIN PUBLIC KEY-----"])  # fmt: skip
def test_an_unusable_line_is_named_by_its_number(line: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_keys(b"the first key is long enough, too\n" + line)
    assert refused.value.facts["line"] == 2


def test_a_file_without_keys_or_with_too_many_is_refused() -> None:
    for file in (b"", b" \n\r\n", b"kid=name"):
        with pytest.raises(BadRequest, match="no signing key"):
            parse_keys(file)
    with pytest.raises(BadRequest, match="too many"):
        parse_keys(b"k-!" * 20 + (b"\n" + b"k-!" * 20) * KEYS_MAX)


def test_a_secret_key_may_begin_as_a_key_pair_does() -> None:
    for key in (
        b"\x30" + b"k" * 31,
        b"\x30\x1e" + b"k" * 30,
        b"\x30\x3e" + b"k" * 62,
        b"\x30\x82" + b"k" * 30,
        b"\x30" * 300,
    ):
        assert not is_key_pair(key)
        assert SignedTokens([key])


def test_keys_are_not_in_reprs_and_errors() -> None:
    secret = b"a secret key of more than 32 bytes"
    assert "secret key" not in repr(secret_key(secret))
    with pytest.raises(BadRequest) as refused:
        parse_keys(b"short secret")
    assert "short secret" not in str(refused.value)

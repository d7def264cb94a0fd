"""Tokens: valid ones are accepted, and all others are refused."""

import base64
import hmac
import json

import pytest
from bindery_core.auth_token import SHARED_SUBJECT, SharedSecrets, SignedTokens, sign
from bindery_core.errors import BadRequest, Unauthorized
from hypothesis import given
from hypothesis import strategies as st

KEY = b"k" * 32
OTHER = b"o" * 32
NOW = 1_700_000_000.0
SECRET = b"a secret of some length"


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def token(claims: object, *, header: object = None, key: bytes = KEY) -> bytes:
    signed = b64(json.dumps(header or {"alg": "HS256"}).encode()) + b"." + b64(json.dumps(claims).encode())
    return signed + b"." + b64(hmac.new(key, signed, "sha256").digest())


def test_the_example_of_the_standard_is_read() -> None:
    """RFC 7515 appendix A.1, whose claims have no subject: after the valid signature, that is the only error."""
    key = base64.urlsafe_b64decode(
        "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow=="
    )
    text = (
        b"eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9"
        b".eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
        b".dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
    )
    with pytest.raises(Unauthorized, match="no subject"):
        SignedTokens([key]).verify(text, now_s=NOW)


def test_a_signed_token_names_its_bearer_until_it_expires() -> None:
    verifier = SignedTokens([OTHER, KEY])
    text = sign(KEY, subject="broker-1", expires_at_s=int(NOW) + 60)
    assert verifier.verify(text, now_s=NOW) == "broker-1"
    assert verifier.verify(sign(KEY, subject="for ever"), now_s=2 * NOW) == "for ever"
    with pytest.raises(Unauthorized, match="expired"):
        verifier.verify(text, now_s=NOW + 60 + 31)
    assert verifier.verify(text, now_s=NOW + 60 + 29) == "broker-1"


def test_a_token_with_a_flipped_bit_is_refused() -> None:
    text = sign(KEY, subject="x")
    verifier = SignedTokens([KEY])
    for at in range(len(text) - 1):  # the last character of a MAC has unused bits
        for bit in range(8):
            damaged = bytearray(text)
            damaged[at] ^= 1 << bit
            with pytest.raises(Unauthorized):
                verifier.verify(bytes(damaged), now_s=NOW)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"..",
        b"a.b",
        b"a.b.c.d",
        token({"sub": "x"}, key=OTHER),
        token({"sub": "x"}, header={"alg": "none"}),
        token({"sub": "x"}, header={"alg": "HS512"}),
        token({"sub": "x"}, header=["HS256"]),
        token({"sub": ""}),
        token({"sub": 7}),
        token(["sub"]),
        token({"sub": "x", "exp": "tomorrow"}),
        token({"sub": "x", "exp": True}),
        token({"sub": "x", "exp": float("nan")}),
        token({"sub": "x", "exp": float("inf")}),
        token({"sub": "x", "exp": 10**400}),
        token({"sub": "x", "nbf": NOW + 60}),
        b64(b'{"alg":"none"}') + b"." + b64(b'{"sub":"x"}') + b".",
        token({"sub": "x" * 9000}),
    ],
)
def test_an_invalid_token_is_refused(text: bytes) -> None:
    with pytest.raises(Unauthorized):
        SignedTokens([KEY]).verify(text, now_s=NOW)


@given(st.binary(max_size=60))
def test_random_bytes_are_never_a_token(text: bytes) -> None:
    for verifier in (SignedTokens([KEY]), SharedSecrets([SECRET])):
        with pytest.raises(Unauthorized):
            verifier.verify(text, now_s=NOW)


def test_each_of_the_shared_secrets_is_accepted() -> None:
    verifier = SharedSecrets([SECRET, b"the one that follows it"])
    assert verifier.verify(SECRET, now_s=NOW) == verifier.verify(b"the one that follows it", now_s=0) == SHARED_SUBJECT
    for wrong in (b"", SECRET[:-1], SECRET + b"x", SECRET + bytes(9000)):
        with pytest.raises(Unauthorized):
            verifier.verify(wrong, now_s=NOW)


def test_secrets_that_can_be_guessed_are_refused() -> None:
    for secrets in ([], [b"short"], [SECRET, b""]):
        with pytest.raises(BadRequest):
            SharedSecrets(secrets)
    for keys in ([], [b"k" * 31]):
        with pytest.raises(BadRequest):
            SignedTokens(keys)


def test_errors_and_reprs_contain_no_secret() -> None:
    for verifier, text in ((SharedSecrets([SECRET]), b"wrong" * 9), (SignedTokens([KEY]), sign(OTHER, subject="x"))):
        with pytest.raises(Unauthorized) as refused:
            verifier.verify(text, now_s=NOW)
        for told in (str(refused.value), repr(refused.value.facts), repr(verifier)):
            assert text.decode() not in told
            assert SECRET.decode() not in told

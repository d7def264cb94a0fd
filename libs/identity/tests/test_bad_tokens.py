"""A service with several keys refuses each of the bad tokens, for the reason that the table has."""

import base64
import hmac

import pytest
from bad_tokens import BAD_TOKENS, HS, OK, BadToken
from bindery_core.errors import Unauthorized
from bindery_identity.keys import Key, private_key, public_key, secret_key
from bindery_identity.tokens import REMEMBERED_MAX, SignedTokens, sign
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

NOW = 1_700_000_000.0
SECRET = b"k" * 32
PAIRS = {
    "rsa": rsa.generate_private_key(65537, 2048),
    "p-256": ec.generate_private_key(ec.SECP256R1()),
    "p-384": ec.generate_private_key(ec.SECP384R1()),
}


def public(name: str) -> bytes:
    return PAIRS[name].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


SIGNERS = {
    name: private_key(pair.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()))
    for name, pair in PAIRS.items()
}


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def text_of(bad: BadToken) -> bytes:
    if bad.text is not None:
        return bad.text
    signed = b64(bad.header) + b"." + b64(bad.claims)
    if bad.sign_with in SIGNERS:
        signer = SIGNERS[bad.sign_with]
        return signed + b"." + b64(signer.sign(signed, signer.algorithms[0]))
    secret = {"secret": SECRET, "other": b"o" * 32, "public": public("rsa")}[bad.sign_with]
    return signed + b"." + b64(hmac.new(secret, signed, "sha256").digest())


def verifier() -> SignedTokens:
    keys: list[Key | bytes] = [SECRET, public_key(public("rsa")), public_key(public("p-256"))]
    return SignedTokens(keys, issuer="us")


@pytest.mark.parametrize("bad", BAD_TOKENS, ids=[f"{at}-{bad.reason}" for at, bad in enumerate(BAD_TOKENS)])
def test_a_bad_token_is_refused_for_its_reason(bad: BadToken) -> None:
    service = verifier()
    for _ in range(2):  # a refusal is not remembered as something else
        with pytest.raises(Unauthorized) as refused:
            service.verify(text_of(bad), now_s=NOW)
        assert bad.reason in refused.value.message


def test_the_bad_tokens_differ_from_good_ones_only_by_their_reason() -> None:
    for header, signer in ((HS, "secret"), (b'{"alg":"RS256"}', "rsa"), (b'{"alg":"ES256"}', "p-256")):
        assert verifier().verify(text_of(BadToken("", header, OK, signer)), now_s=NOW).subject == "x"
    assert len(BAD_TOKENS) >= 40


def test_a_remembered_token_expires_and_starts_on_time() -> None:
    service = SignedTokens([SECRET])
    text = sign(SECRET, subject="x", expires_at_s=int(NOW) + 60)
    assert service.verify(text, now_s=NOW).expires_at_s == NOW + 90
    assert service.verify(text, now_s=NOW + 89).subject == "x"
    with pytest.raises(Unauthorized, match="expired"):
        service.verify(text, now_s=NOW + 90)
    later = text_of(BadToken("", HS, b'{"sub":"x","nbf":1700000100}'))
    assert service.verify(later, now_s=NOW + 100).subject == "x"
    with pytest.raises(Unauthorized, match="not valid yet"):  # the clock was set back
        service.verify(later, now_s=NOW)


def test_the_number_of_remembered_tokens_is_bounded() -> None:
    service = SignedTokens([SECRET])
    key = secret_key(SECRET)
    for number in range(REMEMBERED_MAX + 10):
        service.verify(sign(key, subject=f"x{number}"), now_s=NOW)
    assert len(service._remembered) == REMEMBERED_MAX


def test_the_claims_of_role_and_audience_may_have_other_names() -> None:
    """Pulsar's tokenAuthClaim and tokenAudienceClaim."""
    service = SignedTokens([SECRET], role_claim="roles", audience="here", audience_claim="for")

    def verify(claims: bytes) -> str:
        return service.verify(text_of(BadToken("", HS, claims)), now_s=NOW).subject

    assert verify(b'{"sub":"x","roles":"admin","for":"here","aud":"others"}') == "admin"
    assert verify(b'{"roles":["first","second"],"for":["there","here"]}') == "first"
    for claims in (b'{"sub":"x","for":"here"}', b'{"roles":[],"for":"here"}', b'{"roles":[7],"for":"here"}'):
        with pytest.raises(Unauthorized, match="no subject"):
            verify(claims)
    with pytest.raises(Unauthorized, match="no audience"):
        verify(b'{"roles":"admin","aud":"here"}')

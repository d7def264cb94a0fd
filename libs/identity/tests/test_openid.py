"""Tokens of OpenID Connect: which issuer's key verifies them, and what they must contain."""

import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.authenticator import Authenticator
from bindery_identity.jwks import parse_jwks
from bindery_identity.openid import IssuerKeys, OpenIdTokens, key_set_file, parse_issuers
from bindery_identity.principal import Method
from bindery_identity.tokens import CLOCK_SKEW_S, SignedTokens, sign
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

NOW = 1_700_000_000.0
URL, OTHER_URL = "https://issuer.example/realm", "https://other.example"
PAIRS = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("a", "b", "other")}
OWN_KEY = b"k" * 32
MAX_AGE_S = 100.0


def key_set(*names: str, **more: str) -> bytes:
    keys = [{**ECAlgorithm.to_jwk(PAIRS[name].public_key(), as_dict=True), "kid": name, **more} for name in names]
    return json.dumps({"keys": keys}).encode()


def token(signer: str = "a", *, kid: str | None = "a", **claims: Any) -> bytes:
    """Return a token; a claim that is None is left out."""
    given = {"iss": URL, "sub": "alice", "aud": "bindery", "exp": int(NOW) + 60, **claims}
    headers = None if kid is None else {"kid": kid}
    present = {name: value for name, value in given.items() if value is not None}
    return signed(present, PAIRS[signer], "ES256", headers)


def signed(claims: Any, key: Any, algorithm: str, headers: dict[str, str] | None = None) -> bytes:
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key, algorithm, headers).encode()


def issuer(url: str = URL, *names: str, **options: Any) -> IssuerKeys:
    keys = IssuerKeys(url, audiences=["bindery", "pulsar"], max_age_s=MAX_AGE_S, **options)
    if names:
        keys.replace(parse_jwks(key_set(*names)), now_s=NOW)
    return keys


@pytest.fixture
def tokens() -> OpenIdTokens:
    return OpenIdTokens([issuer(URL, "a"), issuer(OTHER_URL, "other")], others=SignedTokens([OWN_KEY]))


def test_a_token_is_verified_with_the_keys_of_its_issuer(tokens: OpenIdTokens) -> None:
    bearer = tokens.verify(token(), now_s=NOW)
    assert bearer == ("alice", NOW + 60 + CLOCK_SKEW_S, Method.OIDC)
    assert tokens.verify(token(kid=None, aud=["x", "pulsar"]), now_s=NOW).subject == "alice"
    assert tokens.verify(token("other", kid="other", iss=OTHER_URL), now_s=NOW).subject == "alice"
    own = tokens.verify(sign(OWN_KEY, subject="broker"), now_s=NOW)
    assert (own.subject, own.method) == ("broker", Method.TOKEN)
    authenticator = Authenticator(now_s=lambda: NOW, tokens=tokens)
    assert authenticator.by_method("token", token()).method is Method.OIDC


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (token("other"), "wrong signature"),
        (token("other", kid="other"), "no key of this name"),
        (token("a", kid="a", iss=OTHER_URL), "no key of this name"),
        (token("a", kid=None, iss=OTHER_URL), "wrong signature"),
        (token(iss=URL + "/"), "no key is configured"),
        (token(iss=None), "no key is configured"),
        (token(aud="else"), "another audience"),
        (token(aud=None), "no audience"),
        (token(exp=None), "no time of expiry"),
        (token(exp=int(NOW - CLOCK_SKEW_S)), "expired"),
        (token(nbf=int(NOW + CLOCK_SKEW_S + 1)), "not valid yet"),
        (token(sub=None), "no subject"),
        (token(sub="a\nb"), "not printable"),
        (signed({"iss": URL, "sub": "x", "aud": "bindery", "exp": NOW + 9}, OWN_KEY, "HS256"), "an algorithm"),
        (b"a.b", "not a signed token"),
    ],
)
def test_other_tokens_are_refused(tokens: OpenIdTokens, bad: bytes, reason: str) -> None:
    with pytest.raises(Unauthorized, match=reason):
        tokens.verify(bad, now_s=NOW)


def test_a_token_of_another_issuer_is_refused_without_other_keys() -> None:
    tokens = OpenIdTokens([issuer(URL, "a")])
    for bad in (token(iss=OTHER_URL), token(iss=7), token(iss=[URL])):
        with pytest.raises(Unauthorized, match="issuer that is not configured"):
            tokens.verify(bad, now_s=NOW)


@pytest.mark.parametrize(("roles", "role"), [("ops", "ops"), (["ops", "dev"], "ops")])
def test_the_role_is_the_configured_claim(roles: Any, role: str) -> None:
    tokens = OpenIdTokens([issuer(URL, "a", role_claim="roles")])
    assert tokens.verify(token(roles=roles), now_s=NOW).subject == role
    for bad in (token(), token(roles=[]), token(roles={"x": 1}), token(roles=[7])):
        with pytest.raises(Unauthorized, match="no subject"):
            tokens.verify(bad, now_s=NOW)


def test_without_keys_and_with_old_ones_all_tokens_are_refused() -> None:
    keys = issuer()
    tokens = OpenIdTokens([keys])
    with pytest.raises(Unauthorized, match="have not been read, or are too old"):
        tokens.verify(token(), now_s=NOW)
    keys.replace(parse_jwks(key_set("a")), now_s=NOW)
    long_lived = token(exp=int(NOW + 9_999))
    assert tokens.verify(long_lived, now_s=NOW + MAX_AGE_S - 1).subject == "alice"
    with pytest.raises(Unauthorized, match="too old"):
        tokens.verify(long_lived, now_s=NOW + MAX_AGE_S)
    keys.replace(parse_jwks(key_set("a")), now_s=NOW + MAX_AGE_S)
    assert tokens.verify(long_lived, now_s=NOW + MAX_AGE_S).subject == "alice"


def test_new_keys_replace_the_old_ones_and_an_unknown_one_is_reported() -> None:
    keys, unknown = issuer(URL, "a"), []
    keys.on_unknown_key = lambda: unknown.append(1)
    tokens = OpenIdTokens([keys])
    assert tokens.verify(token(), now_s=NOW).subject == "alice"
    with pytest.raises(Unauthorized, match="no key of this name"):
        tokens.verify(token("b", kid="b"), now_s=NOW)
    assert unknown == [1]
    keys.replace(parse_jwks(key_set("b")), now_s=NOW)
    assert tokens.verify(token("b", kid="b"), now_s=NOW).subject == "alice"
    with pytest.raises(Unauthorized):
        tokens.verify(token(), now_s=NOW)  # remembered by the former verifier only
    assert keys.count == 1


def test_the_same_keys_again_keep_the_verified_tokens() -> None:
    keys = issuer(URL, "a")
    verifier = keys._verifier
    keys.replace(parse_jwks(key_set("a")), now_s=NOW + 1)
    assert keys._verifier is verifier
    keys.replace(parse_jwks(key_set("a", alg="ES256")), now_s=NOW + 1)
    assert keys._verifier is verifier
    keys.replace(parse_jwks(key_set("b")), now_s=NOW + 1)
    assert keys._verifier is not verifier


def test_a_file_of_keys_is_followed_and_never_too_old(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(key_set("a"))
    file = key_set_file(str(path))
    tokens = OpenIdTokens([issuer(URL, file=file)])
    later_s = NOW + 50 * MAX_AGE_S
    assert tokens.verify(token(exp=int(later_s) + 60), now_s=later_s).subject == "alice"
    path.write_bytes(key_set("b", "other"))
    assert file.poll()
    assert tokens.verify(token("b", kid="b"), now_s=NOW).subject == "alice"
    with pytest.raises(Unauthorized):
        tokens.verify(token(), now_s=NOW)
    path.write_bytes(b"{}")
    assert not file.poll()
    assert tokens.verify(token("b", kid="b"), now_s=NOW).subject == "alice"
    with pytest.raises(BadRequest, match="no list `keys`"):
        key_set_file(str(path))


def test_issuers_are_https_urls_or_files() -> None:
    assert parse_issuers("") == []
    assert parse_issuers(f" {URL}, {OTHER_URL}=/etc/keys=1.json,") == [(URL, ""), (OTHER_URL, "/etc/keys=1.json")]
    for bad in (
        "http://issuer.example",
        "HTTPS://issuer.example",
        "issuer.example",
        "/etc/jwks.json",
        "https://",
        "https://a.example?x",
        "https://a.example#x",
        "https://user:secret@a.example",
        "https://a.example:x",
        "https://a.example/\u202e",
        "https://a b",
        f"{URL}=",
        "https://" + "a" * 1024,
    ):
        with pytest.raises(BadRequest, match="must be https://HOST"):
            parse_issuers(bad)
    with pytest.raises(BadRequest, match="listed twice"):
        parse_issuers(f"{URL},{URL}=/x")
    with pytest.raises(BadRequest, match="too many"):
        parse_issuers(",".join(f"https://i{n}.example" for n in range(17)))

"""Tokens: valid ones are accepted, and all others are refused."""

import base64
import hmac
import json

import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.keys import parse_keys, secret_key
from bindery_identity.tokens import (
    SHARED_SUBJECT,
    SUBJECT_SIZE_MAX,
    TOKEN_SIZE_MAX,
    SharedSecrets,
    SignedTokens,
    is_subject,
    sign,
)
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = b"k" * 32
OTHER = b"o" * 32
NOW = 1_700_000_000.0
SECRET = b"a secret of some length"


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def raw_token(claims: bytes, *, header: bytes = b'{"alg":"HS256"}', key: bytes = KEY) -> bytes:
    """A token with a right signature over any bytes."""
    return signed_with(b64(header) + b"." + b64(claims), key=key)


def signed_with(signed: bytes, *, key: bytes = KEY, hash_name: str = "sha256") -> bytes:
    return signed + b"." + b64(hmac.new(key, signed, hash_name).digest())


def token(claims: object, *, header: object = None, key: bytes = KEY) -> bytes:
    return raw_token(json.dumps(claims).encode(), header=json.dumps(header or {"alg": "HS256"}).encode(), key=key)


def refusal(text: bytes, *, audience: str | None = None) -> str:
    with pytest.raises(Unauthorized) as refused:
        SignedTokens([KEY], audience=audience).verify(text, now_s=NOW)
    return str(refused.value.args[0])


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
    assert verifier.verify(text, now_s=NOW).subject == "broker-1"
    assert verifier.verify(sign(KEY, subject="for ever"), now_s=2 * NOW).subject == "for ever"
    for late_s in (30, 31):
        with pytest.raises(Unauthorized, match="expired"):
            verifier.verify(text, now_s=NOW + 60 + late_s)
    assert verifier.verify(text, now_s=NOW + 60 + 29).subject == "broker-1"


def test_a_token_with_a_flipped_bit_is_refused() -> None:
    text = sign(KEY, subject="x")
    verifier = SignedTokens([KEY])
    for at in range(len(text)):
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


@pytest.mark.parametrize("value", [["exp"], [], "exp", None, ["b64"], 0])
def test_a_header_with_critical_extensions_is_refused_whatever_they_are(value: object) -> None:
    text = token({"sub": "x"}, header={"alg": "HS256", "crit": value, "exp": 1, "b64": True})
    assert "crit" in refusal(text)


@pytest.mark.parametrize(
    "alg",
    [None, "", "none", "None", "NONE", "hs256", "Hs256", "HS256 ", " HS256", "HS384", "HS512", "RS256", "ES256",
     "PS256", ["HS256"], {"HS256": 1}, 256, True],
)  # fmt: skip
def test_a_secret_of_32_bytes_is_only_for_hs256(alg: object) -> None:
    assert "for which no key" in refusal(token({"sub": "x"}, header={"alg": alg}))
    assert "for which no key" in refusal(token({"sub": "x"}, header={"typ": "JWT"}))


@pytest.mark.parametrize("hash_name", ["sha1", "sha384", "sha512"])
def test_the_signature_of_another_algorithm_is_refused_under_any_name(hash_name: str) -> None:
    for alg, told in (("HS256", "wrong signature"), (hash_name.replace("sha", "HS"), "for which no key")):
        signed = b64(b'{"alg":"' + alg.encode() + b'"}') + b"." + b64(b'{"sub":"x"}')
        assert told in refusal(signed_with(signed, hash_name=hash_name))


def test_a_token_without_a_signature_is_refused_under_any_name() -> None:
    for alg, told in ((b"none", "for which no key"), (b"HS256", "wrong signature")):
        assert told in refusal(b64(b'{"alg":"' + alg + b'"}') + b"." + b64(b'{"sub":"x"}') + b".")


def test_unknown_header_parameters_are_ignored() -> None:
    header = {"alg": "HS256", "typ": "JWT", "kid": "../../etc/passwd", "jku": "http://evil.example/", "x": 1}
    assert SignedTokens([KEY]).verify(token({"sub": "x"}, header=header), now_s=NOW).subject == "x"


@pytest.mark.parametrize(
    ("claims", "header"),
    [
        (b'{"sub":"x","sub":"admin"}', b'{"alg":"HS256"}'),
        (b'{"sub":"x","\\u0073ub":"admin"}', b'{"alg":"HS256"}'),
        (b'{"sub":"x","exp":1,"exp":9999999999}', b'{"alg":"HS256"}'),
        (b'{"sub":"x","other":{"a":1,"a":2}}', b'{"alg":"HS256"}'),
        (b'{"sub":"x"}', b'{"alg":"HS256","alg":"HS256"}'),
        (b'{"sub":"x"}', b'{"alg":"none","alg":"HS256"}'),
    ],
    ids=["sub", "escaped sub", "exp", "nested", "alg", "alg none"],
)
def test_a_member_that_occurs_twice_is_refused(claims: bytes, header: bytes) -> None:
    assert refusal(raw_token(claims, header=header), audience=None) == "token contains a member twice"


@pytest.mark.parametrize(
    "claims",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b'{"sub":"x"} {}',
        b'{"sub":"x",}',
        b"{'sub':'x'}",
        b'{"sub":"x","exp":NaN}',
        b'{"sub":"x","other":NaN}',
        b'{"sub":"x","exp":Infinity}',
        b'{"sub":"x","exp":-Infinity}',
        b'\xef\xbb\xbf{"sub":"x"}',
        b'{"sub":"\xff"}',
        b'{"sub":"\xed\xa0\x80"}',
        '{"sub":"x"}'.encode("utf-16"),
        '{"sub":"x"}'.encode("utf-16-le"),
        '{"sub":"x"}'.encode("utf-32-be"),
        b'{"sub":"x","other":' + b"[" * 3000,
        b'{"sub":"x","other":' + b"9" * 5000 + b"}",
    ],
    ids=lambda one: ascii(one[:30]),
)
def test_what_is_not_json_in_utf_8_is_refused_although_the_signature_is_right(claims: bytes) -> None:
    assert refusal(raw_token(claims)) == "not a signed token"


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize(
    "value", ["1", "", None, True, False, [], [1], {}, float("inf"), float("nan"), 10**400], ids=ascii
)
def test_a_time_that_is_not_a_finite_number_is_refused(name: str, value: object) -> None:
    assert refusal(token({"sub": "x", name: value})) in ("token contains an invalid time", "not a signed token")


def test_a_time_too_large_for_a_float_is_refused() -> None:
    assert refusal(raw_token(b'{"sub":"x","exp":1e999}')) == "token contains an invalid time"


@pytest.mark.parametrize("position", ["middle", "first", "last"])
@pytest.mark.parametrize(
    "char",
    [*(chr(code) for code in range(0x20)), *(chr(code) for code in range(0x7F, 0xA0)),
     "\u2028", "\u2029", "\u200e", "\u200f", "\u061c", "\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066",
     "\u2067", "\u2068", "\u2069", "\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u00a0", "\u3000", "\ue000",
     "\ufffe", "\U000e0041", "\U000e0001", "\ud800"],
    ids=ascii,
)  # fmt: skip
def test_a_subject_that_could_forge_a_log_line_is_refused(char: str, position: str) -> None:
    subject = {"middle": f"a{char}b", "first": f"{char}b", "last": f"a{char}"}[position]
    assert not is_subject(subject)
    for escape in (True, False):
        if escape or not "\ud800" <= char <= "\udfff":
            told = refusal(raw_token(json.dumps({"sub": subject}, ensure_ascii=escape).encode()))
            assert "the subject of the token" in told
            assert char not in told.replace(" ", "")


def test_subjects_of_other_scripts_and_with_spaces_are_accepted() -> None:
    for subject in (
        "x",
        "broker 7",
        "tenant/admin@example.org",
        "J\u00fcrgen",
        "\u4e2d\u6587",
        "\U0001f600",
        "a" * SUBJECT_SIZE_MAX,
    ):
        assert SignedTokens([KEY]).verify(sign(KEY, subject=subject), now_s=NOW).subject == subject
    assert "256 characters" in refusal(token({"sub": "a" * (SUBJECT_SIZE_MAX + 1)}))


@pytest.mark.parametrize("subject", [None, "", 7, 1.5, True, ["x"], {"x": 1}])
def test_a_subject_of_another_type_is_refused(subject: object) -> None:
    assert refusal(token({"sub": subject})) == "token has no subject"
    assert refusal(token({"iss": "x"})) == "token has no subject"


@pytest.mark.parametrize("found", ["bookies", ["bookies"], ["others", "bookies"]])
def test_a_token_for_this_audience_is_accepted(found: str | list[str]) -> None:
    verifier = SignedTokens([KEY], audience="bookies")
    assert verifier.verify(token({"sub": "x", "aud": found}), now_s=NOW).subject == "x"
    assert verifier.verify(sign(KEY, subject="x", audience=found), now_s=NOW).subject == "x"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("others", "token is for another audience"),
        ("", "token is for another audience"),
        ("Bookies", "token is for another audience"),
        ("bookies ", "token is for another audience"),
        ("bookies,others", "token is for another audience"),
        ("xbookies", "token is for another audience"),
        ([], "token is for another audience"),
        (["others", ""], "token is for another audience"),
        ([["bookies"]], "token contains an invalid audience"),
        (["bookies", 7], "token contains an invalid audience"),
        (None, "token contains an invalid audience"),
        (7, "token contains an invalid audience"),
        (True, "token contains an invalid audience"),
        ({"bookies": 1}, "token contains an invalid audience"),
    ],
    ids=str,
)
def test_a_token_for_another_audience_is_refused(found: object, told: str) -> None:
    assert refusal(token({"sub": "x", "aud": found}), audience="bookies") == told
    assert "audience" in refusal(token({"sub": "x", "aud": found}))


def test_a_token_without_an_audience_is_refused_where_one_is_configured() -> None:
    """As Pulsar with tokenAudienceClaim."""
    assert "has no audience" in refusal(sign(KEY, subject="x"), audience="bookies")


def test_a_token_with_an_audience_is_refused_where_none_is_configured() -> None:
    """RFC 7519 section 4.1.3: it was issued for another service."""
    assert "has none configured" in refusal(sign(KEY, subject="x", audience="bookies"))


def test_base64_that_is_not_canonical_is_refused() -> None:
    """The signature covers the text, so that only the one of a MAC can be changed by others than the signer."""
    text = sign(KEY, subject="x")
    signed, _, mac = text.rpartition(b".")
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for other in (
        mac[:-1] + alphabet[alphabet.index(mac[-1:]) + 1 :][:1],
        mac + b"=",
        mac + b"==",
        mac + b"\n",
        b" " + mac,
    ):
        assert refusal(signed + b"." + other) in ("not a signed token", "token has a wrong signature")
    header, _, claims = signed.partition(b".")
    for changed in (header + b"=." + claims, header + b"." + claims + b"=", header + b"\n." + claims):
        assert refusal(signed_with(changed)) == "not a signed token"
    both = next(text for number in range(99) if b"-" in (text := sign(KEY, subject=f"x{number}")).rpartition(b".")[2])
    assert refusal(both.replace(b"-", b"+")) in ("not a signed token", "token has a wrong signature")


def test_a_token_of_the_maximum_size_is_read_and_a_longer_one_is_not() -> None:
    def padded(size: int) -> bytes:
        return raw_token(b'{"sub":"x","pad":"' + b"p" * size + b'"}')

    size = next(size for size in range(6200, 4000, -1) if len(padded(size)) <= TOKEN_SIZE_MAX)
    assert SignedTokens([KEY]).verify(padded(size), now_s=NOW).subject == "x"
    assert refusal(padded(size + 3)) == "not a signed token"
    assert refusal(b"." * 100_000) == "not a signed token"


def test_a_key_of_pulsar_is_read_from_its_base64() -> None:
    """`pulsar tokens create-secret-key --base64` prints base64; settings have it with the prefix `data:;base64,`."""
    key = bytes(range(32))
    encoded = base64.b64encode(key)
    text = token({"sub": "x"}, key=key)
    for file in (b"data:;base64," + encoded, b"data:text/plain;base64," + encoded + b"\n", b"  " + encoded + b"\r\n"):
        assert SignedTokens(parse_keys(file)).verify(text, now_s=NOW).subject == "x"
    assert SignedTokens(parse_keys(encoded)).verify(token({"sub": "x"}, key=encoded), now_s=NOW).subject == "x", (
        "as before"
    )
    assert parse_keys(b"data:;base64," + encoded) == [secret_key(key)], "the text itself is no key"


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_never_a_token(text: bytes) -> None:
    for verifier in (SignedTokens([KEY]), SharedSecrets([SECRET])):
        with pytest.raises(Unauthorized):
            verifier.verify(text, now_s=NOW)


def test_each_of_the_shared_secrets_is_accepted() -> None:
    verifier = SharedSecrets([SECRET, b"the one that follows it"])
    assert verifier.verify(SECRET, now_s=NOW) == verifier.verify(b"the one that follows it", now_s=0)
    assert verifier.verify(SECRET, now_s=NOW).subject == SHARED_SUBJECT
    long = b"s" * TOKEN_SIZE_MAX
    assert SharedSecrets([long]).verify(long, now_s=0).subject == SHARED_SUBJECT
    with pytest.raises(Unauthorized):
        SharedSecrets([long]).verify(long + b"s", now_s=0)
    for wrong in (b"", SECRET[:-1], SECRET + b"x", SECRET + bytes(9000)):
        with pytest.raises(Unauthorized):
            verifier.verify(wrong, now_s=NOW)


def test_secrets_that_can_be_guessed_are_refused() -> None:
    for secrets in ([], [b"short"], [SECRET, b""], [SECRET, b"s" * (TOKEN_SIZE_MAX + 1)]):
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

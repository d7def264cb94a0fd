"""Tokens that must be refused although they are close to valid ones, each with the reason.

Every token but those with a signature of their own is signed correctly: HEADER . CLAIMS under the key that KEYS has for
its algorithm. `None` as the signature stands for that one.
"""

from typing import Final, NamedTuple


class BadToken(NamedTuple):
    reason: str
    """Why it is refused, as the error says."""
    header: bytes
    claims: bytes
    sign_with: str = "secret"
    """Which key signs it: secret, rsa, p-256, p-384, public (the bytes of the RSA public key as a secret), other."""
    text: bytes | None = None
    """The whole token, if it is not of this form."""


ALG: Final = "for which no key is configured"
SIGNATURE: Final = "wrong signature"
FORM: Final = "not a signed token"
TWICE: Final = "contains a member twice"
SUBJECT: Final = "the subject of the token"
NOBODY: Final = "has no subject"
TIME: Final = "invalid time"
AUDIENCE: Final = "audience"

HS: Final = b'{"alg":"HS256"}'
OK: Final = b'{"sub":"x","iss":"us"}'

BAD_TOKENS: Final = [
    BadToken(ALG, b'{"alg":"none"}', OK),
    BadToken(ALG, b'{"alg":"None"}', OK),
    BadToken(ALG, b'{"alg":""}', OK),
    BadToken(ALG, b'{"typ":"JWT"}', OK),
    BadToken(ALG, b'{"alg":null}', OK),
    BadToken(ALG, b'{"alg":["HS256"]}', OK),
    BadToken(ALG, b'{"alg":"hs256"}', OK),
    BadToken(ALG, b'{"alg":"HS384"}', OK),
    BadToken(ALG, b'{"alg":"HS512"}', OK),
    BadToken(ALG, b'{"alg":"EdDSA"}', OK),
    BadToken(ALG, b'{"alg":"ES384"}', OK, "p-384"),
    BadToken(SIGNATURE, HS, OK, "public"),
    BadToken(SIGNATURE, HS, OK, "other"),
    BadToken(SIGNATURE, b'{"alg":"RS256"}', OK, "secret"),
    BadToken(SIGNATURE, b'{"alg":"PS256"}', OK, "rsa"),
    BadToken(SIGNATURE, b'{"alg":"ES256"}', OK, "secret"),
    BadToken(SIGNATURE, b'{"alg":"HS256","kid":"rsa"}', OK, "rsa"),
    BadToken("crit", b'{"alg":"HS256","crit":["exp"],"exp":1}', OK),
    BadToken("crit", b'{"alg":"HS256","crit":[]}', OK),
    BadToken("crit", b'{"alg":"HS256","crit":null}', OK),
    BadToken("crit", b'{"alg":"HS256","b64":false,"crit":["b64"]}', OK),
    BadToken(TWICE, b'{"alg":"none","alg":"HS256"}', OK),
    BadToken(TWICE, HS, b'{"sub":"x","sub":"admin"}'),
    BadToken(TWICE, HS, b'{"sub":"x","\\u0073ub":"admin"}'),
    BadToken(TWICE, HS, b'{"sub":"x","exp":1,"exp":9999999999}'),
    BadToken(FORM, HS, b""),
    BadToken(FORM, HS, b"[]"),
    BadToken(FORM, HS, b"null"),
    BadToken(FORM, b"[]", OK),
    BadToken(FORM, HS, b'{"sub":"x"} {}'),
    BadToken(FORM, HS, b'{"sub":"x","exp":NaN}'),
    BadToken(FORM, HS, b'{"sub":"x","other":Infinity}'),
    BadToken(FORM, HS, b'\xef\xbb\xbf{"sub":"x"}'),
    BadToken(FORM, HS, b'{"sub":"\xff"}'),
    BadToken(FORM, HS, b'{"sub":"x","o":' + b"[" * 3000),
    BadToken(NOBODY, HS, b'{"iss":"us"}'),
    BadToken(NOBODY, HS, b'{"sub":""}'),
    BadToken(NOBODY, HS, b'{"sub":7}'),
    BadToken(NOBODY, HS, b'{"sub":["x"]}'),
    BadToken(SUBJECT, HS, b'{"sub":"a\\nb"}'),
    BadToken(SUBJECT, HS, b'{"sub":"a\\u2028b"}'),
    BadToken(SUBJECT, HS, b'{"sub":"a\\u202eb"}'),
    BadToken(SUBJECT, HS, b'{"sub":"\\ud800"}'),
    BadToken(SUBJECT, HS, b'{"sub":"' + b"a" * 257 + b'"}'),
    BadToken(AUDIENCE, HS, b'{"sub":"x","iss":"us","aud":"others"}'),
    BadToken(AUDIENCE, HS, b'{"sub":"x","iss":"us","aud":[]}'),
    BadToken(AUDIENCE, HS, b'{"sub":"x","iss":"us","aud":7}'),
    BadToken("another issuer", HS, b'{"sub":"x"}'),
    BadToken("another issuer", HS, b'{"sub":"x","iss":"them"}'),
    BadToken("another issuer", HS, b'{"sub":"x","iss":["us"]}'),
    BadToken("has expired", HS, b'{"sub":"x","iss":"us","exp":1699999970}'),
    BadToken("has expired", HS, b'{"sub":"x","iss":"us","exp":0}'),
    BadToken("has expired", HS, b'{"sub":"x","iss":"us","exp":-1e300}'),
    BadToken("not valid yet", HS, b'{"sub":"x","iss":"us","nbf":1700000031}'),
    BadToken(TIME, HS, b'{"sub":"x","iss":"us","exp":"9999999999"}'),
    BadToken(TIME, HS, b'{"sub":"x","iss":"us","exp":true}'),
    BadToken(TIME, HS, b'{"sub":"x","iss":"us","exp":1e999}'),
    BadToken(TIME, HS, b'{"sub":"x","iss":"us","nbf":null}'),
    BadToken(TIME, HS, b'{"sub":"x","iss":"us","iat":{}}'),
    BadToken(FORM, b"", b"", text=b""),
    BadToken(FORM, b"", b"", text=b".."),
    BadToken(FORM, b"", b"", text=b"a.b"),
    BadToken(FORM, b"", b"", text=b"e30.e30.e30.e30.e30"),
    BadToken(SIGNATURE, b"", b"", text=b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0=.AAAA"),
    BadToken(FORM, b"", b"", text=b"eyJhbGciOiJIUzI1NiJ9 .eyJzdWIiOiJ4In0.AAAA"),
    BadToken(FORM, b"", b"", text=b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.AAAB="),
    BadToken(FORM, b"", b"", text=b"x" * 8193),
    BadToken(SIGNATURE, b"", b"", text=b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0."),
    BadToken(ALG, b"", b"", text=b"eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0."),
]

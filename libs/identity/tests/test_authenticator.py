import base64

import pytest
from bindery_core.errors import Forbidden, Unauthorized
from bindery_identity.authenticator import Authenticator, CertificateRole
from bindery_identity.basic import Passwords
from bindery_identity.principal import Method, Principal
from bindery_identity.tls import PeerCertificate
from bindery_identity.tokens import CLOCK_SKEW_S, SignedTokens, sign

KEY = b"k" * 32
NOW = 1_700_000_000.0
TOKEN = sign(KEY, subject="alice", expires_at_s=int(NOW) + 60)
PASSWORDS = Passwords(b"bob:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0")
BASIC = base64.b64encode(b"bob:secret pass")


def authenticator(**options: object) -> Authenticator:
    return Authenticator(now_s=lambda: NOW, tokens=SignedTokens([KEY]), passwords=PASSWORDS, **options)  # type: ignore[arg-type]


def test_a_token_has_the_same_principal_in_both_protocols() -> None:
    expected = Principal(role="alice", method=Method.TOKEN, expires_at_s=int(NOW) + 60 + CLOCK_SKEW_S)
    known = authenticator()
    assert known.by_headers([(b"host", b"h"), (b"authorization", b"Bearer " + TOKEN)]) == expected
    assert known.by_headers([(b"authorization", b"bearer  " + TOKEN + b" ")]) == expected
    assert known.by_method("token", TOKEN) == expected


def test_a_password_has_the_same_principal_in_both_protocols() -> None:
    expected = Principal(role="bob", method=Method.BASIC)
    assert authenticator().by_headers([(b"authorization", b"Basic " + BASIC)]) == expected
    assert authenticator().by_method("basic", b"bob:secret pass") == expected


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"Bearer", "not a signed token"),
        (b"Bearer " + TOKEN[:-1], "not a signed token"),
        (b"Bearer " + b"x" * 9000, "not a signed token"),
        (b"Basic !", "not base64"),
        (b"Basic " + base64.b64encode(b"bob"), "not name:password"),
        (b"Basic " + base64.b64encode(b"bob:wrong"), "wrong name or password"),
        (b"Basic " + base64.b64encode(b"\xff:secret pass"), "wrong name or password"),
        (b"Basic " + b"A" * 100_000, "wrong name or password"),
        (b"Digest x", "neither Bearer nor Basic"),
        (b"", "neither Bearer nor Basic"),
        (TOKEN, "neither Bearer nor Basic"),
    ],
)
def test_wrong_credentials_are_refused_even_if_anonymous_clients_are_allowed(header: bytes, told: str) -> None:
    for options in ({}, {"anonymous_role": "anonymous"}):
        with pytest.raises(Unauthorized, match=told) as refused:
            authenticator(**options).by_headers([(b"authorization", header)])
        assert TOKEN[:-1].decode() not in str(refused.value)


def test_two_headers_are_refused() -> None:
    header = (b"authorization", b"Bearer " + TOKEN)
    with pytest.raises(Unauthorized, match="one header"):
        authenticator().by_headers([header, header])


def test_methods_that_are_not_configured_are_refused() -> None:
    nothing = Authenticator(now_s=lambda: NOW, certificate_role=CertificateRole.COMMON_NAME)
    for method, data in (("token", TOKEN), ("basic", b"bob:secret pass"), ("sasl", b""), ("tls", b""), ("", b"")):
        with pytest.raises(Unauthorized):
            nothing.by_method(method, data)
    assert nothing.challenges == []
    assert [one.split()[0] for one in authenticator().challenges] == ["Bearer", "Basic"]


def test_without_credentials_a_client_is_refused_or_anonymous() -> None:
    with pytest.raises(Unauthorized, match="send Authorization: Bearer"):
        authenticator().by_headers([])
    assert authenticator(anonymous_role="nobody").by_headers([]) == Principal(role="nobody", method=Method.NONE)


CERTIFICATE = PeerCertificate(common_name="cn", dns_names=("d.example",), uris=("spiffe://x/y",), expires_at_s=NOW + 5)


@pytest.mark.parametrize(
    ("rule", "role"),
    [
        (CertificateRole.COMMON_NAME, "cn"),
        (CertificateRole.DNS, "d.example"),
        (CertificateRole.URI, "spiffe://x/y"),
    ],
)
def test_the_rule_chooses_the_name_of_a_certificate(rule: CertificateRole, role: str) -> None:
    known = authenticator(certificate_role=rule, anonymous_role="nobody")
    expected = Principal(role=role, method=Method.CERTIFICATE, expires_at_s=NOW + 5)
    assert known.by_headers([], CERTIFICATE) == known.by_method("tls", b"", CERTIFICATE) == expected
    assert known.by_headers([(b"authorization", b"Bearer " + TOKEN)], CERTIFICATE).role == "alice"
    assert known.by_headers([], None).role == "nobody"
    for several in (
        PeerCertificate(),
        PeerCertificate(dns_names=("a", "b"), uris=("a", "b")),
        PeerCertificate(common_name="a\nb", dns_names=("\u202e",), uris=("",)),
    ):
        with pytest.raises(Unauthorized, match="exactly one printable name"):
            known.by_headers([], several)


def test_a_certificate_that_expires_while_its_connection_is_open_is_refused() -> None:
    now_s = [NOW]
    known = Authenticator(now_s=lambda: now_s[0], certificate_role=CertificateRole.COMMON_NAME, anonymous_role="nobody")
    assert known.by_headers([], CERTIFICATE).role == "cn"
    now_s[0] = NOW + 5
    for refused in (lambda: known.by_headers([], CERTIFICATE), lambda: known.by_method("tls", b"", CERTIFICATE)):
        with pytest.raises(Unauthorized, match="the client certificate has expired"):
            refused()
    unlimited = PeerCertificate(common_name="cn")
    assert known.by_headers([], unlimited).role == "cn"


def test_without_a_rule_a_certificate_is_no_credential() -> None:
    with pytest.raises(Unauthorized):
        authenticator().by_headers([], CERTIFICATE)


ALICE = Principal(role="alice", method=Method.TOKEN)
PROXY = Principal(role="proxy", method=Method.TOKEN)


def test_a_proxy_names_the_client_and_others_must_not() -> None:
    known = authenticator(proxy_roles=["proxy", "broker"])
    assert known.on_behalf_of(ALICE, None) == ALICE
    assert known.on_behalf_of(PROXY, "alice") == Principal(role="proxy", method=Method.TOKEN, original_role="alice")
    assert known.on_behalf_of(PROXY, "proxy") == PROXY
    with pytest.raises(Forbidden, match="must name the client"):
        known.on_behalf_of(PROXY, None)
    with pytest.raises(Forbidden, match="on behalf of another proxy"):
        known.on_behalf_of(PROXY, "broker")
    with pytest.raises(Forbidden, match="on behalf of another proxy"):
        authenticator(proxy_roles=["proxy", "broker"], own_role=lambda: "broker").on_behalf_of(PROXY, "broker")
    for named in ("admin", "alice", "proxy"):
        with pytest.raises(Forbidden, match="only the role of a proxy"):
            known.on_behalf_of(ALICE, named)
    for named in ("", "a\nb", "x" * 300):
        with pytest.raises(Unauthorized, match="not a role"):
            known.on_behalf_of(PROXY, named)


def test_only_a_password_that_is_not_remembered_is_slow() -> None:
    known = Authenticator(
        now_s=lambda: NOW,
        tokens=SignedTokens([KEY]),
        passwords=Passwords(b"bob:$apr1$abcdefgh$ZAdX7G.l3eDbgTYbm5ePE0"),
        anonymous_role="nobody",
    )
    right = [(b"authorization", b"Basic " + BASIC)]
    assert known.is_slow(right)
    known.by_headers(right)
    assert not known.is_slow(right)
    assert known.is_slow([(b"authorization", b"basic " + base64.b64encode(b"bob:wrong"))])
    for headers in (
        [],
        [(b"authorization", b"Bearer " + TOKEN)],
        [(b"authorization", b"Basic !")],
        [(b"authorization", b"Basic " + base64.b64encode(b"bob"))],
        [(b"authorization", b"Basic " + BASIC), (b"authorization", b"Basic x")],
    ):
        assert not known.is_slow(headers)


def test_a_process_of_the_service_passes_on_the_own_request_of_a_proxy() -> None:
    broker = Principal(role="broker", method=Method.TOKEN)
    known = authenticator(proxy_roles=["proxy", "broker"], own_role=lambda: "broker")
    assert known.on_behalf_of(broker, "proxy") == Principal(role="broker", method=Method.TOKEN, original_role="proxy")
    assert known.on_behalf_of(broker, "broker") == broker

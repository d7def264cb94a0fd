"""Settings of authentication and TLS: their results, and the errors of wrong ones."""

import ssl
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings, TlsSettings, admin_access, load_security
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.followed import FollowedFiles
from bindery_identity.keys import private_key
from bindery_identity.tokens import sign
from bindery_kit.admin.token_settings import AdminTokenSettings
from bindery_simulation.certificates import CA, certificate, key
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

SECRET = "a shared secret that is long enough"
CERTIFICATE = {"certificate_file": str(certificate("bookie")), "key_file": str(key("bookie"))}


def load(auth: dict[str, object] | None = None, tls: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
    return load_security(AuthSettings(**(auth or {})), TlsSettings(**(tls or {})), now_s=lambda: 0.0)  # type: ignore[arg-type]


def test_by_default_there_is_no_authentication() -> None:
    security = load()
    assert security.gate() is None
    assert security.tls is None


def test_tokens_are_read_from_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"\n  {SECRET}\nthe next secret, for the change\n\n")
    security = load({"provider": "token", "secrets_file": str(file), "plugin": "name"})
    authenticator = security.authenticator
    assert authenticator is not None
    assert authenticator.plugin == "name"
    authenticator.by_token(SECRET.encode())
    authenticator.by_token(b"the next secret, for the change")
    for wrong in (b"", b"\n"):
        with pytest.raises(Unauthorized):
            authenticator.by_token(wrong)


def test_tls_is_offered_or_required(tmp_path: Path) -> None:
    assert load(tls=CERTIFICATE).gate() is None
    security = load(tls={**CERTIFICATE, "required": True})
    gate = security.gate()
    assert gate is not None
    assert not gate.is_open
    assert security.tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert security.tls.verify_mode is ssl.CERT_NONE


def test_authentication_by_certificate_implies_required_tls() -> None:
    security = load({"provider": "certificate", "allowed_names": " a, b ,"}, {**CERTIFICATE, "ca_file": str(CA)})
    assert security.tls_required
    assert security.tls.verify_mode is ssl.CERT_REQUIRED
    assert security.authenticator.by_certificate(["b"]) == "b"


def test_a_pulsar_key_and_an_audience_are_used(tmp_path: Path) -> None:
    key_bytes = bytes(range(100, 132))
    (tmp_path / "key").write_bytes(key_bytes)
    security = load({"provider": "token", "keys_file": f"file://{tmp_path}/key", "audience": "bookies"})
    authenticator = security.authenticator
    assert authenticator is not None
    text = sign(key_bytes, subject="broker", audience=["bookies", "brokers"])
    assert authenticator.by_token(text).subject == "broker"
    for audience in (None, "brokers"):
        with pytest.raises(Unauthorized, match="audience"):
            authenticator.by_token(sign(key_bytes, subject="broker", audience=audience))


def test_a_certificate_with_a_name_that_could_forge_a_log_line_is_refused(tmp_path: Path) -> None:
    authenticator = load({"provider": "certificate"}, {**CERTIFICATE, "ca_file": str(CA)}).authenticator
    assert authenticator is not None
    assert authenticator.by_certificate(["a\u202eb", "plain"]) == "plain"
    with pytest.raises(Unauthorized) as refused:
        authenticator.by_certificate(["a\n[info] forged", "\u2028b", ""])
    assert str(refused.value).isascii()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("auth", "tls"),
    [
        ({"provider": "token"}, {}),
        ({"provider": "token", "secrets_file": __file__, "audience": "x"}, {}),
        ({"provider": "token", "keys_file": "file:///dev/null"}, {}),
        ({"provider": "token", "keys_file": "file:key"}, {}),
        ({"provider": "token", "secrets_file": "a", "keys_file": "b"}, {}),
        ({"provider": "token", "secrets_file": "/nowhere/at/all"}, {}),
        ({"provider": "token", "secrets_file": "/dev/null"}, {}),
        ({"provider": "certificate"}, {}),
        ({"provider": "certificate"}, CERTIFICATE),
        ({}, {"required": True}),
        ({}, {"key_file": "x"}),
        ({}, {**CERTIFICATE, "key_file": str(key("client"))}),
        ({}, {**CERTIFICATE, "certificate_file": "/nowhere/at/all"}),
        ({}, {**CERTIFICATE, "ca_file": "/dev/null"}),
    ],
)
def test_contradicting_security_settings_are_refused(auth: dict[str, object], tls: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        load(auth, tls)


def test_errors_contain_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("tooshort-xyz\n")
    with pytest.raises(BadRequest) as refused:
        load({"provider": "token", "secrets_file": str(file)})
    assert "xyz" not in str(refused.value)


def test_an_unknown_provider_is_refused() -> None:
    with pytest.raises(ValueError, match="provider"):
        AuthSettings(provider="kerberos")  # type: ignore[arg-type]
    assert AuthSettings().provider is AuthProvider.NONE


def test_changed_files_are_in_force_on_both_ports_without_a_restart(tmp_path: Path) -> None:
    """A bookie gives all its files to `follow`; what they contain later is what counts."""
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    pair = ec.generate_private_key(ec.SECP256R1())
    clients.write_text(SECRET * 2)
    operators.write_text("the first secret of operators")
    auth = AuthSettings(provider=AuthProvider.TOKEN, keys_file=str(clients))
    files: list[FollowedFiles[Any]] = []
    security = load_security(auth, TlsSettings(), now_s=lambda: 0.0, follow=files.append)
    access = admin_access(
        auth,
        AdminTokenSettings(token_file=str(operators)),
        host="127.0.0.1",
        now_s=lambda: 0.0,
        follow=files.append,
    ).own
    assert security.authenticator is not None
    assert access is not None
    old = [(b"authorization", b"Bearer the first secret of operators")]
    new = [(b"authorization", b"Bearer " + b"n" * 20)]
    old_token = sign((SECRET * 2).encode(), subject="x")
    assert security.authenticator.by_token(old_token).subject == "x"
    access.check(old)

    public = pair.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    clients.write_bytes(public)
    operators.write_bytes(b"n" * 20)
    assert [file.poll() for file in files] == [True, True]

    private = pair.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    assert security.authenticator.by_token(sign(private_key(private), subject="y")).subject == "y"
    access.check(new)
    with pytest.raises(Unauthorized):
        security.authenticator.by_token(old_token)
    with pytest.raises(Unauthorized):
        access.check(old)


def test_the_tokens_of_both_ports_are_one_followed_file(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.write_text(SECRET)
    auth = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=str(clients))
    files: list[FollowedFiles[Any]] = []
    security = load_security(auth, TlsSettings(), now_s=lambda: 0.0, follow=files.append)
    access = admin_access(
        auth,
        AdminTokenSettings(),
        host="127.0.0.1",
        now_s=lambda: 0.0,
        tokens=security.tokens,
        follow=files.append,
    )
    assert access.own is not None
    access.own.check([(b"authorization", b"Bearer " + SECRET.strip().encode())])
    assert [file.paths for file in files] == [(str(clients),)]

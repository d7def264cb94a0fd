"""TLS contexts from files: what is refused, and what follows a change of the files."""

import base64
import contextlib
import datetime
import ssl
from pathlib import Path

import pytest
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.authenticator import Authenticator, CertificateRole
from bindery_identity.tls import ClientCertificates, PeerCertificate, client_tls, server_tls
from bindery_simulation.certificates import OTHER_CA
from bindery_simulation.certificates.authority import Authority, replace

NOW_S = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()
PAST = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)


def now_s() -> float:
    return NOW_S


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def port(authority: Authority, name: str = "server", **options: object):  # type: ignore[no-untyped-def]
    certificate, key = authority.issue(name, **options)  # type: ignore[arg-type]
    return server_tls(certificate_file=str(certificate), key_file=str(key), now_s=now_s)


def connect(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost", *, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Return both ends of a connection after the handshake. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=host, session=session),
    )
    for _ in range(4):
        for end in reversed(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    for end in ends:
        end.do_handshake()
    return ends


def serial(client: ssl.SSLObject) -> str:
    found = client.getpeercert()
    assert found is not None
    return str(found["serialNumber"])


def test_a_client_reaches_the_host_that_the_certificate_names(authority: Authority) -> None:
    client = client_tls(ca_file=str(authority.ca_file))
    server = port(authority)
    secured, _ = connect(server.context, client.context)
    assert secured.version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        connect(server.context, client.context, host="bookie.example.com")


def test_a_client_without_the_check_of_names_still_checks_the_authority(authority: Authority) -> None:
    lax = client_tls(ca_file=str(authority.ca_file), check_hostname=False)
    connect(port(authority).context, lax.context, host="bookie.example.com")
    stranger = client_tls(ca_file=str(OTHER_CA), check_hostname=False)
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(port(authority).context, stranger.context)


def test_a_client_that_reaches_servers_by_addresses_expects_one_name(authority: Authority) -> None:
    client = client_tls(ca_file=str(authority.ca_file), server_name="brokers")
    server = port(authority, hosts=("brokers",))
    connect(server.context, client.context, host="10.0.0.7")
    for _ in range(2):  # also with files that replaced the first ones
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            connect(port(authority, hosts=("10.0.0.7",)).context, client.context, host="10.0.0.7")
        replace(authority.ca_file, authority.pem + authority.pem)


def test_versions_before_1_2_are_refused(authority: Authority) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(authority.ca_file)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        connect(port(authority).context, old)


def test_new_connections_use_the_newest_pair(authority: Authority) -> None:
    client = client_tls(ca_file=str(authority.ca_file)).context
    server = port(authority)
    before = serial(connect(server.context, client)[1])
    authority.issue("server")
    assert serial(connect(server.context, client)[1]) == before  # until the owner polls
    assert server.poll()
    assert serial(connect(server.context, client)[1]) != before
    assert server.failure is None


def test_a_client_trusts_the_newest_authorities(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    trusted = tmp_path / "trusted.pem"
    replace(trusted, authority.pem)
    client = client_tls(ca_file=str(trusted)).context
    ours, theirs = port(authority), port(other, "theirs")
    connect(ours.context, client)
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(theirs.context, client)
    replace(trusted, authority.pem + other.pem)
    connect(ours.context, client)
    connect(theirs.context, client)
    replace(trusted, other.pem)
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(ours.context, client)


def test_half_a_change_keeps_the_old_pair(authority: Authority, tmp_path: Path) -> None:
    client = client_tls(ca_file=str(authority.ca_file)).context
    server = port(authority)
    before = serial(connect(server.context, client)[1])
    certificate, key = authority.issue("next")
    replace(tmp_path / "server.crt", certificate.read_bytes())
    assert not server.poll()
    assert server.failure is not None
    assert "does not belong to the certificate" in server.failure
    assert serial(connect(server.context, client)[1]) == before
    replace(tmp_path / "server.key", key.read_bytes())
    assert server.poll()
    assert server.failure is None
    assert serial(connect(server.context, client)[1]) != before


def test_an_expired_certificate_is_refused_and_does_not_replace_a_good_one(authority: Authority) -> None:
    with pytest.raises(BadRequest, match="has expired"):
        port(authority, "old", expires=PAST)
    later = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
    server = port(authority, expires=later)
    assert server.expires_at_s == later.timestamp()
    authority.issue("server", expires=PAST)
    assert not server.poll()
    assert "has expired" in (server.failure or "")
    assert server.expires_at_s == later.timestamp()


def of_unknown_version(certificate: bytes) -> bytes:
    """Return the certificate with version 8, which `cryptography` refuses with an error that is no ValueError."""
    content = base64.b64decode(b"".join(certificate.splitlines()[1:-1]))
    version_3 = bytes.fromhex("a003020102")
    assert content.count(version_3) == 1
    changed = base64.encodebytes(content.replace(version_3, bytes.fromhex("a003020107")))
    return b"-----BEGIN CERTIFICATE-----\n" + changed + b"-----END CERTIFICATE-----\n"


def test_a_certificate_of_an_unknown_form_is_refused_and_does_not_replace_a_good_one(
    authority: Authority, tmp_path: Path
) -> None:
    server = port(authority)
    certificate = tmp_path / "server.crt"
    replace(certificate, of_unknown_version(certificate.read_bytes()))
    assert not server.poll()
    assert "has a form that is not supported (InvalidVersion)" in (server.failure or "")
    with pytest.raises(BadRequest, match="version 3"):
        server_tls(certificate_file=str(certificate), key_file=str(tmp_path / "server.key"), now_s=now_s)


def test_files_that_cannot_be_used_are_refused_without_their_content(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    _, other_key = authority.issue("other")
    encrypted_certificate, encrypted_key = authority.issue("encrypted", passphrase=b"a passphrase")
    broken = tmp_path / "broken.key"
    broken.write_bytes(key.read_bytes().replace(b"M", b"!", 3))
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    cases = [
        (certificate, other_key, "does not belong"),
        (encrypted_certificate, encrypted_key, "is encrypted"),
        (certificate, certificate, "no private key"),
        (certificate, empty, "no private key"),
        (key, key, "no certificate"),
        (empty, key, "no certificate"),
        (certificate, tmp_path / "missing", "cannot read the file"),
        (certificate, broken, "cannot be used"),
    ]
    for certificate_file, key_file, reason in cases:
        with pytest.raises(BadRequest, match=reason) as refused:
            server_tls(certificate_file=str(certificate_file), key_file=str(key_file), now_s=now_s)
        secret = key.read_text().splitlines()[1]
        assert secret[:16] not in str(refused.value)
    for ca_file in (empty, key):
        with pytest.raises(BadRequest):
            client_tls(ca_file=str(ca_file))


def test_the_certificate_of_a_client_is_required_optional_or_not_requested(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    own, own_key = authority.issue("me", common_name="role", hosts=["me.test"], uris=["spiffe://cluster/me"])
    anonymous = client_tls(ca_file=str(authority.ca_file)).context
    known = client_tls(ca_file=str(authority.ca_file), certificate_file=str(own), key_file=str(own_key)).context

    def served(mode: ClientCertificates) -> ssl.SSLContext:
        return server_tls(
            certificate_file=str(certificate),
            key_file=str(key),
            ca_file=str(authority.ca_file),
            client_certificates=mode,
            now_s=now_s,
        ).context

    seen = PeerCertificate.of(connect(served(ClientCertificates.REQUIRED), known)[0].getpeercert())
    assert seen is not None
    assert (seen.common_name, seen.dns_names, seen.uris) == ("role", ("me.test",), ("spiffe://cluster/me",))
    assert seen.expires_at_s is not None
    assert seen.expires_at_s > NOW_S
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        connect(served(ClientCertificates.REQUIRED), anonymous)
    assert PeerCertificate.of(connect(served(ClientCertificates.OPTIONAL), known)[0].getpeercert()) == seen
    assert PeerCertificate.of(connect(served(ClientCertificates.OPTIONAL), anonymous)[0].getpeercert()) is None
    assert PeerCertificate.of(connect(served(ClientCertificates.NONE), known)[0].getpeercert()) is None


class Mutual:
    """A port that trusts two authorities, and clients with certificates of both."""

    def __init__(self, directory: Path) -> None:
        self.old, self.new = Authority(directory, "old"), Authority(directory, "new")
        self.trusted = directory / "trusted.pem"
        self.ahead_s = 0.0
        replace(self.trusted, self.old.pem + self.new.pem)
        certificate, key = self.new.issue("server")
        self.files = server_tls(
            certificate_file=str(certificate),
            key_file=str(key),
            ca_file=str(self.trusted),
            client_certificates=ClientCertificates.REQUIRED,
            now_s=lambda: NOW_S + self.ahead_s,
        )

    def client(self, authority: Authority) -> ssl.SSLContext:
        own, own_key = authority.issue("client")
        return client_tls(ca_file=str(self.new.ca_file), certificate_file=str(own), key_file=str(own_key)).context

    def presented(self, connection: ssl.SSLObject) -> PeerCertificate:
        found = PeerCertificate.presented(connection, self.files)
        assert found is not None
        return found


def test_a_certificate_is_not_accepted_any_more_when_its_authority_is_removed(tmp_path: Path) -> None:
    port = Mutual(tmp_path)
    of_old, of_new = (
        port.presented(connect(port.files.context, port.client(authority))[0]) for authority in (port.old, port.new)
    )
    assert (of_old.refusal(), of_new.refusal()) == (None, None)
    authenticator = Authenticator(now_s=now_s, certificate_role=CertificateRole.COMMON_NAME)
    assert authenticator.by_headers([], of_old).role == "client"
    replace(port.trusted, port.new.pem)
    assert port.files.poll()
    assert "was removed" in (of_old.refusal() or "")
    with pytest.raises(Unauthorized, match="was removed"):
        authenticator.by_headers([], of_old)
    assert of_new.refusal() is None
    replace(port.trusted, port.new.pem + port.old.pem)
    assert port.files.poll()
    assert of_old.refusal() is None
    port.ahead_s = 100 * 366 * 86_400.0
    assert "has expired" in (of_new.refusal() or "")


def test_an_authority_that_is_removed_during_the_handshake_is_not_accepted(tmp_path: Path) -> None:
    port = Mutual(tmp_path)
    connection, _ = connect(port.files.context, port.client(port.old))
    replace(port.trusted, port.new.pem)
    assert port.files.poll()
    assert "was removed" in (port.presented(connection).refusal() or "")


def test_a_resumed_session_ends_with_any_change_of_the_files(tmp_path: Path) -> None:
    """The chain of the certificate is not known then."""
    port = Mutual(tmp_path)
    context = port.client(port.old)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # sessions of 1.3 arrive after the handshake
    _, first = connect(port.files.context, context)
    resumed, second = connect(port.files.context, context, session=first.session)
    assert second.session_reused
    found = port.presented(resumed)
    assert found.refusal() is None
    replace(port.trusted, port.new.pem)
    assert port.files.poll()
    assert "was removed" in (found.refusal() or "")


def test_client_certificates_need_an_authority(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    with pytest.raises(BadRequest, match="need the CA"):
        server_tls(
            certificate_file=str(certificate),
            key_file=str(key),
            client_certificates=ClientCertificates.OPTIONAL,
            now_s=now_s,
        )

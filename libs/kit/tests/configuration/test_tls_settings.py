"""Settings of TLS: what contradicts itself, and errors that name the setting."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.tls import ClientCertificates
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.configuration.settings import SettingsConfigDict, load
from bindery_kit.configuration.tls_settings import HttpTlsSettings, PeerTlsSettings
from bindery_simulation.certificates import CA, certificate, key


def now_s() -> float:
    return 0.0


CERTIFICATE, KEY = str(certificate("bookie")), str(key("bookie"))


class Peers(PeerTlsSettings):
    """Peers of a test."""

    model_config = SettingsConfigDict(env_prefix="TEST_PEERS_")


def test_without_a_certificate_there_is_no_tls() -> None:
    assert HttpTlsSettings().load(now_s=now_s) is None
    assert not HttpTlsSettings().is_set
    assert HttpSettings().tls.load(now_s=now_s) is None


def test_a_certificate_and_its_key_are_followed() -> None:
    files = HttpTlsSettings(certificate_file=CERTIFICATE, key_file=KEY, ca_file=str(CA)).load(now_s=now_s)
    assert files is not None
    assert files.paths == (CERTIFICATE, KEY, str(CA))
    assert not files.polls_itself


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (HttpTlsSettings(key_file=KEY), r"needs http\.tls\.certificate_file"),
        (HttpTlsSettings(ca_file=str(CA)), r"needs http\.tls\.certificate_file"),
        (HttpTlsSettings(client_certificates=ClientCertificates.REQUIRED), r"needs http\.tls\.certificate_file"),
        (
            HttpTlsSettings(
                certificate_file=CERTIFICATE, key_file=KEY, client_certificates=ClientCertificates.OPTIONAL
            ),
            r"needs http\.tls\.ca_file",
        ),
        (HttpTlsSettings(certificate_file=CERTIFICATE), r"files of http\.tls: .*no private key"),
        (HttpTlsSettings(certificate_file="/none/such", key_file=KEY), r"files of http\.tls: .*/none/such"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: HttpTlsSettings, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        settings.load(now_s=now_s)


def test_peers_are_reached_with_the_ca_that_is_named_or_those_of_the_system(tmp_path: Path) -> None:
    assert PeerTlsSettings().load(now_s=now_s).paths == ()
    peers = Peers(ca_file=str(CA), certificate_file=str(certificate("client")), key_file=str(key("client")))
    own = peers.load(now_s=now_s)
    assert own.paths == (str(CA), str(certificate("client")), str(key("client")))
    assert own.context.check_hostname
    assert own.expires_at_s is not None
    expired_s = own.expires_at_s + 1
    with pytest.raises(BadRequest, match=r"files of peers: the certificate has expired"):
        peers.load(now_s=lambda: expired_s)
    with pytest.raises(BadRequest, match=r"peers\.key_file needs"):
        Peers(key_file=KEY).load(now_s=now_s)
    with pytest.raises(BadRequest, match=r"files of peers: .*absent"):
        Peers(ca_file=str(tmp_path / "absent")).load(now_s=now_s)


def test_the_settings_are_a_group_of_the_http_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINDERY_HTTP_TLS_CLIENT_CERTIFICATES", "required")
    given = load(HttpSettings, ["--tls-certificate-file", CERTIFICATE], prog="test")
    assert given.tls.certificate_file == CERTIFICATE
    assert given.tls.client_certificates is ClientCertificates.REQUIRED

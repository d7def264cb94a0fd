"""BookieAccess: the credentials for bookies, from a service's own variables and from files."""

import datetime
from pathlib import Path

import pytest
from bindery_client.connection.security import NO_SECURITY
from bindery_core.errors import BadRequest
from bindery_kit.configuration.settings import SettingsConfigDict
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_recovery.bookie_access import BookieAccess
from bindery_simulation.certificates import CA, certificate, key
from bindery_simulation.certificates.authority import Authority


class ServiceAccess(BookieAccess):
    """The credentials of a service."""

    model_config = SettingsConfigDict(env_prefix="SERVICE_CLIENT_")


def now_s() -> float:
    return 0.0


def test_without_settings_there_is_neither_tls_nor_a_token() -> None:
    assert ServiceAccess().load(now_s=now_s) == NO_SECURITY


def test_the_token_is_read_from_the_file_that_a_variable_of_the_service_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_bytes(b"secret\n")
    monkeypatch.setenv("SERVICE_CLIENT_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("SERVICE_CLIENT_PLUGIN", "other")
    security = ServiceAccess().load(now_s=now_s)
    assert (security.token, security.plugin, security.tls) == (b"secret", "other", None)


@pytest.mark.parametrize("check_hostname", [True, False])
def test_certificates_are_loaded(check_hostname: bool) -> None:
    security = ServiceAccess(
        ca_file=str(CA),
        certificate_file=str(certificate("client")),
        key_file=str(key("client")),
        check_hostname=check_hostname,
    ).load(now_s=now_s)
    assert security.tls is not None
    assert security.tls.check_hostname is check_hostname
    assert security.plugin == "bindery"


def test_host_names_are_checked_by_default() -> None:
    tls = ServiceAccess(ca_file=str(CA)).load(now_s=now_s).tls
    assert tls is not None
    assert tls.check_hostname


def test_the_key_must_belong_to_the_certificate() -> None:
    access = ServiceAccess(ca_file=str(CA), certificate_file=str(certificate("client")), key_file=str(key("guest")))
    with pytest.raises(BadRequest):
        access.load(now_s=now_s)


def test_a_certificate_that_expires_is_reported_and_then_refused(tmp_path: Path) -> None:
    """Its series has the name `bookies`; the log has the reason when the file is replaced by one that has expired."""
    authority = Authority(tmp_path)
    later = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    certificate_file, key_file = authority.issue("client", expires=later)
    access = ServiceAccess(
        ca_file=str(authority.ca_file), certificate_file=str(certificate_file), key_file=str(key_file)
    )
    security = access.load(now_s=now_s)
    metrics = TlsMetrics()
    metrics.add("bookies", security.tls_files)
    metrics.add("peers", NO_SECURITY.tls_files)
    expected = f'bindery_tls_certificate_expiry_seconds{{port="bookies"}} {int(later.timestamp())}'
    assert expected in metrics.render().decode().splitlines()
    with pytest.raises(BadRequest, match="has expired"):
        access.load(now_s=later.timestamp)

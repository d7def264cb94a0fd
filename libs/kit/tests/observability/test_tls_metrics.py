"""When certificates and tokens expire, as metrics."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_identity.tokens import sign
from bindery_kit.configuration.zookeeper_access import ZooKeeperAccessSettings
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_simulation.certificates import CA, certificate, key

KEY = b"a key of more than thirty-two bytes"


def test_the_expiry_of_the_token_in_use_is_shown() -> None:
    metrics = TlsMetrics()
    tokens: list[bytes | None] = [sign(KEY, subject="x", expires_at_s=1_900_000_000)]
    metrics.add_token("bookies", lambda: tokens[0])
    assert b'bindery_token_expiry_seconds{port="bookies"} 1900000000\n' in metrics.render()
    tokens[0] = sign(KEY, subject="x", expires_at_s=1_900_000_999)
    assert b'bindery_token_expiry_seconds{port="bookies"} 1900000999\n' in metrics.render()


@pytest.mark.parametrize("token", [None, b"a shared secret", sign(KEY, subject="x")])
def test_what_does_not_expire_has_no_metric(token: bytes | None) -> None:
    metrics = TlsMetrics()
    metrics.add_token("bookies", lambda: token)
    assert metrics.render() == b""


def test_the_expiry_of_the_certificate_for_zookeeper_is_shown() -> None:
    metrics = TlsMetrics()
    access = ZooKeeperAccessSettings(
        ca_file=str(CA), certificate_file=str(certificate("client")), key_file=str(key("client"))
    )
    metrics.add("zookeeper", access.certificate(now_s=lambda: 0.0))
    assert b'bindery_tls_certificate_expiry_seconds{port="zookeeper"} ' in metrics.render()
    assert b'bindery_tls_reload_failed{port="zookeeper"} 0\n' in metrics.render()
    assert ZooKeeperAccessSettings(ca_file=str(CA)).certificate(now_s=lambda: 0.0) is None


def test_a_certificate_for_zookeeper_that_has_expired_is_refused(tmp_path: Path) -> None:
    access = ZooKeeperAccessSettings(
        ca_file=str(CA), certificate_file=str(certificate("client")), key_file=str(key("client"))
    )
    with pytest.raises(BadRequest, match="has expired"):
        access.certificate(now_s=lambda: 1e12)

"""Security files: options, environment variables, and loading."""

import ssl
from pathlib import Path

import pytest
from bindery_client.connection.security import (
    NO_FILES,
    NO_SECURITY,
    PLUGIN,
    VARIABLES,
    SecurityFiles,
    load_security,
)
from bindery_core.errors import BadRequest
from bindery_simulation.certificates import CA, certificate, key
from bindery_simulation.certificates.authority import replace


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for files in (
        {"ca_file": empty},
        {"ca_file": tmp_path / "missing"},
        {"certificate_file": certificate("client")},
        {"ca_file": CA, "certificate_file": certificate("client"), "key_file": key("guest")},
        {"token_file": empty},
        {"token_file": tmp_path / "missing"},
    ):
        with pytest.raises(BadRequest):
            load_security(**files)  # type: ignore[arg-type]


def test_without_files_there_is_neither_tls_nor_a_token() -> None:
    assert NO_FILES.load() == NO_SECURITY
    assert not NO_SECURITY.is_needed


def test_host_names_are_checked_by_default() -> None:
    security = load_security(ca_file=CA)
    assert security.tls is not None
    assert security.tls.check_hostname


def test_every_file_is_loaded(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(b" secret\n")
    files = SecurityFiles(
        token_file=str(token_file),
        ca_file=str(CA),
        certificate_file=str(certificate("client")),
        key_file=str(key("client")),
        auth_plugin="other",
    )
    security = files.load()
    assert security.token == b"secret"
    assert security.plugin == "other"
    assert security.is_needed
    assert security.tls is not None
    assert security.tls.check_hostname
    assert security.tls.verify_mode is ssl.CERT_REQUIRED
    assert len(security.tls.get_ca_certs()) == 1


def test_the_host_name_is_checked_unless_the_check_is_switched_off() -> None:
    strict, lax = SecurityFiles(ca_file=str(CA)).load(), SecurityFiles(ca_file=str(CA), check_hostname=False).load()
    assert strict.tls is not None
    assert lax.tls is not None
    assert strict.tls.check_hostname
    assert not lax.tls.check_hostname
    assert lax.tls.verify_mode is ssl.CERT_REQUIRED


def test_a_wrong_key_is_refused_when_the_files_are_loaded() -> None:
    files = SecurityFiles(ca_file=str(CA), certificate_file=str(certificate("client")), key_file=str(key("guest")))
    with pytest.raises(BadRequest):
        files.load()


def test_an_option_takes_precedence_over_its_variable_unless_it_is_empty() -> None:
    environment = {variable: f"variable of {name}" for name, variable in VARIABLES.items()}
    environment["BINDERY_CLIENT_CHECK_HOSTNAME"] = "FALSE"
    options = {"token_file": "option", "ca_file": ""}
    assert SecurityFiles.of(options, environment) == SecurityFiles(
        token_file="option",
        ca_file="variable of ca_file",
        certificate_file="variable of certificate_file",
        key_file="variable of key_file",
        auth_plugin="variable of auth_plugin",
        check_hostname=False,
        http_ca_file="variable of http_ca_file",
    )


def test_without_options_the_defaults_are_used_and_a_bad_value_is_refused() -> None:
    assert SecurityFiles.of({}, {}) == NO_FILES
    assert (NO_FILES.auth_plugin, NO_FILES.check_hostname) == (PLUGIN, True)
    assert SecurityFiles(**NO_FILES.to_json()) == NO_FILES
    with pytest.raises(BadRequest):
        SecurityFiles.of({"check_hostname": "no"}, {})


def test_the_token_file_is_followed(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_bytes(b"first\n")
    security = load_security(token_file=token_file)
    assert (security.current_token, security.generation) == (b"first", 0)
    replace(token_file, b"second\n")
    security.poll()
    assert (security.current_token, security.generation) == (b"second", 1)
    replace(token_file, b"\n")
    security.poll()
    assert (security.current_token, security.generation) == (b"second", 1)
    assert security.files[0].failure is not None

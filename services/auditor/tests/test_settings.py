"""AuditorSettings: defaults, bounds, variables, and the name of an auditor."""

import socket
from typing import Any

import pytest
from bindery_auditor.settings import AuditorSettings
from bindery_kit.configuration.settings import WrongSettings, load


def test_the_defaults_of_the_process() -> None:
    settings = AuditorSettings()
    assert (settings.host, settings.port, settings.insecure) == ("127.0.0.1", 8090, False)
    assert (settings.admin.token_file, settings.admin.keys_file, settings.admin.audience) == ("", "", "")
    assert (settings.name, settings.zookeeper, settings.ledgers_root) == ("", "127.0.0.1:2181", "/ledgers")
    assert (settings.zookeeper_session_timeout_s, settings.zookeeper_connect_timeout_s) == (10.0, 0.0)
    assert (settings.stop_timeout_s, settings.log_level) == (10.0, "info")
    assert settings.client.token_file == ""


def test_variables_set_the_auditor_its_recovery_and_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDITOR_PORT", "9000")
    monkeypatch.setenv("AUDITOR_LOST_BOOKIE_DELAY_S", "7")
    monkeypatch.setenv("AUDITOR_CLIENT_TOKEN_FILE", "/run/token")
    monkeypatch.setenv("AUDITOR_ADMIN_TOKEN_FILE", "/run/admin")
    settings = AuditorSettings()
    assert settings.admin.token_file == "/run/admin"
    assert (settings.port, settings.lost_bookie_delay_s, settings.client.token_file) == (9000, 7, "/run/token")


def test_the_command_line_takes_precedence_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDITOR_PORT", "9000")
    settings = load(AuditorSettings, ["--port", "9001", "--client-plugin", "other"], prog="bindery-auditor")
    assert (settings.port, settings.client.plugin) == (9001, "other")


@pytest.mark.parametrize(
    "changes",
    [
        {"port": -1},
        {"port": 65_536},
        {"zookeeper_session_timeout_s": 0.5},
        {"zookeeper_session_timeout_s": 600.5},
        {"zookeeper_connect_timeout_s": -0.5},
        {"zookeeper_connect_timeout_s": 86_400.5},
        {"stop_timeout_s": 0},
    ],
    ids=str,
)
def test_values_beyond_their_bounds_are_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(WrongSettings, match=name):
        AuditorSettings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0},
        {"port": 65_535},
        {"zookeeper_session_timeout_s": 1},
        {"zookeeper_session_timeout_s": 600},
        {"zookeeper_connect_timeout_s": 86_400},
        {"stop_timeout_s": 0.5},
    ],
    ids=str,
)
def test_values_at_their_bounds_are_accepted(changes: dict[str, Any]) -> None:
    settings = AuditorSettings(**changes)
    assert {name: getattr(settings, name) for name in changes} == changes


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_auditor_on_every_address_is_named_after_its_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-7")
    assert AuditorSettings(host=host, insecure=True).resolved_name(port=8091) == "machine-7:8091"


def test_an_auditor_on_one_address_is_named_after_it_and_the_bound_port() -> None:
    assert AuditorSettings(host="10.0.0.7", port=0, insecure=True).resolved_name(port=8091) == "10.0.0.7:8091"


def test_a_name_that_is_set_is_used_as_it_is() -> None:
    assert AuditorSettings(name="auditor-0").resolved_name(port=8091) == "auditor-0"

"""Settings come from the command line over the environment over defaults, and say so."""

from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Ge
from bindery_kit.settings import Settings, load
from pydantic import SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict


class JournalSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="KITTEST_JOURNAL_")

    group_wait_ms_max: Annotated[int, Ge(0)] = 0
    """Longest an entry waits for company. Milliseconds."""


class ServiceSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="KITTEST_")

    port: int = 3181
    """Where it listens."""
    data: Path = Path("data")
    limit: int | None = None
    insecure: bool = False
    password: SecretStr = SecretStr("hidden")
    journal: JournalSettings = JournalSettings()


def load_service(*argv: str) -> ServiceSettings:
    return load(ServiceSettings, argv, prog="kittest")


def test_an_argument_wins_over_the_environment_which_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITTEST_PORT", "4000")
    monkeypatch.setenv("KITTEST_LIMIT", "5")
    settings = load_service("--limit", "6", "--insecure")
    assert (settings.port, settings.limit, settings.insecure, settings.data) == (4000, 6, True, Path("data"))
    sources = {setting.name: setting.source for setting in settings.effective()}
    assert sources["port"] == "environment KITTEST_PORT"
    assert sources["limit"] == "argument"
    assert sources["data"] == "default"


def test_a_group_has_flags_and_environment_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_service("--journal-group-wait-ms-max", "3").journal.group_wait_ms_max == 3
    monkeypatch.setenv("KITTEST_JOURNAL_GROUP_WAIT_MS_MAX", "4")
    effective = {s.name: s for s in ServiceSettings(journal=JournalSettings()).effective()}
    assert effective["journal.group_wait_ms_max"].value == 4
    assert effective["journal.group_wait_ms_max"].source == "environment KITTEST_JOURNAL_GROUP_WAIT_MS_MAX"


def test_a_secret_is_neither_shown_nor_taken_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hidden" not in "".join(str(setting) for setting in load_service().effective())
    with pytest.raises(SystemExit) as ended:
        load_service("--password", "x")
    assert ended.value.code == 2
    capsys.readouterr()


def test_a_wrong_value_names_flag_environment_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_service("--port", "x", "--journal-group-wait-ms-max", "-1")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--port (KITTEST_PORT)" in said
    assert "--journal-group-wait-ms-max (KITTEST_JOURNAL_GROUP_WAIT_MS_MAX): input should be greater than" in said


def test_print_config_prints_all_settings_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_service("--print-config", "--port", "1")
    assert ended.value.code == 0
    assert "port = 1  (argument)" in capsys.readouterr().out


def test_help_explains_each_setting_with_default_and_environment_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_service("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "Where it listens. (default 3181; KITTEST_PORT)" in said


def test_settings_cannot_be_changed_nor_misspelled() -> None:
    with pytest.raises(ValidationError):
        load_service().port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        ServiceSettings(prot=1)  # type: ignore[call-arg]

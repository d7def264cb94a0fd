"""Settings: command line, environment and defaults, and the errors of wrong values."""

import pickle
from pathlib import Path
from typing import Annotated

import pytest
from bindery_core.errors import BadRequest
from bindery_kit.configuration.bounds import Ge
from bindery_kit.configuration.settings import (
    SecretStr,
    Settings,
    SettingsConfigDict,
    WrongSettings,
    check,
    group,
    load,
    unknown_variables,
)


class JournalSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="KITTEST_JOURNAL_")

    group_wait_ms_max: Annotated[int, Ge(0)] = 0
    """Maximum time in milliseconds that an entry waits for more entries."""


class ServiceSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="KITTEST_")

    port: int = 3181
    """Where it listens."""
    data: Path = Path("data")
    limit: int | None = None
    insecure: bool = False
    password: SecretStr = SecretStr("hidden")
    journal: JournalSettings = group(JournalSettings)

    @check
    def _consistent(self) -> None:
        if self.limit is not None and self.limit > self.port:
            raise ValueError(f"limit ({self.limit}) must not be above port ({self.port})")


def load_service(*argv: str) -> ServiceSettings:
    return load(ServiceSettings, argv, prog="kittest")


def test_arguments_override_the_environment_which_overrides_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_secret_is_masked_and_rejected_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert (
        "--journal-group-wait-ms-max (KITTEST_JOURNAL_GROUP_WAIT_MS_MAX): must be a whole number, at least 0, got '-1'"
        in said
    )


def test_print_config_prints_all_settings_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_service("--print-config", "--port", "1")
    assert ended.value.code == 0
    assert "port = 1  (argument)" in capsys.readouterr().out


def test_help_explains_each_setting_with_default_and_environment_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_service("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "Where it listens. (default 3181; KITTEST_PORT)" in said


def test_settings_are_frozen_and_unknown_names_are_rejected() -> None:
    settings = load_service()
    with pytest.raises(AttributeError, match=r"ServiceSettings\.port"):
        settings.port = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"ServiceSettings\.port"):
        del settings.port
    assert settings.port == 3181
    with pytest.raises(WrongSettings, match="prot: no such setting"):
        ServiceSettings(prot=1)  # type: ignore[call-arg]


def test_the_environment_ignores_case_empty_values_and_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("kittest_port", "4000")
    monkeypatch.setenv("KITTEST_LIMIT", "")
    monkeypatch.setenv("KITTEST_JOURNAL", "{}")
    monkeypatch.setenv("KITTEST_PASSWORD", "told")
    monkeypatch.setenv("KITTEST_UNKNOWN", "1")
    settings = ServiceSettings()
    assert (settings.port, settings.limit, settings.insecure) == (4000, None, False)
    assert settings.password.get_secret_value() == "told"
    assert settings.model_fields_set == {"port", "password"}


def test_an_error_names_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KITTEST_JOURNAL_GROUP_WAIT_MS_MAX", "many")
    with pytest.raises(WrongSettings, match=r"journal\.group_wait_ms_max: must be a whole number, at least 0"):
        ServiceSettings(journal={"group_wait_ms_max": "few"})  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as ended:
        load(JournalSettings, [], prog="kittest")
    assert ended.value.code == 2
    assert (
        "(KITTEST_JOURNAL_GROUP_WAIT_MS_MAX): must be a whole number, at least 0, got 'many'" in capsys.readouterr().err
    )


def test_all_errors_are_reported_together_with_their_settings() -> None:
    with pytest.raises(WrongSettings) as wrong:
        ServiceSettings(port="x", journal={"group_wait_ms_max": -1, "other": 2}, limit=9.5)  # type: ignore[arg-type]
    assert [(problem.location, problem.given) for problem in wrong.value.problems] == [
        (("port",), "x"),
        (("limit",), 9.5),
        (("journal", "other"), 2),
        (("journal", "group_wait_ms_max"), -1),
    ]
    assert isinstance(wrong.value, BadRequest)


def test_contradicting_settings_are_reported_like_wrong_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WrongSettings, match=r"^limit .3182. must not be above port .3181.$"):
        ServiceSettings(limit=3182)
    with pytest.raises(SystemExit) as ended:
        load_service("--limit", "3182")
    assert ended.value.code == 2
    assert "  limit (3182) must not be above port (3181)\n" in capsys.readouterr().err


def test_an_error_does_not_contain_a_wrong_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Secretive(Settings):
        password: SecretStr

    with pytest.raises(SystemExit):
        load(Secretive, [], prog="kittest")
    assert "--password (PASSWORD): must be given\n" in capsys.readouterr().err
    monkeypatch.setenv("PASSWORD", "told")
    assert "told" not in repr(load(Secretive, [], prog="kittest"))


def test_settings_are_equal_by_value_and_can_be_copied() -> None:
    settings = ServiceSettings(port=4000)
    assert settings == ServiceSettings(port=4000)
    assert hash(settings) == hash(ServiceSettings(port=4000))
    assert settings != ServiceSettings(port=4001)
    assert settings != JournalSettings()
    assert dict(settings)["port"] == 4000
    assert [name for name, _ in settings] == list(ServiceSettings.model_fields)
    assert pickle.loads(pickle.dumps(settings)) == settings
    other = settings.model_copy(update={"limit": 5})
    assert (other.port, other.limit, settings.limit) == (4000, 5, None)
    assert other.model_fields_set == {"port", "limit"}
    assert "port=4000" in repr(settings)
    assert "password=********" in repr(settings)


def test_derived_defaults_keep_given_values_and_are_checked() -> None:
    settings = ServiceSettings(port=4000).with_defaults({"port": 1, "limit": 7})
    assert (settings.port, settings.limit) == (4000, 7)
    assert settings.model_fields_set == {"port"}
    with pytest.raises(WrongSettings, match="limit: must be a whole number"):
        settings.with_defaults({"limit": "x"})
    with pytest.raises(WrongSettings, match="must not be above port"):
        settings.with_defaults({"limit": 5000})


def test_a_class_inherits_fields_and_checks() -> None:
    class Larger(ServiceSettings):
        extra: int = 1

        @check
        def _extra(self) -> None:
            if self.extra > self.port:
                raise ValueError("too much")

    assert list(Larger.model_fields)[-2:] == ["journal", "extra"]
    with pytest.raises(WrongSettings, match="limit"):
        Larger(limit=9999)
    with pytest.raises(WrongSettings, match="too much"):
        Larger(extra=9999)


def test_an_invalid_declaration_is_rejected() -> None:
    with pytest.raises(TypeError, match="unsupported type of a setting"):

        class _Lists(Settings):
            names: list[str] = []

    with pytest.raises(TypeError, match=r"_Shared\.journal needs the default group\(JournalSettings\)"):

        class _Shared(Settings):
            journal: JournalSettings = JournalSettings()


def test_unknown_variables_are_found_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KITTEST_PORT", "KITTEST_PROT", "kittest_journal_group_wait_ms_maxx", "KITTEST_QQQQQQ"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KITTEST_EMPTY", "")
    assert unknown_variables("KITTEST_", ServiceSettings) == {
        "KITTEST_PROT": "KITTEST_PORT",
        "KITTEST_QQQQQQ": None,
        "kittest_journal_group_wait_ms_maxx": "KITTEST_JOURNAL_GROUP_WAIT_MS_MAX",
    }


def test_service_links_of_kubernetes_are_not_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the Services `kittest` and `kittest-headless` in the same namespace."""
    links = {
        f"KITTEST{name}": value
        for service in ("", "_HEADLESS")
        for name, value in {
            f"{service}_SERVICE_HOST": "10.96.0.7",
            f"{service}_SERVICE_PORT": "3181",
            f"{service}_SERVICE_PORT_LEDGER": "3181",
            f"{service}_PORT": "tcp://10.96.0.7:3181",
            f"{service}_PORT_3181_TCP": "tcp://10.96.0.7:3181",
            f"{service}_PORT_3181_TCP_PROTO": "tcp",
            f"{service}_PORT_3181_TCP_PORT": "3181",
            f"{service}_PORT_3181_TCP_ADDR": "10.96.0.7",
        }.items()
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KITTEST_HEADLESS_PROT", "3181")
    assert list(unknown_variables("KITTEST_", ServiceSettings)) == ["KITTEST_HEADLESS_PROT"]
    with pytest.raises(WrongSettings, match=r"Kubernetes .*enableServiceLinks: false"):
        ServiceSettings()


def test_wrong_settings_and_options_are_the_final_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = tmp_path / "message"
    monkeypatch.setenv("BINDERY_TERMINATION_LOG", str(message))
    for argv, said in (
        (["--port", "x"], "test: wrong settings: --port (KITTEST_PORT): must be"),
        (["--nonsense"], "test: "),
    ):
        with pytest.raises(SystemExit) as ended:
            load(ServiceSettings, argv, prog="test")
        assert ended.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(said)
        assert last.endswith(("`test --help` lists them all", "`test --help` lists all options"))
        assert message.read_text() == last

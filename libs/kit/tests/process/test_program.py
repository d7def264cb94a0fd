"""The main function of a service: settings, then logging, then its own checks, then the service itself."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from bindery_kit.configuration.settings import Settings, SettingsConfigDict
from bindery_kit.process import program
from bindery_kit.process.runtime import Shutdown


class ProgramSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="KITPROGRAM_")

    log_level: str = "info"
    port: int = 1


class MoreSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="KITPROGRAM_MORE_")

    size: int = 1


class Run:
    """Runs the program without signals and logs, and records its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[object] = []
        monkeypatch.setattr(program, "run_service", self._run_service)
        monkeypatch.setattr(program.logs, "configure", lambda **options: self.steps.append(options))
        monkeypatch.setattr(program, "warn_of_unknown_variables", lambda *given: self.steps.append(given))

    def __call__(
        self, *argv: str, check: Callable[[ProgramSettings], list[type[Settings]]] | None = None, code: int = 0
    ) -> int:
        async def serve(settings: ProgramSettings, shutdown: Shutdown) -> int:
            assert isinstance(shutdown, Shutdown)
            self.steps.append(("serve", settings.port))
            return code

        return program.run_program(
            "kitprogram", ProgramSettings, serve, argv, service="kit", description="A program.", check=check
        )

    def _run_service(self, main: Callable[[Shutdown], Awaitable[int]], *, program: str) -> int:
        self.steps.append(program)

        async def run() -> int:
            return await main(Shutdown())

        return asyncio.run(run())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_the_service_runs_with_its_settings(run: Run) -> None:
    assert run("--port", "7", "--log-level", "debug", code=5) == 5
    assert run.steps == [
        {"service": "kit", "level": "debug"},
        ("KITPROGRAM_", ProgramSettings),
        "kitprogram",
        ("serve", 7),
    ]


def test_the_checks_of_a_service_run_when_logging_is_set_up(run: Run) -> None:
    def check(settings: ProgramSettings) -> list[type[Settings]]:
        run.steps.append(("check", settings.port))
        return [MoreSettings]

    assert run("--port", "7", check=check) == 0
    assert run.steps == [
        {"service": "kit", "level": "info"},
        ("check", 7),
        ("KITPROGRAM_", ProgramSettings, MoreSettings),
        "kitprogram",
        ("serve", 7),
    ]


def test_an_unknown_log_level_is_refused_before_anything_runs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--log-level", "loud") == 2
    assert run.steps == []
    assert capsys.readouterr().err == (
        "kitprogram: --log-level (KITPROGRAM_LOG_LEVEL) must be one of debug, info, warning, error, critical\n"
    )


def test_settings_that_cannot_be_used_end_the_program(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--port", "many")
    assert caught.value.code == 2
    assert run.steps == []
    assert "port" in capsys.readouterr().err

"""The bookie's program: its checks of the environment, and how it runs the process."""

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie import main
from bindery_bookie.autorecovery.embedded_settings import EmbeddedRecoverySettings
from bindery_bookie.settings import BookieSettings
from bindery_kit.process.runtime import Shutdown

Check = Callable[[BookieSettings], Sequence[type[Any]]]


class Program:
    """What `main` passes to the common program of all services."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        monkeypatch.setattr(main, "run_program", self.run)
        monkeypatch.setattr(main, "memory_limit", lambda: self.limit)
        for name in list(os.environ):
            if name.startswith("BOOKIE_"):
                monkeypatch.delenv(name)
        self.limit: int | None = None

    def run(self, *arguments: Any, **options: Any) -> int:
        self.arguments, self.options = arguments, options
        return 7

    def check(self, settings: BookieSettings) -> Sequence[type[Any]]:
        """Run the checks that `main` passes on."""
        assert main.main(["--port", "0"]) == 7
        check: Check = self.options["check"]
        return check(settings)


class Warnings:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fields: list[dict[str, Any]] = []
        monkeypatch.setattr(main, "log", self)

    def warning(self, event: str, **fields: Any) -> None:
        self.fields.append({"event": event, **fields})


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def test_main_runs_the_bookie_with_its_settings(program: Program) -> None:
    assert main.main(["--port", "0"]) == 7
    assert program.arguments == ("bindery-bookie", BookieSettings, main.serve, ["--port", "0"])
    assert program.options["service"] == "bookie"
    assert program.options["description"] == "The bookie: stores ledger entries durably and serves them."


def test_settings_of_recovery_are_known_only_if_they_are_used(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program.check(BookieSettings()) == ()
    assert program.check(BookieSettings(autorecovery_embedded=True)) == (EmbeddedRecoverySettings,)
    monkeypatch.setenv("bookie_recovery_workers", "3")
    assert program.check(BookieSettings()) == (EmbeddedRecoverySettings,)


def test_a_wrong_setting_of_recovery_ends_the_process_only_if_recovery_is_enabled(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKIE_RECOVERY_WORKERS", "many")
    assert program.check(BookieSettings()) == (EmbeddedRecoverySettings,)
    with pytest.raises(SystemExit) as raised:
        program.check(BookieSettings(autorecovery_embedded=True))
    assert raised.value.code == 2


def test_the_limit_of_the_container_is_checked(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = Warnings(monkeypatch)
    program.limit = 2**20
    program.check(BookieSettings())
    assert [one["limit"] for one in warnings.fields] == [2**20]


@pytest.mark.parametrize(
    ("limit", "is_warned"), [(None, False), (2**29 + 2**26 - 1, True), (2**29 + 2**26, False), (1, True)]
)
def test_a_limit_without_headroom_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, is_warned: bool
) -> None:
    warnings = Warnings(monkeypatch)
    main.warn_of_memory_limit(BookieSettings(memory_size_max=2**29), limit)
    found = [(one["event"], one["limit"], one["memory_size_max"], one["headroom"]) for one in warnings.fields]
    assert found == ([("memory_limit_too_small", limit, 2**29, 2**26)] if is_warned else [])


def test_the_wall_clock_is_in_milliseconds() -> None:
    before = time.time()
    now_ms = main.wall_clock_ms()
    assert before * 1000 - 1 <= now_ms <= time.time() * 1000 + 1


async def test_the_process_is_run_with_a_session_of_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    lives: list[tuple[Any, Shutdown, str]] = []

    def connector(zookeeper: str, **options: Any) -> str:
        asked.append((zookeeper, options))
        return "connect"

    class Process:
        def __init__(self, settings: BookieSettings, shutdown: Shutdown, **parts: Any) -> None:
            self.arguments = (settings, shutdown, parts)

    async def run_life(make: Callable[[], Awaitable[Any]], shutdown: Shutdown, *, failed_event: str) -> int:
        lives.append((make(), shutdown, failed_event))
        return 5

    monkeypatch.setattr(main, "zookeeper_connector", connector)
    monkeypatch.setattr(main, "BookieProcess", Process)
    monkeypatch.setattr(main, "run_life", run_life)
    settings = BookieSettings(
        zookeeper="zk:2181", zookeeper_session_timeout_s=7.0, zookeeper_connect_timeout_s=8.0, journal_dir=str(tmp_path)
    )
    shutdown = Shutdown()
    assert await main.serve(settings, shutdown) == 5
    options = {"session_timeout_s": 7.0, "connect_timeout_s": 8.0, "access": settings.zookeeper_access}
    assert asked == [("zk:2181", options)]
    ((made, used, event),) = lives
    assert (used, event) == (shutdown, "bookie_failed")
    parts = {"connect": "connect", "clock": time.monotonic, "wall_clock_ms": main.wall_clock_ms}
    assert made.arguments == (settings, shutdown, parts)

"""SIGTERM ends the first process of a container while it imports modules; any other process keeps its handler."""

import importlib
import os
import signal
from collections.abc import Callable

import pytest
from bindery_kit.process import early_end


def handlers_of_import(monkeypatch: pytest.MonkeyPatch, *, pid: int) -> dict[int, Callable[[int, object], None]]:
    """Import the module as the process `pid`. Return the handlers that it installs."""
    installed: dict[int, Callable[[int, object], None]] = {}
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(signal, "signal", installed.__setitem__)
    importlib.reload(early_end)
    return installed


def test_the_first_process_ends_with_the_exit_code_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    installed = handlers_of_import(monkeypatch, pid=1)
    assert list(installed) == [signal.SIGTERM]
    installed[signal.SIGTERM](signal.SIGTERM, None)
    assert codes == [143]


@pytest.mark.parametrize("pid", [0, 2, 4711])
def test_another_process_keeps_the_handler_that_it_has(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    assert handlers_of_import(monkeypatch, pid=pid) == {}

"""A coroutine becomes a command with the options of the connection."""

from typing import Annotated, Any

import pytest
import typer
from bindery.common import cluster_command as module
from bindery.common.cluster_command import cluster_command
from bindery.common.options import AsJson
from typer.testing import CliRunner


class Calls:
    """A command that records its calls, and returns `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = typer.Typer()
        self.calls: list[tuple[object, ...]] = []
        self.code: int | None = None
        self.connections: list[tuple[str, str]] = []
        monkeypatch.setattr(module, "run_on", self._run_on)
        monkeypatch.delenv("BINDERY_ZOOKEEPER", raising=False)

        @self.app.callback()
        def group() -> None:
            """Make `show` a command of its own."""

        @cluster_command(self.app, "show")
        async def work(
            cluster: Any, name: str, count: Annotated[int, typer.Option("--count")] = 3, as_json: AsJson = False
        ) -> int | None:
            """Show something."""
            self.calls.append((cluster, name, count, as_json))
            return self.code

        self.work = work

    def _run_on(self, zookeeper: str, ledgers_root: str, work: Any) -> Any:
        self.connections.append((zookeeper, ledgers_root))
        coroutine = work("the cluster")
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("the command waits")

    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(self.app, ["show", *arguments])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_the_command_passes_its_options_and_the_cluster(calls: Calls) -> None:
    assert calls.run("x", "--count", "5", "--json", "--zookeeper", "h:1", "--ledgers-root", "/l").exit_code == 0
    assert calls.calls == [("the cluster", "x", 5, True)]
    assert calls.connections == [("h:1", "/l")]


def test_the_options_have_defaults(calls: Calls) -> None:
    assert calls.run("x").exit_code == 0
    assert calls.calls == [("the cluster", "x", 3, False)]
    assert calls.connections == [("127.0.0.1:2181", "/ledgers")]


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (3, 3)])
def test_a_returned_integer_is_the_exit_code(calls: Calls, code: int | None, exit_code: int) -> None:
    calls.code = code
    assert calls.run("x").exit_code == exit_code


def test_help_shows_the_docstring_and_the_connection_before_json(calls: Calls) -> None:
    text = calls.run("--help").output
    assert "Show something." in text
    places = [text.index(option) for option in ("--count", "--zookeeper", "--ledgers-root", "--json")]
    assert places == sorted(places)


def test_the_coroutine_stays_callable(calls: Calls) -> None:
    assert calls.work.__doc__ == "Show something."

"""Run commands: kubectl, helm, and the commands that environment variables name."""

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

OUTPUT_SHOWN_MAX: Final = 4_000
"""Maximum characters of a command's output in an error message."""


class CommandFailed(Exception):
    """A command failed or timed out; the message has the command and its output."""


class Runner(Protocol):
    def __call__(
        self, command: Sequence[str], *, timeout_s: float, stdin: str | None = None, check: bool = True
    ) -> str: ...


def run(command: Sequence[str], *, timeout_s: float, stdin: str | None = None, check: bool = True) -> str:
    """Run a command and return its standard output.

    Raises CommandFailed if the program does not exist, at the timeout and, with `check`, for a non-zero exit code.
    """
    try:
        done = subprocess.run(
            list(command),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL if stdin is None else None,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{shlex.join(command)[:500]}: not done after {timeout_s:g} s") from error
    except FileNotFoundError as error:
        raise CommandFailed(f"there is no {command[0]} on this machine; install it or put it on PATH") from error
    if check and done.returncode:
        output = (done.stdout + done.stderr).strip()[-OUTPUT_SHOWN_MAX:]
        raise CommandFailed(f"{shlex.join(command)[:500]}: exit code {done.returncode}\n{output}")
    return done.stdout


def json_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines; other lines are skipped."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def hook(name: str, *, environment: Callable[[str], str | None] = os.environ.get) -> list[str] | None:
    """The command prefix in the environment variable `name`; None if it is not set."""
    words = shlex.split(environment(name) or "")
    return words or None


@dataclass(frozen=True)
class Nodes:
    """Faults of nodes, injected by the command in the environment variable E2E_NODES."""

    prefix: tuple[str, ...]
    runner: Runner = run

    @classmethod
    def from_environment(cls) -> "Nodes | None":
        words = hook("E2E_NODES")
        return None if words is None else cls(tuple(words))

    def stop(self, node: str) -> None:
        """Kill everything that runs on the node."""
        self._call("stop", node)

    def start(self, node: str) -> None:
        self._call("start", node)

    def partition(self, node: str) -> None:
        """Disconnect the node from the network; its processes continue."""
        self._call("partition", node)

    def heal(self, node: str) -> None:
        self._call("heal", node)

    def _call(self, verb: str, node: str) -> None:
        self.runner([*self.prefix, verb, node], timeout_s=180)

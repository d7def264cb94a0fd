"""Commands outside this process: kubectl, helm, and the hooks that the environment names."""

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

OUTPUT_SHOWN_MAX: Final = 4_000
"""Characters of a command's output that an error carries."""


class CommandFailed(Exception):
    """A command ended with an error or not at all; the message has its words."""


class Runner(Protocol):
    def __call__(
        self, command: Sequence[str], *, timeout_s: float, stdin: str | None = None, check: bool = True
    ) -> str: ...


def run(command: Sequence[str], *, timeout_s: float, stdin: str | None = None, check: bool = True) -> str:
    """Standard output. Raises CommandFailed with standard error where `check`, and whenever it takes too long."""
    try:
        done = subprocess.run(
            list(command), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL if stdin is None else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{shlex.join(command)[:500]}: not done after {timeout_s:g} s") from error
    except FileNotFoundError as error:
        raise CommandFailed(f"there is no {command[0]} on this machine; install it or put it on PATH") from error
    if check and done.returncode:
        said = (done.stdout + done.stderr).strip()[-OUTPUT_SHOWN_MAX:]
        raise CommandFailed(f"{shlex.join(command)[:500]}: exit code {done.returncode}\n{said}")
    return done.stdout


def json_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def hook(name: str, *, environment: Callable[[str], str | None] = os.environ.get) -> list[str] | None:
    """The command prefix that an environment variable holds; None: not set."""
    words = shlex.split(environment(name) or "")
    return words or None


@dataclass(frozen=True)
class Nodes:
    """Nodes that can be harmed, where the environment offers it (E2E_NODES)."""

    prefix: tuple[str, ...]
    runner: Runner = run

    @classmethod
    def from_environment(cls) -> "Nodes | None":
        words = hook("E2E_NODES")
        return None if words is None else cls(tuple(words))

    def stop(self, node: str) -> None:
        """Kill everything that runs on it."""
        self._call("stop", node)

    def start(self, node: str) -> None:
        self._call("start", node)

    def partition(self, node: str) -> None:
        """Cut it off the network; what runs on it goes on."""
        self._call("partition", node)

    def heal(self, node: str) -> None:
        self._call("heal", node)

    def _call(self, verb: str, node: str) -> None:
        self.runner([*self.prefix, verb, node], timeout_s=180)

"""What docs/securing-a-cluster.md says, for tests: the settings of the recipe "By hand", its checks, and the steps of
the move of an open cluster."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bindery.standalone.plan import Kind

PAGE: Final = Path(__file__).parents[2] / "docs" / "securing-a-cluster.md"
ZOOKEEPER_PAGE: Final = PAGE.with_name("zookeeper-access.md")
OWN: Final = ("host", "advertised_host", "journal_dir", "ledger_dir")
"""Settings of the recipe that an open cluster has, too."""
GROUPS: Final = ("zookeeper_access", "http.tls", "http", "audit_log", "auth", "admin", "authorization")
GROUPS_OF: Final = {
    Kind.BOOKIE: (*GROUPS, "repair", "tls"),
    Kind.AUDITOR: (*GROUPS, "client"),
    Kind.BROKER: (*GROUPS, "client", "peers"),
}
"""Groups of settings of each service that the recipe uses."""
_KINDS: Final = {f"{kind}s": kind for kind in (Kind.BOOKIE, Kind.AUDITOR, Kind.BROKER)}
_CODE: Final = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Step:
    """A row of the table of the move."""

    number: int
    kinds: tuple[Kind, ...]
    """Services that are restarted, in this order; empty: none."""
    settings: tuple[str, ...]
    """Settings that get the value of the recipe."""
    values: dict[str, str]
    """Settings that get a value of their own."""
    removed: tuple[str, ...]
    commands: list[list[str]]
    """Arguments of `bindery` commands."""


@dataclass(frozen=True)
class Recipe:
    create_secrets: list[str]
    """Arguments of the `bindery` command of step 1."""
    settings: dict[Kind, dict[str, tuple[str, ...]]]
    """Kind -> setting -> its flag, and its value if it has one. Without those of `OWN`."""
    environment: dict[str, str]
    use: list[list[str]]
    """Arguments of the `bindery` commands of step 3."""
    checks: list[tuple[str, str]]
    """Command, comment."""
    steps: list[Step]
    zookeeper: list[str]
    """Lines of the configuration of ZooKeeper servers for a port with TLS."""

    @classmethod
    def of_page(cls) -> Self:
        text = PAGE.read_text()
        by_hand, _, move = text.partition("## By hand\n")[2].partition("## From an open cluster in use\n")
        blocks = [part.partition("```")[0] for part in by_hand.split("```sh\n")[1:]]
        secrets, services, use, check = blocks
        exported, *commands = use.replace("\\\n", " ").split("\nbindery ")
        checks = [line.partition("#") for line in check.splitlines()]
        return cls(
            create_secrets=shlex.split(secrets.replace("\\\n", " "))[1:],
            settings=_settings(services),
            environment=dict(word.split("=", 1) for word in shlex.split(exported) if "=" in word),
            use=[shlex.split(command) for command in commands],
            checks=[(command.strip(), comment.strip()) for command, _, comment in checks],
            steps=_steps(move),
            zookeeper=ZOOKEEPER_PAGE.read_text().partition("## A port with TLS\n")[2].split("```")[1].split(),
        )


def _settings(block: str) -> dict[Kind, dict[str, tuple[str, ...]]]:
    assignments, *commands = re.split(r"\n(?=bindery-)", block.replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in shlex.split(assignments))
    found: dict[Kind, dict[str, tuple[str, ...]]] = {}
    for command in commands:
        for name in ("Z", "S"):
            command = command.replace(f"${name}", variables[name])
        program, *flags = command.split()
        kind = Kind(program.removeprefix("bindery-"))
        settings: dict[str, tuple[str, ...]] = {}
        for word in flags:
            if word.startswith("--"):
                setting = _setting_of(word, kind)
                settings[setting] = (word,)
            else:
                settings[setting] += (word,)
        found[kind] = {setting: words for setting, words in settings.items() if setting not in OWN}
    assert found.keys() == {Kind.BOOKIE, Kind.AUDITOR, Kind.BROKER}
    return found


def _setting_of(flag: str, kind: Kind) -> str:
    """Return the name of the setting with this flag: `http.tls.key_file` for --http-tls-key-file."""
    for group in GROUPS_OF[kind]:
        prefix = f"--{group.replace('.', '-').replace('_', '-')}-"
        if flag.startswith(prefix):
            return f"{group}.{flag.removeprefix(prefix).replace('-', '_')}"
    return flag.removeprefix("--").replace("-", "_")


def _steps(text: str) -> list[Step]:
    steps = []
    for line in text.splitlines():
        if found := re.match(r"\| (\d+) \| ([^|]*) \| ([^|]*) \|", line):
            number, where, change = found.groups()
            given, _, removed = change.partition("remove ") if "remove `" in change else (change, "", "")
            names = _CODE.findall(given)
            settings = [name for name in names if not name.startswith("bindery ")]
            steps.append(
                Step(
                    number=int(number),
                    kinds=tuple(kind for word in where.split(", ") if (kind := _KINDS.get(word))),
                    settings=tuple(name for name in settings if "=" not in name and name != "guest"),
                    values=dict(name.split("=") for name in settings if "=" in name),
                    removed=tuple(_CODE.findall(removed)),
                    commands=[name.split()[1:] for name in names if name.startswith("bindery ")],
                )
            )
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    return steps

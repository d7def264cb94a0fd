"""The commands and options in docs/healing.md exist, and the document lists all obstacles."""

import re
import shlex
from pathlib import Path

from bindery.main import app
from bindery_metadata.recovery.recovery_records import Obstacle
from typer.testing import CliRunner

TEXT = (Path(__file__).parents[2] / "docs" / "healing.md").read_text()


def test_every_command_in_the_runbook_exists() -> None:
    commands = re.findall(r"^ {4}(bindery [^#\n]*)", TEXT, re.MULTILINE) + re.findall(r"`(bindery [^`]*)`", TEXT)
    seen = set()
    for line in commands:
        words = shlex.split(line)[1:]
        is_deep = words[:2] in (["bookie", "cookie"], ["bookie", "rack"], ["cluster", "backups"])
        verb = words[: 1 if words[0] == "standalone" else 3 if is_deep else 2]
        seen.add(" ".join(verb))
        result = CliRunner().invoke(app, [*verb, "--help"])
        assert result.exit_code == 0, line
        if verb[0] != "standalone":
            assert "--json" in result.output, line
        for option in (word.partition("=")[0] for word in words if word.startswith("-")):
            assert option in result.output, line
    assert seen >= {
        "bookie drain",
        "bookie recover",
        "bookie maintenance",
        "bookie members",
        "ledger check",
        "ledgers orphans",
        "cluster backup",
        "cluster backups create",
        "cluster backups restore",
        "cluster restore",
        "recovery status",
        "recovery explain",
        "recovery history",
        "recovery pause",
        "recovery resume",
        "recovery retry",
        "recovery trigger",
    }


def test_every_obstacle_is_explained() -> None:
    missing = [obstacle for obstacle in Obstacle if f"`{obstacle.value}`" not in TEXT]
    assert missing == [Obstacle.NONE, Obstacle.ERROR]

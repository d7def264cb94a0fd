"""The documents say what is there: their links lead somewhere, their commands exist."""

import re
import shlex
from pathlib import Path

import pytest
from bindery.main import app
from bindery.standalone.supervisor import first_steps
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    broken = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert broken == []


def test_the_first_steps_in_the_readme_are_those_that_are_printed() -> None:
    readme = re.sub(r" \\\n\s+", " ", (ROOT / "README.md").read_text())
    for line in first_steps("http://127.0.0.1:8080"):
        assert line in readme


def test_every_command_in_the_readme_exists() -> None:
    lines = re.findall(r"^(?:.*\| )?(?:\.venv/bin/)?(bindery .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line.partition("#")[0])[1:]
        verb = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
        depth = 2 if verb[0] in ("standalone", "cluster", "topics", "ledger") else 1
        result = CliRunner().invoke(app, [*verb[:depth], "--help"])
        assert result.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in result.output, line

"""The links in the documents have targets, and their commands exist."""

import re
import shlex
from pathlib import Path

import pytest
from bindery.main import app
from bindery.standalone.supervisor import first_steps
from bindery_bookie.settings import BookieSettings
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

BOOKIE_GROUPS = ("journal", "log", "index", "cookie", "gc", "scrub", "drill")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(document: Path) -> None:
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
        verb = [word for word in words[:3] if re.fullmatch(r"[a-z]+", word)]
        depth = (
            2
            if verb[0]
            in ("standalone", "cluster", "topics", "tenants", "namespaces", "permissions", "ledger", "bookie")
            else 1
        )
        if verb[0] == "bookie" and verb[1:2] and verb[1] in BOOKIE_GROUPS:
            depth = 3
        result = CliRunner().invoke(app, [*verb[:depth], "--help"])
        assert result.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in result.output, line


def test_every_bookie_command_in_its_runbook_exists() -> None:
    text = (ROOT / "docs" / "bookie-operations.md").read_text()
    lines = re.findall(r"^ +(bindery bookie [^#\n]*)", text, re.MULTILINE)
    seen = set()
    for line in lines:
        words = shlex.split(line.partition(">")[0])[1:]
        verb = words[: 3 if words[1] in BOOKIE_GROUPS else 2]
        seen.add(tuple(verb))
        result = CliRunner().invoke(app, [*verb, "--help"])
        assert result.exit_code == 0, line
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in result.output, line
    assert len(seen) >= 24


def test_the_table_of_storage_settings_has_all_of_them_with_their_defaults() -> None:
    text = (ROOT / "docs" / "storage.md").read_text()
    documented = {
        name.strip("` "): cells[1].removesuffix(", derived").strip()
        for cells in (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `--"))
        for name in cells[0].split(", ")
    }
    settings = BookieSettings()
    found = {f"storage-{name}": value for name, value in settings.storage if not name.endswith("_directory")}
    found |= {name: getattr(settings, name) for name in ("memory_size_max", "high_priority_free_size_min")}
    found |= {name: value for name, value in settings if name.startswith("disk_")}
    expected = {f"--{name.replace('_', '-')}": str(value) for name, value in found.items()}
    assert {name: documented.get(name) for name in expected} == expected
    assert set(documented) - set(expected) == {"--journal-dir", "--ledger-dir"}

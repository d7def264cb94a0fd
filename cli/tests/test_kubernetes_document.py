"""The commands, options, values and links in docs/kubernetes.md and the runbooks exist."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from bindery.main import app

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "kubernetes.md"
DOCUMENTS = [GUIDE, *sorted((ROOT / "docs" / "runbooks").glob("*.md"))]
SCHEMA = json.loads((ROOT / "charts" / "bindery" / "values.schema.json").read_text())

COMMAND = re.compile(r"(?:toolbox |-- |`|\| )bindery ([a-z][^`|&>#'\n]*)")
"""`bindery ...` run in a pod or named in a sentence; not the Helm release with that name."""


def test_every_command_and_option_exists() -> None:
    seen = set()
    for document in DOCUMENTS:
        for line in COMMAND.findall(document.read_text()):
            where = f"{document.name}: bindery {line}"
            verb, command, rest = _find(shlex.split(line.replace('"', "")))
            assert verb, where
            assert not hasattr(command, "commands") or not rest, f"{where}: no such verb"
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= known, where
            seen.add(verb)
    assert seen >= {
        "produce",
        "consume",
        "cluster backup",
        "cluster restore",
        "bookie members",
        "bookie drain",
        "bookie recover",
        "bookie maintenance",
        "bookie cookie retire",
        "bookie limbo",
        "recovery status",
        "recovery explain",
        "recovery resume",
        "ledger check",
        "topics stats",
    }


def _find(words: list[str]) -> tuple[str, Any, list[str]]:
    """Return the command that `words` begin with, as words and as an object, and the words that follow."""
    command: Any = typer.main.get_command(app)
    depth = 0
    while hasattr(command, "commands") and depth < len(words) and words[depth] in command.commands:
        command = command.commands[words[depth]]
        depth += 1
    return " ".join(words[:depth]), command, words[depth:]


def test_every_value_that_is_set_exists() -> None:
    named = set()
    for document in DOCUMENTS:
        text = document.read_text()
        named |= set(re.findall(r"--set '?([A-Za-z][\w.]*)=", text))
        named |= {
            name
            for name in re.findall(r"`([A-Za-z]+(?:\.[A-Za-z]+)+)(?:[=:][^`]*)?`", text)
            if name.partition(".")[0] in SCHEMA["properties"]
        }
    assert len(named) >= 25
    assert {name for name in named if not _is_value(name)} == set()


def _is_value(name: str) -> bool:
    schema = SCHEMA
    for part in name.split("."):
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        free = schema.get("additionalProperties")
        if part not in schema.get("properties", {}) and not isinstance(free, dict):
            return False
        schema = schema.get("properties", {}).get(part, free)
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_every_link_into_a_document_finds_its_heading(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        text = ((document.parent / target) if target else document).read_text()
        headings = {_slug(line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert anchor in headings, f"{target}#{anchor}"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

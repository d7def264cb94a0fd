"""The help of every command is complete, uniform and in plain words."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from bindery.main import app
from typer.main import get_command
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from wording import check_text

ELSEWHERE: Final = (("audit",),)
"""First words of commands that are not checked: `audit` prints the help of another program."""
SUMMARY_SIZE_MAX: Final = 120
"""Maximum number of characters of the first paragraph's first sentence."""
NO_IMPERATIVE: Final = re.compile(r"^(The|A|An|All|One|This|It|What|How|Which|Whether|Shows|Lists|Prints)\b")


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and group with the words that name it."""
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*words, name))


ALL: Final = [found for found in commands(get_command(app)) if found[0][:1] not in ELSEWHERE]
IDS: Final = [" ".join(words) or "bindery" for words, _ in ALL]


@pytest.mark.parametrize(("words", "command"), ALL, ids=IDS)
def test_the_summary_is_one_imperative_sentence(words: tuple[str, ...], command: Any) -> None:
    paragraph = re.split(r"\n\s*\n", command.help.strip())[0]
    summary = re.split(r"(?<=[.])\s", " ".join(paragraph.split()))[0]
    assert summary.endswith("."), summary
    assert len(summary) <= SUMMARY_SIZE_MAX, summary
    assert summary[0].isupper()
    assert not NO_IMPERATIVE.match(summary), summary


@pytest.mark.parametrize(("words", "command"), ALL, ids=IDS)
def test_every_option_has_a_help_that_is_a_sentence(words: tuple[str, ...], command: Any) -> None:
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        if parameter.name in ("install_completion", "show_completion"):
            continue
        assert text, f"{parameter.name} has no help"
        assert text.endswith("."), f"{parameter.name}: {text}"
        assert text[0].isupper() or not text[0].isalpha(), f"{parameter.name}: {text}"


@pytest.mark.parametrize(("words", "command"), ALL, ids=IDS)
def test_no_help_has_a_rejected_phrase(words: tuple[str, ...], command: Any) -> None:
    output = CliRunner().invoke(app, [*words, "-h"]).output
    assert [found for _, found, _ in check_text(output)] == []
    assert output == CliRunner().invoke(app, [*words, "--help"]).output


@pytest.mark.parametrize(("words", "command"), ALL, ids=IDS)
def test_examples_name_the_command_that_they_explain(words: tuple[str, ...], command: Any) -> None:
    found = [
        line.strip() for line in command.help.splitlines() if re.match(r"\s*(Example: |  )bindery |.*\| bindery ", line)
    ]
    for line in found:
        assert " ".join(("bindery", *words)) in line or not words, line

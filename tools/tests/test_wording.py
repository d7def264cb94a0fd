"""The wording check finds phrases where users read them, and only there."""

from pathlib import Path

import pytest
import wording

SOURCE = '''"""Nobody reads this docstring."""

MESSAGE = f"bookie {1} lacks a copy"


class Settings(BaseSettings):
    """Nobody."""

    size: int = 1
    """So many a second."""


def say() -> None:
    """Nobody reads this either."""
    raise ValueError("nobody answers")  # a comment that nobody checks
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    return path


def test_strings_and_docstrings_of_settings_are_checked(source: Path) -> None:
    found = {(finding.line, finding.found.lower()) for finding in wording.check_source(source)}
    assert found == {(3, "lacks a copy"), (7, "nobody"), (10, "so many a"), (15, "nobody")}


def test_docstrings_and_comments_are_included_on_request(source: Path) -> None:
    found = {finding.line for finding in wording.check_source(source, everything=True)}
    assert found >= {1, 14}
    assert len([finding for finding in wording.check_source(source, everything=True) if finding.line == 15]) == 2


def test_a_phrase_over_a_line_end_is_found_at_its_first_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nA ledger that lacks\ncopies is marked.\n")
    assert [(finding.line, finding.found) for finding in wording.check_document(page)] == [(3, "lacks copies")]


def test_plain_text_passes() -> None:
    assert list(wording.check_text("The auditor marks every ledger that is under-replicated.")) == []


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in wording.RULES])
def test_every_rule_is_a_pattern(pattern: str) -> None:
    assert any(rule.pattern == pattern for rule, _ in wording._RULES)

"""Rules for test files: unique names of helpers, relative imports, the longest files first."""

import re
from pathlib import Path
from typing import Any

import pytest
import structlog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rules(pytestconfig: pytest.Config) -> Any:
    """The conftest.py in the root of the repository."""
    return pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))


def test_two_helpers_of_one_name_are_found(rules: Any, tmp_path: Path) -> None:
    for place in (
        "libs/a/tests/fake.py",
        "services/b/tests/deep/fake.py",
        "libs/a/tests/socket.py",
        "libs/a/tests/alone.py",
        "libs/a/tests/test_x.py",
        "services/b/tests/test_x.py",
        "libs/a/tests/conftest.py",
        "e2e/tests/conftest.py",
        "libs/a/src/alone.py",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    assert rules.helpers_of_one_name(tmp_path) == {
        "fake": ["libs/a/tests/fake.py", "services/b/tests/deep/fake.py"],
        "socket": ["libs/a/tests/socket.py"],
    }


def test_imports_from_other_test_files_are_relative(rules: Any) -> None:
    """Test files may have equal names: `from .test_connection import ...`, not `from test_connection import ...`."""
    files = [path for pattern in rules.TEST_DIRECTORIES for place in ROOT.glob(pattern) for path in place.rglob("*.py")]
    assert len(files) > 300
    bare = re.compile(r"^ *(?:from|import) +(?:test_|conftest\b)", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in files if bare.search(path.read_text())] == []


def test_every_pattern_of_the_longest_files_matches_a_file(rules: Any) -> None:
    found = [place.rglob("test_*.py") for pattern in rules.TEST_DIRECTORIES for place in ROOT.glob(pattern)]
    files = [path.relative_to(ROOT).as_posix() for paths in found for path in paths]
    assert [pattern for pattern in rules.LONGEST if not any(rules.rank(file, (pattern,)) == 0 for file in files)] == []


def test_tracebacks_in_logs_are_plain(rules: Any) -> None:
    assert structlog.dev.ConsoleRenderer.get_active().exception_formatter is structlog.dev.plain_traceback

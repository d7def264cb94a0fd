"""mutants: which changes are found, what is skipped, and the verdict on a small project with its tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import mutants
import pytest


def changes(tmp_path: Path, source: str) -> list[tuple[int, str, str, str]]:
    module = tmp_path / "module.py"
    module.write_text(textwrap.dedent(source))
    return [(found.line, found.kind, found.before, found.after) for found in mutants.mutants_of(module, tmp_path)]


@pytest.mark.parametrize(
    ("code", "kind", "after"),
    [
        ("a < b", "comparison", "(a <= b)"),
        ("a >= b", "comparison", "(a > b)"),
        ("a == b", "comparison", "(a != b)"),
        ("a is None", "comparison", "(a is not None)"),
        ("a in b", "comparison", "(a not in b)"),
        ("a and b", "and/or", "(a or b)"),
        ("a or b", "and/or", "(a and b)"),
        ("not a", "removed not", "(a)"),
        ("a + b", "arithmetic", "(a - b)"),
        ("7", "constant", "8"),
        ("7", "constant", "6"),
        ("0", "constant", "(-1)"),
        ("True", "constant", "False"),
        ("a if b else c", "negated condition", "(c if b else a)"),
    ],
)
def test_each_kind_of_expression_is_changed(tmp_path: Path, code: str, kind: str, after: str) -> None:
    assert (1, kind, code, after) in changes(tmp_path, f"x = {code}\n")


def test_each_kind_of_statement_is_changed(tmp_path: Path) -> None:
    found = changes(
        tmp_path,
        """\
        def f(xs):
            for x in xs:
                if x:
                    break
                continue
            del xs.y
            xs.z = x
            xs.n += x
            xs.call()
            return x
        """,
    )
    assert found == [
        (4, "break/continue", "break", "continue"),
        (5, "break/continue", "continue", "break"),
        (6, "removed statement", "del xs.y", "pass"),
        (7, "removed statement", "xs.z = x", "pass"),
        (8, "removed statement", "xs.n += x", "pass"),
        (9, "removed statement", "xs.call()", "pass"),
        (10, "return None", "return x", "return None"),
    ]


def test_a_class_that_receives_data_from_a_transport_is_changed(tmp_path: Path) -> None:
    """asyncio.Protocol is a base class with behavior; only protocols of `typing` have none."""
    assert changes(tmp_path, "class C(asyncio.Protocol):\n    size = 7\n")
    assert not changes(tmp_path, "class C(typing.Protocol[T]):\n    size = 7\n")


def test_a_chained_comparison_is_changed_in_each_place(tmp_path: Path) -> None:
    found = changes(tmp_path, "x = a < b <= c\n")
    assert [after for _, _, _, after in found] == ["(a < b < c)", "(a <= b <= c)"]


def test_positions_after_multi_byte_characters_are_right(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('x = ("äöü→", a < b)\n')
    (found,) = mutants.mutants_of(module, tmp_path)
    assert found.applied_to(module.read_bytes()).decode() == 'x = ("äöü→", (a <= b))\n'


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring, 1 < 2."""\n',
        'def f():\n    """Return 1."""\n',
        "log.info('done', count=1 + x)\n",
        "assert a < b\n",
        "if TYPE_CHECKING:\n    x = 1\n",
        "def __repr__(self):\n    return 'x' + self.y\n",
        "__all__ = ['a'] + b\n",
        "x: Annotated[int, Ge(1)]\n",
        "class P(Protocol):\n    def f(self, x=1): ...\n",
        "x = f'{a + 1}'\n",
        "return_value = None\n",
    ],
)
def test_code_that_no_test_should_notice_is_skipped(tmp_path: Path, source: str) -> None:
    assert changes(tmp_path, source) == []


def test_the_arguments_of_an_error_are_skipped_but_the_raise_is_removed(tmp_path: Path) -> None:
    assert changes(tmp_path, "raise ValueError(1 + x)\n") == [
        (1, "removed statement", "raise ValueError(1 + x)", "pass")
    ]


def test_every_mutant_of_a_real_module_compiles() -> None:
    module = Path(mutants.__file__)
    found = mutants.mutants_of(module)
    assert len(found) > 100
    for mutant in found:
        compile(mutant.applied_to(module.read_bytes()), "mutant", "exec")


def test_tests_that_mention_the_module_run_first(tmp_path: Path) -> None:
    package = tmp_path / "libs" / "one"
    module = package / "src" / "one" / "part.py"
    for path, text in (
        (package / "pyproject.toml", ""),
        (module, ""),
        (package / "tests" / "test_a.py", ""),
        (package / "tests" / "test_b.py", "from one.part import x"),
        (package / "tests" / "test_part.py", ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tests = [f"libs/one/tests/{name}" for name in ("test_part.py", "test_b.py", "test_a.py")]
    assert mutants.select_tests(module, [], tmp_path) == tests
    assert mutants.select_tests(module, ["libs/one/tests/test_b.py"], tmp_path) == tests[1:2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a copy of the script, one tested function and one that no test covers."""
    root = tmp_path / "project"
    for name, text in (
        ("tools/mutants.py", Path(mutants.__file__).read_text()),
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n"),
        ("libs/one/pyproject.toml", ""),
        ("libs/one/src/one/__init__.py", ""),
        (
            "libs/one/src/one/part.py",
            "def covered(a, b):\n    return a < b\n\n\ndef drain(items):\n    while items:\n"
            "        items.pop()\n    return items\n\n\ndef uncovered(a):\n    return not a\n",
        ),
        (
            "libs/one/tests/test_part.py",
            "from one.part import covered, drain\n\n\ndef test_part():\n"
            "    assert not covered(1, 1)\n    assert covered(0, 1)\n    assert drain([1, 2]) == []\n",
        ),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def run(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts in half the time
    command = [sys.executable, "tools/mutants.py", "libs/one/src", *arguments]
    return subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=100, env=environment)


def test_mutants_are_caught_survive_or_time_out(project: Path) -> None:
    before = (project / "libs/one/src/one/part.py").read_bytes()
    done = run(project, "--line", "2", "--line", "7", "--line", "12", "--time-limit", "12")
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ->")[0].split("part.py:")[1]: line[:9].strip() for line in done.stdout.splitlines()[:-1]}
    assert lines == {
        "2  comparison: a < b": "caught",
        "2  return None: return a < b": "caught",
        "7  removed statement: items.pop()": "timed out",
        "12  removed not: not a": "survived",
        "12  return None: return not a": "survived",
    }
    assert done.stdout.splitlines()[-1] == "5 mutants: 2 caught, 2 survived, 1 timed out"
    assert (project / "libs/one/src/one/part.py").read_bytes() == before, "the work tree is never changed"


def test_tests_that_fail_unchanged_are_reported(project: Path) -> None:
    (project / "libs/one/tests/test_part.py").write_text("def test_part():\n    assert False\n")
    done = run(project, "--count", "1")
    assert done.returncode == 2
    assert "the tests fail without any change" in done.stderr


def test_a_seed_selects_the_same_mutants_each_time(project: Path) -> None:
    first, second, other = (run(project, "--list", "--count", "3", "--seed", seed).stdout for seed in ("1", "1", "4"))
    assert first == second != other
    assert len(first.splitlines()) == 3

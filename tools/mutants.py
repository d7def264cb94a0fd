"""Mutation testing: change the code at random places and check that the tests of the package fail.

    python tools/mutants.py libs/client/src/bindery_client/ledger --count 30 --seed 7

A mutant is one small change of one expression or statement; `--list` shows mutants without running a test. For each
mutant that `--seed` selects, the script changes the module in a scratch copy of the work tree, runs the tests of its
package there, and restores the module. The work tree itself is never changed. Results:

| result    | meaning                                                                             |
|-----------|-------------------------------------------------------------------------------------|
| caught    | a test failed                                                                       |
| survived  | all tests passed: a test is missing, or the mutant behaves exactly as the original  |
| timed out | the tests exceeded the time limit, usually in an endless loop; counts as caught     |

Tests whose text mentions the module run first, so that most mutants are caught early. Before the first mutant the tests
run unchanged: they must pass, and their duration sets the time limit.

Code whose change no test should notice is skipped: docstrings, annotations, asserts, log calls, texts, protocols,
blocks under TYPE_CHECKING, `__repr__`, `__str__`, `__all__` and the arguments of raised errors. Assignments to local
variables are not removed: nearly every such mutant fails with a NameError, which proves nothing.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAUGHT, SURVIVED, TIMED_OUT = "caught", "survived", "timed out"
TIME_LIMIT_FACTOR = 3.0
"""Default time limit of a mutant: the duration of the unchanged tests times this."""
TIME_LIMIT_S_MIN = 60.0
LOGGERS = ("log", "_log", "logger", "logging", "self._log", "self.log")
LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical")
NO_CHANGE_FUNCTIONS = ("__repr__", "__str__")
SHOWN_SIZE_MAX = 90
"""Maximum characters of code shown before and after a change."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module: the source text from `start` to `end`, in bytes, becomes `after`."""

    path: str
    """Relative to the root of the repository."""
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.kind}: {_shown(self.before)}  ->  {_shown(self.after)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    result: str
    seconds: float
    failed_test: str = ""


# --- mutants of a module ----------------------------------------------------------------------------------------------


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines."""
    source = path.read_bytes()
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = line_starts[node.lineno - 1] + node.col_offset, line_starts[node.end_lineno - 1]
        return start, end + node.end_col_offset

    found: set[Mutant] = set()
    for node, kind, after in _changes(ast.parse(source)):
        start, end = span(node)
        before = source[start:end].decode()
        if before != after:
            relative = path.relative_to(root).as_posix()
            found.add(Mutant(relative, node.lineno, kind, before, after, start, end))
    found = {mutant for mutant in found if _is_valid(mutant.applied_to(source))}
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.kind, mutant.after))


def _is_valid(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield (node, kind, new text) of every change below `tree`."""
    for node in _changeable(tree):
        if isinstance(node, ast.expr):
            for kind, after in _expression_changes(node):
                yield node, kind, after
        elif isinstance(node, ast.stmt):
            for kind, after in _statement_changes(node):
                yield node, kind, after


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose change can matter."""
    if _is_skipped(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        if isinstance(node, ast.Raise) and name == "exc":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changeable(child)


def _is_skipped(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method))):
            return method in LOG_METHODS and ast.unparse(owner) in LOGGERS
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name in NO_CHANGE_FUNCTIONS
        case ast.ClassDef(bases=bases):
            return any(ast.unparse(base).split("[")[0] in ("Protocol", "typing.Protocol") for base in bases)
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
    return False


def _expression_changes(node: ast.expr) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for at, operator in enumerate(ops):
                if other := COMPARISONS.get(type(operator)):
                    changed = [*ops[:at], other(), *ops[at + 1 :]]
                    yield "comparison", f"({ast.unparse(ast.Compare(left, changed, comparators))})"
        case ast.BoolOp(op=operator, values=values):
            swapped = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and/or", f"({ast.unparse(ast.BoolOp(swapped, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "removed not", f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            yield "arithmetic", f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)](), right))})"
        case ast.Constant(value=bool(value)):
            yield "constant", repr(not value)
        case ast.Constant(value=int(value)):
            yield "constant", repr(value + 1)
            yield "constant", repr(value - 1) if value else "(-1)"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "negated condition", f"({ast.unparse(ast.IfExp(test, orelse, body))})"


def _statement_changes(node: ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "return None", "return None"
        case ast.Break():
            yield "break/continue", "continue"
        case ast.Continue():
            yield "break/continue", "break"
        case ast.Assign(targets=targets) if not any(isinstance(target, ast.Name) for target in targets):
            yield "removed statement", "pass"
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield "removed statement", "pass"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# --- modules and their tests ------------------------------------------------------------------------------------------


def modules_of(targets: Iterable[Path]) -> list[Path]:
    """Return the modules that the targets name or contain, without tests and generated modules."""
    found: set[Path] = set()
    for target in targets:
        inside = [target] if target.is_file() else target.rglob("*.py")
        found.update(path for path in inside if not path.name.endswith("_pb2.py") and "tests" not in path.parts)
    return sorted(found)


def select_tests(module: Path, given: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the arguments of pytest for a module: tests that mention it first, then all tests of its package."""
    if given:
        directories = [root / name for name in given]
    else:
        package = next(parent for parent in module.parents if (parent / "pyproject.toml").exists())
        directories = [package / "tests"]
    parts = module.with_suffix("").parts
    dotted = ".".join(parts[parts.index("src") + 1 :]) if "src" in parts else module.stem
    mention = re.compile(rf"\b{re.escape(dotted)}\b")
    files = [
        path
        for directory in directories
        for path in ([directory] if directory.is_file() else sorted(directory.rglob("test_*.py")))
    ]
    first = [path for path in files if path.stem == f"test_{module.stem}"]
    first += [path for path in files if path not in first and mention.search(path.read_text())]
    return [path.relative_to(root).as_posix() for path in (*first, *(path for path in files if path not in first))]


# --- running ----------------------------------------------------------------------------------------------------------


class Scratch:
    """A copy of the work tree in which modules are changed and tests run."""

    def __init__(self, directory: Path, *, workers: int) -> None:
        self.root = directory
        self._workers = workers
        names = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        for name in filter(None, names):
            source, copy = ROOT / name, directory / name
            if source.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)
        sources = [str(path) for path in sorted(directory.glob("**/src")) if path.is_dir()]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"}

    def check_imports(self, module: Path) -> None:
        """Exit unless the tests will import the package from the copy."""
        parts = module.parts
        if "src" not in parts:
            return
        package = parts[parts.index("src") + 1].removesuffix(".py")
        command = [sys.executable, "-c", f"import {package}; print({package}.__file__)"]
        printed = subprocess.run(command, env=self._environment, cwd=self.root, text=True, capture_output=True)
        if not printed.stdout.startswith(str(self.root)):
            sys.exit(f"mutants: {package} is not imported from the scratch copy: {printed.stdout}{printed.stderr}")

    def run(self, tests: Sequence[str], *, limit_s: float) -> tuple[int | None, str, float]:
        """Run pytest. Return its exit code (None: stopped at the time limit), output and duration in seconds."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        if self._workers:
            command += ["-n", str(self._workers), "--dist", "loadfile"]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, output.read(), time.monotonic() - began

    def try_mutant(self, mutant: Mutant, tests: Sequence[str], *, limit_s: float) -> Outcome:
        module = self.root / mutant.path
        original = module.read_bytes()
        module.write_bytes(mutant.applied_to(original))
        try:
            code, output, seconds = self.run(tests, limit_s=limit_s)
        finally:
            module.write_bytes(original)
        if code is None:
            return Outcome(mutant, TIMED_OUT, seconds)
        if code == 0:
            return Outcome(mutant, SURVIVED, seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return Outcome(mutant, CAUGHT, seconds, failed[1] if failed else f"pytest ended with code {code}")


# --- the command ------------------------------------------------------------------------------------------------------


def _shown(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= SHOWN_SIZE_MAX else line[: SHOWN_SIZE_MAX - 3] + "..."


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(outcomes: Sequence[Outcome]) -> None:
    """Print a table, with colours on a terminal and as plain lines in a pipe."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table("result", "place", "change", "before", "after", "s")
        colours = {CAUGHT: "green", SURVIVED: "red", TIMED_OUT: "yellow"}
        for outcome in outcomes:
            mutant = outcome.mutant
            table.add_row(
                f"[{colours[outcome.result]}]{outcome.result}[/]",
                f"{mutant.path}:{mutant.line}",
                mutant.kind,
                _escaped(mutant.before),
                _escaped(mutant.after),
                f"{outcome.seconds:.0f}",
            )
        Console().print(table)
    else:
        for outcome in outcomes:
            print(f"{outcome.result:9}  {outcome.mutant}")
    counts = {result: sum(outcome.result == result for outcome in outcomes) for result in (CAUGHT, SURVIVED, TIMED_OUT)}
    print(f"{len(outcomes)} mutants: " + ", ".join(f"{count} {result}" for result, count in counts.items()))


def _escaped(code: str) -> str:
    from rich.markup import escape

    return escape(_shown(code))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mutants",
        description="Change code at random places in a scratch copy and check that the tests fail.",
        epilog="Exit code: 0 if every selected mutant was tried, whatever the results; 2 if the tests fail unchanged.",
    )
    parser.add_argument("targets", nargs="+", type=Path, help="modules, or folders whose modules are changed")
    parser.add_argument("--count", type=int, default=20, help="number of mutants to try (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the selection (default: %(default)s)")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATH", help="test files or folders; default: tests/ of the package"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help=f"per mutant; default: {TIME_LIMIT_FACTOR:g} times the duration of the unchanged tests",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest; 0, the default: no extra ones")
    parser.add_argument("--line", type=int, action="append", help="only mutants that begin at this line; repeatable")
    parser.add_argument("--list", action="store_true", help="print the selected mutants and run nothing")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the scratch copy is removed
    targets = [target.resolve() for target in options.targets]
    for target in targets:
        if not target.exists() or not target.is_relative_to(ROOT):
            sys.exit(f"mutants: {target} is not in this repository. Pass modules or folders below {ROOT}.")
    candidates = [mutant for module in modules_of(targets) for mutant in mutants_of(module)]
    if options.line:
        candidates = [mutant for mutant in candidates if mutant.line in options.line]
    chosen = random.Random(options.seed).sample(candidates, min(options.count, len(candidates)))  # noqa: S311 - not a secret
    chosen.sort(key=lambda mutant: (mutant.path, mutant.start))
    _note(f"{len(chosen)} of {len(candidates)} mutants, seed {options.seed}")
    if options.list or not chosen:
        for mutant in chosen:
            print(mutant)
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        scratch = Scratch(Path(directory).resolve(), workers=options.workers)
        tests = {mutant.path: select_tests(ROOT / mutant.path, options.tests) for mutant in chosen}
        limits: dict[frozenset[str], float] = {}
        outcomes: list[Outcome] = []
        for mutant in chosen:
            of_module = tests[mutant.path]
            suite = frozenset(of_module)
            if suite not in limits:
                scratch.check_imports(ROOT / mutant.path)
                code, output, seconds = scratch.run(of_module, limit_s=3600)
                if code != 0:
                    _note(output[-4000:])
                    _note("mutants: the tests fail without any change. Repair them, or select others with --tests.")
                    return 2
                limits[suite] = options.time_limit or max(TIME_LIMIT_S_MIN, TIME_LIMIT_FACTOR * seconds)
                _note(f"tests pass unchanged in {seconds:.0f} s; time limit per mutant {limits[suite]:.0f} s")
            outcomes.append(scratch.try_mutant(mutant, of_module, limit_s=limits[suite]))
            _note(f"{len(outcomes)}/{len(chosen)} {outcomes[-1].result:9} {mutant}")
    if options.json:
        print(json.dumps({"seed": options.seed, "mutants": [asdict(outcome) for outcome in outcomes]}, indent=2))
    else:
        _show(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

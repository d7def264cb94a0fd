"""Reject phrases that a reader has to read twice in the texts that users see.

`make lint` runs it. The rules are a table of patterns, each with the wording to use instead; `docs/glossary.md` defines
the terms. It checks

- string literals and settings' docstrings in product code (`libs`, `services`, `cli`, `spark-jobs`): help, errors,
  logs, HTTP texts;
- the README, `docs`, the chart and its alerts.

Docstrings of other classes and functions, comments, decision records (`docs/adr`) and the changelog are not checked:
`--all` includes docstrings and comments and only reports them.

Exit codes: 0 no finding, 1 findings, 2 wrong usage.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("libs/*/src", "services/*/src", "cli/src", "spark-jobs/src")
TEXTS: Final = ("README.md", "docs/*.md", "docs/runbooks/*.md", "e2e/README.md", "charts/bindery/**/*")
TEXT_SUFFIXES: Final = (".md", ".yaml", ".txt", ".tpl", ".json")

RULES: Final = (
    (r"\banew\b", "again"),
    (r"\bby lot\b|\bdraws? lots\b", "at random"),
    (r"\bnobody\b", "no client, no process, no operator"),
    (r"\blacks? (?:a |the |its |some )?cop(?:y|ies)\b|\bcopies lack\b|\blacking cop(?:y|ies)\b", "is under-replicated"),
    (r"\b(?:the|its|their) metadata (?:say|are|have|were|tell)\b", "the metadata says, is, has"),
    (r"\bthe data are\b|\bdata stay\b", "the data is, data stays"),
    (r"\bask(?:s|ed)? who (?:is there|they are)\b", "require authentication"),
    (r"\bwho is there\b", "which clients or bookies are connected or registered"),
    (r"\bnothing to show\b|\bis shown to\b", "has no credentials; is presented to"),
    (r"(?<=\s)excused?s?\b|\bexcused?s?(?=\s)", "exempt, not counted as lost"),
    (r"\bgives? way to\b", "yields to, is throttled by"),
    (r"\bthe office\b|\bin office\b", "leadership"),
    (r"\b(?:is|was|are|were|be|been) told\b", "is reported"),
    (r"\btells? (?:you|it|them|so|what|whether|how|who|where|which)\b", "reports, shows"),
    (r"\bsays? so\b|\bsaid so\b", "reports it"),
    (r"\b(?:can|could) not say\b|\b(?:can|could)not say\b", "did not answer, cannot determine"),
    (r"\bwants? to know\b", "checks"),
    (r"\bmakes? nothing of\b", "ignores"),
    (r"\bone a line\b|\ba line each\b", "one per line"),
    (r"\bso (?:many|much|long) (?:a|an|each|every|after|before)\b", "a noun phrase with its unit"),
    (r"\bat most so (?:many|much)\b", "Maximum number of ..."),
    (r"\bThere is no such thing\b", "Not found"),
    (r"\bwhat becomes of\b", "what happens to"),
    (r"\bMade\.$", "Created."),
    (r"\bbe (?:very )?unkind\b", "a plain instruction"),
    (r"\bon purpose\b", "deliberately; fault injection"),
    (r"\blooks? (?:who|which|whether|what|if)\b", "checks which, whether"),
    (r"\bpatience\b", "timeout"),
    (r"\bimpatient\b", "an exact condition"),
    (r"(?<=\s)drills\b(?![-_`])|(?<![-_`])\bdrills(?=\s)", "fault injection"),
    (r"\bwhoever\b", "a client that, a process that"),
    (r"\bsomebody\b", "a client, another process"),
    (r"\bit is for (?:people|the operator) to\b", "the operator must"),
    (r"\bhow far (?:it|that) is\b", "its progress"),
    (r"\bgoes with (?:it|its|the)\b", "is deleted with"),
    (r"\bhold(?:s)? beside\b", "orphaned"),
)  # fmt: skip
"""(pattern, what to write instead). Patterns ignore case."""

_RULES = tuple((re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in RULES)


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.found!r}: write {self.instead}"


def check_text(text: str) -> Iterator[tuple[int, str, str]]:
    """(line from 0, phrase, what to write instead) for each phrase of `text` that a rule rejects."""
    flat = text.replace("\n", " ")
    for pattern, instead in _RULES:
        for match in pattern.finditer(flat):
            yield text.count("\n", 0, match.start()), match.group(), instead


def _docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that document a module, class, function or field, unless the class holds settings."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_settings = isinstance(node, ast.ClassDef) and any("Settings" in ast.unparse(base) for base in node.bases)
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and not is_settings:
                found.add(id(statement.value))
    return found


def check_source(path: Path, *, everything: bool = False) -> Iterator[Finding]:
    """Findings in the string literals of a Python file; also in docstrings and comments if `everything`."""
    text = path.read_text()
    tree = ast.parse(text)
    skipped = set() if everything else _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            for line, found, instead in check_text(node.value):
                yield Finding(path, node.lineno + line, found, instead)
    if everything:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                for _, found, instead in check_text(token.string):
                    yield Finding(path, token.start[0], found, instead)


def check_document(path: Path) -> Iterator[Finding]:
    for line, found, instead in check_text(path.read_text()):
        yield Finding(path, line + 1, found, instead)


def sources() -> Iterable[Path]:
    for pattern in SOURCES:
        for directory in sorted(ROOT.glob(pattern)):
            yield from (path for path in sorted(directory.rglob("*.py")) if not path.stem.endswith("_pb2"))


def documents() -> Iterable[Path]:
    for pattern in TEXTS:
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.is_file() and path.suffix in TEXT_SUFFIXES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also report docstrings and comments; exit code 0")
    parser.add_argument("paths", nargs="*", type=Path, help="files to check (default: all)")
    options = parser.parse_args()
    chosen = [path.resolve() for path in options.paths]
    findings: list[Finding] = []
    for path in chosen or [*sources(), *documents()]:
        findings += check_source(path, everything=options.all) if path.suffix == ".py" else check_document(path)
    for finding in findings:
        print(finding)
    if findings:
        print(f"wording: {len(findings)} phrases to rewrite; docs/glossary.md has the terms", file=sys.stderr)
    return 1 if findings and not options.all else 0


if __name__ == "__main__":
    sys.exit(main())

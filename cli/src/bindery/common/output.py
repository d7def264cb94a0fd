"""Print results to stdout and everything else to stderr, as text or as JSON.

With --json, stdout holds one JSON value per line. A command that shows one object prints one line; a command that lists
prints one line per item, and a summary as the last line where its help announces one. `topics list` prints one array,
`ledger` and `bookie` commands print objects. An error is one line on stderr:

    {"error": {"code": "no_such_ledger", "message": "no such ledger: ledger_id=7", "exit_code": 1}}

In text, characters that are not printable are escaped, because clients choose keys, names and other values: they could
send control sequences to the terminal of an operator.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import typer
from bindery_kit.observability.printable import printable

from bindery.common import exit_codes


def print_json(value: Any) -> None:
    """Print one JSON value on one line, at once."""
    print(json.dumps(value), flush=True)


def emit(facts: Mapping[str, Any], text: str | Iterable[str], *, as_json: bool) -> None:
    """Print `facts` as JSON, or `text`: a line, or several."""
    if as_json:
        print_json(facts)
    else:
        print_lines([text] if isinstance(text, str) else text)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of text, with escapes for what is not printable."""
    print("\n".join(map(printable, lines)), flush=True)


def print_table(rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] | None = None) -> None:
    """Print rows under headings. The headings are bold on a terminal; a pipe gets plain text."""
    from bindery.common.tables import table

    heading, *lines = table(rows, columns=columns)
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(heading, style="bold", markup=False)
    else:
        print(heading)
    print("\n".join(lines), flush=True)


def report_error(message: str, *, code: str = "failed", exit_code: int = exit_codes.FAILURE, as_json: bool) -> None:
    """Print an error to stderr: a line of text, or the JSON object that the module describes."""
    with suppress(OSError):  # `main` reports that stdout cannot be written
        sys.stdout.flush()  # keep the order of output and error on a terminal
    if as_json:
        facts = {"error": {"code": code, "message": message, "exit_code": exit_code}}
        print(json.dumps(facts), file=sys.stderr, flush=True)
    else:
        print(f"bindery: {printable(message)}", file=sys.stderr, flush=True)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as `1 entry` or `2 entries`. `plural`: other than the noun with an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def confirm(question: str, *, unattended: str, as_json: bool) -> None:
    """Ask on the terminal. End the command with FAILURE on "no", or with USAGE and `unattended` without a terminal."""
    if not is_interactive():
        report_error(unattended, code="confirmation_needed", exit_code=exit_codes.USAGE, as_json=as_json)
        raise typer.Exit(exit_codes.USAGE)
    if not typer.confirm(printable(question), err=True):
        raise typer.Exit(exit_codes.FAILURE)


def is_interactive() -> bool:
    """Return whether a person can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty()  # None: it is closed


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True if a command line requests JSON, even if the command line cannot be parsed."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options

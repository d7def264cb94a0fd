"""Print results to stdout and everything else to stderr, as text or as JSON.

With --json, stdout holds one JSON value per line. A command that shows one object prints one line; a command that lists
prints one line per item, and a summary as the last line where its help announces one. `topics list` prints one array,
`ledger` and `bookie` commands print objects. An error is one line on stderr:

    {"error": {"code": "no_such_ledger", "message": "no such ledger: ledger_id=7", "exit_code": 1}}
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer

from bindery.common import exit_codes


def print_json(value: Any) -> None:
    """Print one JSON value on one line, at once."""
    print(json.dumps(value), flush=True)


def emit(facts: Mapping[str, Any], text: str | Iterable[str], *, as_json: bool) -> None:
    """Print `facts` as JSON, or `text`: a line, or several."""
    if as_json:
        print_json(facts)
    else:
        print(text if isinstance(text, str) else "\n".join(text), flush=True)


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
    sys.stdout.flush()  # keep the order of output and error on a terminal
    if as_json:
        facts = {"error": {"code": code, "message": message, "exit_code": exit_code}}
        print(json.dumps(facts), file=sys.stderr, flush=True)
    else:
        print(f"bindery: {message}", file=sys.stderr, flush=True)


def confirm(question: str, *, unattended: str, as_json: bool) -> None:
    """Ask on the terminal. End the command with FAILURE on "no", or with USAGE and `unattended` without a terminal."""
    if not is_interactive():
        report_error(unattended, code="confirmation_needed", exit_code=exit_codes.USAGE, as_json=as_json)
        raise typer.Exit(exit_codes.USAGE)
    if not typer.confirm(question, err=True):
        raise typer.Exit(exit_codes.FAILURE)


def is_interactive() -> bool:
    """Return whether a person can answer a question."""
    return sys.stdin.isatty()


def wants_json(arguments: Sequence[str]) -> bool:
    """Return True if a command line requests JSON, even if the command line cannot be parsed."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options

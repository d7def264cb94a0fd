"""Run `bindery bookie` on the files of a stopped bookie, and parse its output."""

import json
from pathlib import Path
from typing import Any

import bookie_directory
from bindery.main import app
from typer.testing import CliRunner, Result


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bookie", *map(str, arguments)])


def rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def check(bookie: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (damage found, summary). Assert that the exit code agrees with the summary and that no file changed."""
    before = bookie_directory.fingerprint(bookie)
    result = run("check", bookie, "--json")
    assert bookie_directory.fingerprint(bookie) == before
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    *findings, summary = rows(result)
    damage = [finding for finding in findings if finding["severity"] == "damage"]
    assert (result.exit_code, summary["verdict"]) == ((3, "damaged") if damage else (0, "sound"))
    assert all(finding["fix"] or "more" in finding for finding in damage), "each finding has a fix"
    return damage, summary

"""`bindery audit`: run `bindery_spark.main`, which the extra `audit` installs and which lists the exit codes."""

import sys
from collections.abc import Callable, Sequence
from typing import Final

import typer
from bindery_core.errors import BadRequest

EXIT_JOB_ERROR: Final = 4
"""Exit code if the audit cannot run, as in `bindery_spark.main`."""
SETTINGS: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of the command: all arguments, including --help, are passed on to `bindery_spark.main`."""


def load_jobs() -> Callable[[Sequence[str]], int]:
    """Import `bindery_spark.main`, which imports Spark, and return it. Raises ModuleNotFoundError."""
    from bindery_spark.main import main

    return main


def audit(context: typer.Context) -> None:
    """Read every replica of every entry with Spark and report problems (`bindery audit --help`)."""
    try:
        run = load_jobs()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("bindery_spark", "pyspark", "pyarrow"):
            raise
        print(
            f"bindery: {BadRequest('audits need Spark: install bindery-cli[audit]', missing=error.name)}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_JOB_ERROR) from None
    raise typer.Exit(run(context.args or ["--help"]))

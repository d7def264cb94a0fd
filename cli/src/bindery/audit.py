"""`bindery audit`: run `bindery_spark.main`, which the extra `audit` installs. Its exit codes are listed there."""

import sys
from collections.abc import Callable, Sequence
from typing import Final

import typer
from bindery_core.errors import BadRequest

EXIT_JOB_ERROR: Final = 4
SETTINGS: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def load_jobs() -> Callable[[Sequence[str]], int]:
    """Import `bindery_spark` when it is used: it imports Spark. Raise ModuleNotFoundError if it is not installed."""
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

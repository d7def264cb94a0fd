"""`bindery audit`: handed on to `bindery_spark.main`, which comes with the extra `audit` and is imported when used."""

import importlib
import sys
from typing import Final

import typer
from bindery_core.errors import BadRequest

EXIT_JOB_ERROR: Final = 4
SETTINGS: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def audit(context: typer.Context) -> None:
    """Read every replica of every entry with Spark: run, show, diff, and more (`bindery audit --help`)."""
    try:
        jobs = importlib.import_module("bindery_spark.main")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("bindery_spark", "pyspark", "pyarrow"):
            raise
        print(
            f"bindery: {BadRequest('audits need Spark: install bindery-cli[audit]', missing=error.name)}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_JOB_ERROR) from None
    raise typer.Exit(jobs.main(context.args or ["--help"]))

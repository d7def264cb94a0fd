"""`bindery audit` passes its arguments to the Spark jobs, and names the package to install if they are missing."""

from typing import Any

import pytest
from bindery import audit
from bindery.main import app
from command import bindery
from typer.testing import CliRunner


def test_arguments_and_the_exit_code_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs(arguments: list[str]) -> int:
        assert arguments == ["run", "--level", "quick", "--help"]
        return 3

    monkeypatch.setattr(audit, "load_jobs", lambda: jobs)
    assert CliRunner().invoke(app, ["audit", "run", "--level", "quick", "--help"]).exit_code == 3


def test_without_spark_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")

    monkeypatch.setattr(audit, "load_jobs", missing)
    result = CliRunner().invoke(app, ["audit", "run"])
    assert result.exit_code == audit.EXIT_JOB_ERROR
    assert "install bindery-cli[audit]" in result.stderr


def test_another_missing_module_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'bindery_core'", name="bindery_core")

    monkeypatch.setattr(audit, "load_jobs", missing)
    assert isinstance(CliRunner().invoke(app, ["audit"]).exception, ModuleNotFoundError)


def test_help_is_the_help_of_the_jobs() -> None:
    done = bindery("audit", "--help")
    assert done.returncode == 0
    assert "diff" in done.stdout

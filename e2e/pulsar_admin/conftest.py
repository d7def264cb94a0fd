"""The option that writes the document."""

import contextlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # the tests of e2e/interop, in one run with these, have it too
        parser.addoption("--write", action="store_true", help="write the table of commands into docs/pulsar-admin.md")

"""The version of all packages is one number, which setuptools and Helm accept."""

import re
import tomllib
from pathlib import Path

from bindery_core.version import VERSION


def test_the_version_is_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:[-.]?\w+)*", VERSION)


def test_the_package_has_this_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION

"""Set the version of all packages: `python tools/set_version.py 0.2.0`.

Writes the version to each pyproject.toml, to bindery_core.version, which the programs show, to the Dockerfile, and to
the charts' appVersion, which is the images' default tag. An image build runs this script on its copy of the sources.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = re.compile(r"\d+(\.\d+){2}((a|b|rc)\d+)?(\.dev\d+)?")
"""Versions that are valid for Python packages, image tags and charts without conversion."""

PLACES = (
    ("pyproject.toml", r'^version = "(.*)"$'),
    ("libs/*/pyproject.toml", r'^version = "(.*)"$'),
    ("services/*/pyproject.toml", r'^version = "(.*)"$'),
    ("cli/pyproject.toml", r'^version = "(.*)"$'),
    ("spark-jobs/pyproject.toml", r'^version = "(.*)"$'),
    ("e2e/pyproject.toml", r'^version = "(.*)"$'),
    ("e2e/simulation/pyproject.toml", r'^version = "(.*)"$'),
    ("libs/core/src/bindery_core/version.py", r'^VERSION: Final = "(.*)"$'),
    ("docker/Dockerfile", r"^ARG VERSION=(.*)$"),
    ("charts/*/Chart.yaml", r'^appVersion: "?([^"\s]*)"?$'),
)
"""(glob, pattern of the line with the version), which occurs once in each file."""


def found(root: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Each file with the version, and its position. Raises ValueError for a file without it."""
    for glob, line in PLACES:
        for path in sorted(root.glob(glob)):
            match = re.search(line, path.read_text(), re.MULTILINE)
            if match is None:
                raise ValueError(f"{path} has no line like {line}")
            yield path, match


def write(root: Path, version: str) -> None:
    for path, match in found(root):
        text = path.read_text()
        path.write_text(text[: match.start(1)] + version + text[match.end(1) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 0.2.0, 0.2.0rc1 or 0.2.0.dev3")
    version = parser.parse_args().version
    if not RELEASE.fullmatch(version):
        parser.error(f"not a version: {version!r}; give three numbers, such as 0.2.0")
    write(ROOT, version)


if __name__ == "__main__":
    main()

"""tools/set_version.py: one version everywhere."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bindery_core.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of all files that hold the version, beside the script."""
    for glob in (
        "tools/set_version.py",
        "pyproject.toml",
        "libs/*/pyproject.toml",
        "services/*/pyproject.toml",
        "cli/pyproject.toml",
        "spark-jobs/pyproject.toml",
        "e2e/simulation/pyproject.toml",
        "e2e/pyproject.toml",
        "libs/core/src/bindery_core/version.py",
        "docker/Dockerfile",
        "charts/*/Chart.yaml",
    ):
        for path in ROOT.glob(glob):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return tmp_path


def set_version(sources: Path, version: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(sources / "tools" / "set_version.py"), version]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def versions(root: Path) -> set[str]:
    projects = [root / "pyproject.toml", *root.glob("*/*/pyproject.toml"), *root.glob("*/pyproject.toml")]
    return {tomllib.loads(path.read_text())["project"]["version"] for path in projects}


def test_all_packages_and_the_chart_have_the_version_that_the_programs_show() -> None:
    assert versions(ROOT) == {VERSION}
    assert f'appVersion: "{VERSION}"' in (ROOT / "charts" / "bindery" / "Chart.yaml").read_text()


def test_the_script_changes_the_version_in_all_files_and_nothing_else(sources: Path) -> None:
    before = (sources / "pyproject.toml").read_text()
    assert set_version(sources, "7.8.9").returncode == 0
    assert versions(sources) == {"7.8.9"}
    assert 'VERSION: Final = "7.8.9"' in (sources / "libs/core/src/bindery_core/version.py").read_text()
    assert "\nARG VERSION=7.8.9\n" in (sources / "docker/Dockerfile").read_text()
    assert 'appVersion: "7.8.9"' in (sources / "charts/bindery/Chart.yaml").read_text()
    assert set_version(sources, VERSION).returncode == 0
    assert (sources / "pyproject.toml").read_text() == before


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3+local", ""])
def test_an_invalid_version_is_refused(sources: Path, version: str) -> None:
    done = set_version(sources, version)
    assert done.returncode == 2
    assert "give three numbers" in done.stderr
    assert versions(sources) == {VERSION}

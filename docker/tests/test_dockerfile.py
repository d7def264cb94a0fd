"""The Dockerfile: its paths exist, and its instructions have the documented properties."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery_core.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {
    "bookie": "services/bookie",
    "broker": "services/broker",
    "auditor": "services/auditor",
    "toolbox": "cli",
    "spark": "spark-jobs",
}


def instructions() -> Iterator[tuple[str, str, str]]:
    """(stage, instruction, arguments) of each instruction; stages without a name are numbered."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)
    stage = ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            word, _, arguments = line.partition(" ")
            if word == "FROM":
                stage = arguments.split(" AS ")[1]
            yield stage, word, arguments.strip()


def ancestry(stage: str) -> list[str]:
    """The stage and its base stages, the first one last."""
    parents = {s: arguments.split()[0] for s, word, arguments in instructions() if word == "FROM"}
    line = [stage]
    while line[-1] in parents:
        line.append(parents[line[-1]])
    return line


def ignored(path: str) -> bool:
    """Whether .dockerignore excludes `path`: the last matching pattern decides."""
    from fnmatch import fnmatch

    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            parts = path.split("/")
            names = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
            if "**/" in line:
                names |= set(parts)
            if any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for name in names):
                out = not line.startswith("!")
    return out


def test_every_copied_path_exists_in_the_context() -> None:
    copied = [a.split()[:-1] for _, word, a in instructions() if word == "COPY" and "--from" not in a]
    sources = [source for some in copied for source in some]
    assert "docker/service.lock" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source


@pytest.mark.parametrize(
    "path",
    [
        ".git",
        ".venv",
        "data",
        "e2e/tests",
        "libs/core/tests/test_x.py",
        "spark-jobs/tests/x.py",
        "e2e/simulation",
        "docs/images.md",
    ],
)
def test_the_context_excludes_unneeded_paths(path: str) -> None:
    assert ignored(path)


@pytest.mark.parametrize(
    "path",
    [
        "libs/core/src/bindery_core/version.py",
        "services/bookie/pyproject.toml",
        "spark-jobs/src/bindery_spark/kubernetes.py",
    ],
)
def test_the_context_has_the_sources(path: str) -> None:
    assert not ignored(path)


def test_dependencies_are_installed_before_any_source_is_copied() -> None:
    stages = {s for name in IMAGES for s in ancestry(name)} | {"spark-wheels"}
    stages |= {s for s, _, _ in instructions() if s.endswith("dependencies")}
    copied = [a for s, word, a in instructions() if s in stages and word == "COPY" and "--from" not in a]
    assert sorted(set(copied)) == [
        "LICENSE /opt/bindery/",
        "docker/broker.lock /build/",
        "docker/service.lock /build/",
        "docker/spark.lock /build/",
        "docker/toolbox.lock /build/",
    ]


def test_the_layers_of_sparks_dependencies_precede_binderys() -> None:
    """They are ten times as large as the rest, so a changed source must not copy them again."""
    layers = [a.split()[0] for s, word, a in instructions() if s == "spark" and word == "COPY" and "--from" in a]
    assert layers == [
        f"--from={one}"
        for one in (
            "dependencies",
            "broker-dependencies",
            "toolbox-dependencies",
            "spark-dependencies",
            "common-packages",
            "spark-packages",
        )
    ]


@pytest.mark.parametrize("image", IMAGES)
def test_each_image_runs_its_own_program_as_a_user_without_rights(image: str) -> None:
    mine = [(word, a) for s, word, a in instructions() if s in ancestry(image)]
    assert ("USER", "10001:10001") in mine
    entry = json.loads(next(a for word, a in mine if word == "ENTRYPOINT"))
    scripts = (ROOT / IMAGES[image] / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    assert f"\n{entry[0]} = " in scripts
    assert any("org.opencontainers.image.title" in a for word, a in mine if word == "LABEL")


@pytest.mark.parametrize("image", IMAGES)
def test_no_image_installs_anything_in_its_last_stage(image: str) -> None:
    run = [a for s, word, a in instructions() if s in ancestry(image) and word == "RUN"]
    assert len(run) == 1
    assert "install -d" in run[0]
    assert not re.search(r"pip install|pip --python|apt", run[0])


def test_the_version_is_that_of_the_sources() -> None:
    given = {a for _, word, a in instructions() if word == "ARG" and a.startswith("VERSION")}
    assert given == {f"VERSION={VERSION}", "VERSION"}  # the latter repeat the first one in their stages

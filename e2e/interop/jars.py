"""Provide Apache BookKeeper's jars, which Maven resolves from pom.xml, and compile Driver.java.

| in the cache directory    | contents                                                |
|---------------------------|---------------------------------------------------------|
| `jars-<digest>/`          | the jars of pom.xml with their dependencies             |
| `classes-<digest>/`       | the Java sources of this directory, compiled            |

The digests cover pom.xml and the Java sources, so that a change creates a new folder; other suites pass their own. The
cache directory is `${XDG_CACHE_HOME:-~/.cache}/bindery/interop`: outside the tree, kept between runs.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
POM: Final = HERE / "pom.xml"
SOURCES: Final = tuple(sorted(HERE.glob("*.java")))
RESOLVE_TIMEOUT_S: Final = 900.0
COMPILE_TIMEOUT_S: Final = 120.0


class JavaMissing(Exception):
    """A program that the suite needs is missing or failed."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bindery" / "interop"


def class_path(pom: Path = POM, sources: Sequence[Path] = SOURCES) -> str:
    """The class path of all JVMs. The first call resolves the jars and compiles `sources`. Raises JavaMissing."""
    tools = {name: _tool(name) for name in ("java", "javac", "mvn")}
    jars = cache_directory() / f"jars-{_digest(pom)}"
    if not jars.exists():
        resolve = [tools["mvn"], "--quiet", "--batch-mode", "--file", str(pom), "dependency:copy-dependencies"]
        _fill(jars, [*resolve, "-DincludeScope=runtime"], "-DoutputDirectory={}", timeout_s=RESOLVE_TIMEOUT_S)
    if not sources:
        return f"{jars}/*"
    classes = cache_directory() / f"classes-{_digest(pom, *sources)}"
    if not classes.exists():
        compile_all = [tools["javac"], "-nowarn", "-cp", f"{jars}/*", *map(str, sources), "-d"]
        _fill(classes, compile_all, "{}", timeout_s=COMPILE_TIMEOUT_S)
    return os.pathsep.join((str(classes), f"{jars}/*"))


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise JavaMissing(f"the interop suite needs {name} on the PATH: a JDK 17 or newer and Maven 3")
    return found


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _fill(target: Path, command: list[str], destination: str, *, timeout_s: float) -> None:
    """Run `command` in a temporary directory that is renamed when complete, so that no partial result is used."""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        done = subprocess.run(
            [*command, destination.format(partial)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise JavaMissing(f"{Path(command[0]).name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

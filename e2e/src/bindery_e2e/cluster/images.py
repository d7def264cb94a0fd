"""The images under test: this tree's, the same as a second version, and one that breaks the promise on purpose.

`docker/build.py` builds them, with docker or with what E2E_BUILD names. E2E_LOAD brings them to the nodes: it is called
with the images' names (default: `kind load docker-image`). What stands there already is not built again unless asked
for: E2E_IMAGES=present says that everything was built and loaded before.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bindery_e2e.cluster.commands import Runner, hook, run

ROOT: Final = Path(__file__).resolve().parents[4]
VERSION: Final = "0.1.0"
NEXT_VERSION: Final = "0.1.1"
BROKEN_TAG: Final = f"{VERSION}-broken"
TARGETS: Final = ("bookie", "broker", "auditor", "toolbox")
BUILD_TIMEOUT_S: Final = 1800.0
DEFAULT_LOAD: Final = ("kind", "load", "docker-image")


def names(version: str) -> list[str]:
    return [f"bindery/{target}:{version}" for target in TARGETS]


class Images:
    """Builds and loads; says what it does and how long it took. Raises CommandFailed."""

    def __init__(
        self,
        *,
        runner: Runner = run,
        environment: Callable[[str], str | None] = os.environ.get,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = runner
        self._environment = environment
        self._say = say
        self._clock = clock

    def version(self, version: str = VERSION) -> list[str]:
        """All four of that version, built and loaded; their names."""
        wanted = names(version)
        if self._is_present:
            return wanted
        began = self._clock()
        only = [word for target in TARGETS for word in ("--only", target)]
        command = [sys.executable, "docker/build.py", "--context", str(ROOT), *only, "--version", version]
        self._run(["env", f"--chdir={ROOT}", *command], timeout_s=BUILD_TIMEOUT_S)
        self._load(wanted)
        self._say(f"images {version}: built and loaded in {self._clock() - began:.0f} s")
        return wanted

    def spark(self) -> str:
        """What audits run; its name. The others do without it, and it is four times as large as they are together."""
        name = f"bindery/spark:{VERSION}"
        if self._is_present:
            return name
        began = self._clock()
        command = [sys.executable, "docker/build.py", "--context", str(ROOT), "--only", "spark", "--version", VERSION]
        self._run(["env", f"--chdir={ROOT}", *command], timeout_s=BUILD_TIMEOUT_S)
        self._load([name])
        self._say(f"image of Spark: built and loaded in {self._clock() - began:.0f} s")
        return name

    def all(self) -> None:
        """Everything that the tests on Kubernetes use."""
        self.version(VERSION)
        self.version(NEXT_VERSION)
        self.broken()
        self.spark()

    def broken(self) -> str:
        """A broker with defects put in, chosen by BINDERY_DEFECT (e2e/broken); its name."""
        name = f"bindery/broker:{BROKEN_TAG}"
        if self._is_present:
            return name
        context = ROOT / "e2e" / "broken"
        options = ["--build-arg", f"BASE=bindery/broker:{VERSION}", "-f", str(context / "Dockerfile")]
        prefix = hook("E2E_BUILD", environment=self._environment)
        command = (
            [*prefix, name, str(context), *options]
            if prefix
            else ["docker", "build", *options, "-t", name, str(context)]
        )
        self._run(command, timeout_s=BUILD_TIMEOUT_S)
        self._load([name])
        return name

    @property
    def _is_present(self) -> bool:
        return self._environment("E2E_IMAGES") == "present"

    def _load(self, wanted: Sequence[str]) -> None:
        prefix = hook("E2E_LOAD", environment=self._environment) or list(DEFAULT_LOAD)
        self._run([*prefix, *wanted], timeout_s=BUILD_TIMEOUT_S)

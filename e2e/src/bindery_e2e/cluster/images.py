"""Build and load the images under test: this tree's, the same as a second version, and a broker with defects.

`docker/build.py` builds them with docker, or with the command in E2E_BUILD. The command in E2E_LOAD loads them onto the
nodes, with the images' names as arguments (default: `kind load docker-image`). E2E_IMAGES=present: both steps are
skipped, because all images were built and loaded before.
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
    """Builds and loads images, and prints how long each step took. Raises CommandFailed."""

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
        """Build and load the four images of a version, and return their names."""
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
        """Build and load the image of the audit, and return its name.

        It is separate because it is four times as large as the others together, and only audits need it.
        """
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
        """Build and load all images that the tests on Kubernetes use."""
        self.version(VERSION)
        self.version(NEXT_VERSION)
        self.broken()
        self.spark()

    def broken(self) -> str:
        """Build and load a broker with a defect that BINDERY_DEFECT selects (e2e/broken), and return its name."""
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

"""Resolve the workspace and write its locks: every version with its hashes, and no index address.

| file                     | holds                                         | used by                             |
|--------------------------|-----------------------------------------------|-------------------------------------|
| requirements.lock        | all: products, standalone, development        | `make setup`                        |
| docker/service.lock      | dependencies of bookies and auditors          | all images                          |
| docker/broker.lock       | the same, and those of brokers                | images of the broker and toolbox    |
| docker/toolbox.lock      | the same, and those of the command            | the toolbox's image                 |
| docker/spark.lock        | the same, and Spark with a Java and Arrow     | the Spark image                     |
| docker/build.lock        | the backend that builds Bindery's wheels      | the images' builder, not the images |

The locks in docker are subsets of the first one, with the same versions and hashes.

uv's own lock file names the index that it was resolved from, which ties it to one mirror; docs/adr/0001 explains why
the repository has the exported form instead.
"""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
LOCK = ROOT / "requirements.lock"
SERVICES = ("bindery-bookie", "bindery-auditor")
"""Packages whose dependencies all images have."""


def _of(*packages: str) -> list[str]:
    """Options that export the dependencies of these packages, without their extras."""
    return ["--no-default-groups", *(f"--package={name}" for name in packages)]


EXPORTS = {
    LOCK: ["--all-groups"],
    ROOT / "docker" / "service.lock": _of(*SERVICES),
    ROOT / "docker" / "broker.lock": _of(*SERVICES, "bindery-broker"),
    ROOT / "docker" / "toolbox.lock": _of(*SERVICES, "bindery-broker", "bindery-cli"),
    ROOT / "docker" / "spark.lock": _of(*SERVICES, "bindery-broker", "bindery-cli", "bindery-spark"),
    ROOT / "docker" / "build.lock": ["--only-group=build"],
}


def pinned(lock: str, arguments: list[str]) -> list[str]:
    """Options that keep every version in `lock`, except those that `arguments` upgrade.

    A fresh clone has no uv.lock, so uv would otherwise resolve every package to its newest version.
    """
    if any(word in ("--upgrade", "-U") for word in arguments):
        return []
    upgraded = {re.split("[=<>!~]", name)[0] for name in _upgraded_packages(arguments)}
    pins = re.findall(r"^([A-Za-z0-9._-]+)(==[^ ;\\]+)", lock, re.MULTILINE)
    kept = [name + version for name, version in pins if name not in upgraded]
    return [option for pin in kept for option in ("--upgrade-package", pin)]


def _upgraded_packages(arguments: list[str]) -> list[str]:
    following = pairwise(arguments)
    separate = [value for word, value in following if word in ("--upgrade-package", "-P")]
    joined = [word.removeprefix("--upgrade-package=") for word in arguments if word.startswith("--upgrade-package=")]
    return separate + joined


def export(path: Path, options: list[str]) -> None:
    command = [UV, "export", "--frozen", "--no-emit-workspace", "--no-header", "--format", "requirements-txt", *options]
    exported = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
    assert "://" not in exported, "the lock would name an index"
    path.write_text(exported)


def main() -> None:
    wanted = sys.argv[1:]
    subprocess.run([UV, "lock", *pinned(LOCK.read_text(), wanted), *wanted], cwd=ROOT, check=True)
    for path, options in EXPORTS.items():
        export(path, options)


if __name__ == "__main__":
    main()

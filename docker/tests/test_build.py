"""docker/build.py: the commands that it runs, for builders with either order of arguments."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bindery_core.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docker" / "build.py"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_command_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2E_BUILD", raising=False)


def test_docker_builds_all_five_with_the_version_of_the_sources(build: ModuleType) -> None:
    made = build.commands(build.parse([]), None)
    assert list(made) == [f"bindery/{name}:{VERSION}" for name in ("bookie", "broker", "auditor", "toolbox", "spark")]
    command = made[f"bindery/broker:{VERSION}"]
    assert command[:6] == ["docker", "build", "--target", "broker", "-f", "docker/Dockerfile"]
    assert f"VERSION={VERSION}" in command
    assert command[-3:] == ["-t", f"bindery/broker:{VERSION}", "."]


def test_a_build_command_gets_tag_and_context_first(build: ModuleType) -> None:
    args = build.parse(["--only", "bookie", "--version", "0.1.1", "--tag-suffix=-broken"])
    made = build.commands(args, "tool image build")
    assert list(made) == ["bindery/bookie:0.1.1-broken"]
    command = made["bindery/bookie:0.1.1-broken"]
    assert command[:7] == ["tool", "image", "build", "bindery/bookie:0.1.1-broken", ".", "--target", "bookie"]
    assert "VERSION=0.1.1" in command  # the suffix is not part of the version


def test_the_builder_option_overrides_the_environment(build: ModuleType) -> None:
    made = build.commands(build.parse(["--builder", "podman build", "--only=toolbox"]), "tool image build")
    assert made[f"bindery/toolbox:{VERSION}"][:2] == ["podman", "build"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tag-suffix", "+x"], "not a tag"),
        (["--only", "zookeeper"], "invalid choice"),
        (["--builder", "a", "--build-command", "b"], "exclude each other"),
        (["--context", "/"], "--context names the repository's root"),
    ],
)
def test_wrong_usage_names_the_valid_values(
    build: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        build.parse(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_builder_is_named(build: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--builder", "no-such-builder build"]) == 2
    assert "there is no no-such-builder" in capsys.readouterr().err


def test_the_first_failure_ends_the_script_with_the_builders_exit_code(
    build: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--builder", f"{sys.executable} -c 'raise SystemExit(7)'"]) == 7
    said = capfd.readouterr()
    assert said.out == ""
    assert f"bindery/bookie:{VERSION} was not built" in said.err


def test_a_failed_build_is_repeated_once(build: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "stumbled"
    script = f"import pathlib, sys; m = pathlib.Path({str(marker)!r}); seen = m.exists(); m.touch(); sys.exit(not seen)"
    assert build.main(["--builder", shlex.join([sys.executable, "-c", script]), "--only", "broker"]) == 0
    assert capfd.readouterr().out.split() == [f"bindery/broker:{VERSION}"]


def test_stdout_has_only_the_names() -> None:
    builder = f"{sys.executable} -c 'print(\"chatter\")'"
    command = [sys.executable, str(SCRIPT), "--builder", builder, "--only", "auditor", "--only", "broker"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"bindery/auditor:{VERSION}", f"bindery/broker:{VERSION}"]
    assert "chatter" in done.stderr

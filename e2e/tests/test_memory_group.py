"""Control groups of limited memory: a real one of this machine, and version 2 as files."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from bindery_e2e.attacks.memory_group import WITHOUT_GROUP, MemoryGroup, NoMemoryGroup, Usage, memory_group

MIB = 2**20
HOLD = """
import sys
held = b"x" * (int(sys.argv[1]) * 2**20)
print("held", flush=True)
sys.stdin.read(1)
"""


def hold(group: MemoryGroup, size_mib: int) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    return group.start([sys.executable, "-c", HOLD, str(size_mib)], stdin=pipe, stdout=pipe)


def said(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


# --- a real group -----------------------------------------------------------------------------------------------------


def test_memory_of_a_process_is_measured_and_its_group_is_removed() -> None:
    with memory_group(256 * MIB) as group:
        process = hold(group, 64)
        assert said(process) == b"held\n"
        usage = group.usage()
        assert 64 * MIB < usage.resident_size <= usage.resident_size_max < 128 * MIB
        assert usage.group_size is not None
        assert 64 * MIB < usage.group_size < 128 * MIB
        assert usage.group_size_max is None or usage.group_size_max >= 64 * MIB
        assert usage.killed == 0
        directory = group.directory
    assert process.returncode == -9
    assert directory is not None
    assert not directory.exists()


def test_a_process_above_the_limit_is_killed_by_the_kernel() -> None:
    with memory_group(64 * MIB) as group:
        process = hold(group, 128)
        assert said(process) == b""
        assert process.wait(30) == -9
        assert group.usage().killed == 1
        assert group.usage().resident_size == 0


def test_the_exit_code_and_the_arguments_pass_through() -> None:
    with memory_group(256 * MIB) as group:
        process = group.start([sys.executable, "-c", "import sys; sys.exit(int(sys.argv[1]))", "3"])
        assert process.wait(30) == 3
        group.close()
        group.close()


# --- version 2, as files ----------------------------------------------------------------------------------------------


def v2(root: Path, path: str, *, controllers: str) -> Path:
    """Make a group as the kernel shows it. A file system without the kernel adds no files to new groups."""
    group = root / path
    group.mkdir(parents=True, exist_ok=True)
    (root / "cgroup.controllers").write_text("cpu memory")
    (group / "cgroup.subtree_control").write_text(controllers)
    return group


def enter(root: Path) -> None:
    with memory_group(64 * MIB, root=root, own="0::/\n"):
        pass


def test_a_version_2_group_has_its_limit_and_no_swap(tmp_path: Path) -> None:
    (tmp_path / "memory.swap.max").write_text("max")
    MemoryGroup(tmp_path, size_max=64 * MIB)
    assert (tmp_path / "memory.max").read_text() == str(64 * MIB)
    assert (tmp_path / "memory.swap.max").read_text() == "0"


@pytest.mark.parametrize("with_peak", [True, False])
def test_usage_of_a_version_2_group(tmp_path: Path, with_peak: bool) -> None:
    group = MemoryGroup(tmp_path, size_max=64 * MIB)
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 1500\n")
    (tmp_path / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 2\n")
    if with_peak:
        (tmp_path / "memory.peak").write_text("9000\n")
    assert group.usage() == Usage(0, 0, 3500, 9000 if with_peak else None, 2)


def test_the_nearest_group_that_passes_memory_on_is_the_parent(tmp_path: Path) -> None:
    v2(tmp_path, ".", controllers="cpu memory")
    near = v2(tmp_path, "user/session", controllers="memory")
    with memory_group(64 * MIB, root=tmp_path, own="0::/user/session\n") as group:
        assert group.directory is not None
        assert group.directory.parent == near
        limit = group.directory / "memory.max"
        assert limit.read_text() == str(64 * MIB)
        limit.unlink()  # a file of the kernel would not keep the group from being removed


def test_the_memory_controller_is_enabled_where_that_is_possible(tmp_path: Path) -> None:
    parent = v2(tmp_path, ".", controllers="")
    with pytest.raises(NoMemoryGroup, match="no memory controller"):  # a file keeps "+memory", the kernel "memory"
        enter(tmp_path)
    assert (parent / "cgroup.subtree_control").read_text() == "+memory"


# --- no group ---------------------------------------------------------------------------------------------------------


def test_without_control_groups_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WITHOUT_GROUP, raising=False)
    with pytest.raises(NoMemoryGroup, match=f"no memory controller below {tmp_path}.*set {WITHOUT_GROUP}=1"):
        enter(tmp_path)


def test_attacks_without_a_group_are_allowed_explicitly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_GROUP, "1")
    with memory_group(64 * MIB, root=tmp_path, own="0::/\n") as group:
        process = hold(group, 8)
        assert said(process) == b"held\n"
        usage = group.usage()
        assert usage.resident_size > 8 * MIB
        assert (usage.group_size, usage.group_size_max, usage.killed) == (None, None, 0)
    assert process.poll() == -9


def test_a_group_that_stays_busy_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bindery_e2e.attacks.memory_group.END_TIMEOUT_S", 0.05)
    (tmp_path / "still").write_text("here")
    began = time.monotonic()
    with pytest.raises(OSError, match="not empty"):
        MemoryGroup(tmp_path, size_max=1).close()
    assert time.monotonic() - began < 5

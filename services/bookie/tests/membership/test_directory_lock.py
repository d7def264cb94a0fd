"""DirectoryLock: two bookies never use the same directory at the same time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_bookie.membership.directory_lock import DirectoryInUse, DirectoryLock

HOLDER = """
import sys
from bindery_bookie.membership.directory_lock import DirectoryLock
lock = DirectoryLock()
lock.take(sys.argv[1:])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directories(tmp_path: Path) -> list[str]:
    made = [str(tmp_path / name) for name in ("journal", "ledgers")]
    for directory in made:
        os.makedirs(f"{directory}/current")
    return made


def test_the_second_process_is_refused_with_the_pid_of_the_first_until_that_is_killed(directories: list[str]) -> None:
    command = [sys.executable, "-c", HOLDER, *directories]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        second = DirectoryLock()
        with pytest.raises(DirectoryInUse, match=rf"another bookie \(pid {holder.pid}\) uses {directories[1]}: "):
            second.take(reversed(directories))
        holder.kill()
    second.take(directories)
    second.release()


def test_a_refused_lock_leaves_no_directory_locked(directories: list[str]) -> None:
    first, second, third = DirectoryLock(), DirectoryLock(), DirectoryLock()
    first.take(directories[1:])
    with pytest.raises(DirectoryInUse):
        second.take(directories)
    third.take(directories[:1])
    third.release()
    first.release()
    second.take(directories)
    second.release()


def test_an_invisible_holder_is_reported_without_pid(directories: list[str], tmp_path: Path) -> None:
    first = DirectoryLock()
    first.take(directories)
    inode = os.stat(f"{directories[0]}/current").st_ino
    for text in (None, "", "rubbish\n", f"1: FLOCK ADVISORY WRITE 0 fe:00:{inode} 0 EOF\n"):
        locks = tmp_path / "locks"
        if text is not None:
            locks.write_text(text)
        with pytest.raises(DirectoryInUse, match=r"^another bookie uses"):
            DirectoryLock(locks=locks).take(directories)
    first.release()


def test_a_file_system_that_supports_no_locks_is_used_without_locks(
    directories: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    DirectoryLock().take(directories)


def test_the_error_of_a_missing_directory_contains_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        DirectoryLock().take([str(tmp_path)])
    assert found.value.filename == f"{tmp_path}/current"

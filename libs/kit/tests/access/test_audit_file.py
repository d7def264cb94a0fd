"""The file of an audit log: rotation, torn lines, permissions."""

import os
from pathlib import Path
from typing import Any

import pytest
from bindery_core.errors import BadRequest
from bindery_kit.access.audit_file import AuditFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def test_lines_are_appended_to_a_file_that_only_its_owner_can_read(path: Path):
    file = AuditFile(str(path), is_synced=True)
    file.open()
    file.append(b"one\n")
    file.append(b"two\nthree\n")
    file.close()
    again = AuditFile(str(path), is_synced=False)
    again.append(b"four\n")
    again.close()
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
def test_a_file_that_was_moved_is_created_again(path: Path, how: str):
    file = AuditFile(str(path), is_synced=False)
    file.append(b"one\n")
    moved = path.with_suffix(".1")
    if how == "removed":
        path.unlink()
    else:
        path.rename(moved)
        if how == "replaced":
            path.write_bytes(b"")
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"two\n"
    if how != "removed":
        assert moved.read_bytes() == b"one\n"


def test_a_truncated_file_is_appended_to_at_its_new_end(path: Path):
    file = AuditFile(str(path), is_synced=False)
    file.append(b"one\n")
    os.truncate(path, 0)
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"two\n"


def test_a_torn_line_does_not_damage_the_next(path: Path, monkeypatch: pytest.MonkeyPatch):
    file = AuditFile(str(path), is_synced=False)
    file.open()
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    file.append(b"a whole line in pieces\n")

    def full(fd: int, data: Any) -> int:
        monkeypatch.setattr(os, "write", fail)
        return real(fd, data[:4])

    def fail(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"torn line\n")
    monkeypatch.setattr(os, "write", real)
    file.append(b"next\n")
    file.append(b"last\n")
    file.close()
    assert path.read_bytes() == b"a whole line in pieces\ntorn\nnext\nlast\n"


@pytest.mark.parametrize(("before", "between"), [(b"one\ntw", b"\n"), (b"one\n", b""), (b"", b"")])
def test_a_line_that_a_crash_tore_is_ended_by_the_next_process(path: Path, before: bytes, between: bytes):
    path.write_bytes(before)
    file = AuditFile(str(path), is_synced=False)
    file.open()
    assert path.read_bytes() == before  # a start alone writes nothing
    file.append(b"three\n")
    file.append(b"four\n")
    file.close()
    assert path.read_bytes() == before + between + b"three\nfour\n"


def test_a_file_that_cannot_be_opened_is_refused_with_the_setting(tmp_path: Path):
    for path in (tmp_path, tmp_path / "none" / "audit.log", "a\0b"):
        with pytest.raises(BadRequest, match=r"cannot open the audit log: .*audit_log\.file"):
            AuditFile(str(path), is_synced=False).open()


def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="cannot open the audit log"):
        AuditFile(str(tmp_path / "pipe"), is_synced=False).open()


def test_standard_error_is_not_closed(capfd: pytest.CaptureFixture[str]):
    file = AuditFile("-", is_synced=True)
    file.open()
    file.append(b"one\n")
    file.close()
    file.append(b"two\n")
    assert capfd.readouterr().err == "one\ntwo\n"

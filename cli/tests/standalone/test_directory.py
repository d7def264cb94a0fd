"""The data directory of a standalone cluster: lock, state file, control socket, logs."""

import os
from pathlib import Path

import pytest
from bindery.standalone.directory import AlreadyRunning, DataDirectory, State


def test_a_second_supervisor_on_the_same_data_is_refused(tmp_path: Path) -> None:
    first, second = DataDirectory(tmp_path), DataDirectory(tmp_path)
    first.create()
    first.acquire()
    assert second.is_held
    with pytest.raises(AlreadyRunning, match="standalone stop --data"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    assert not first.is_held


def test_a_damaged_state_file_counts_as_none(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    (directory.run / "state.json").write_text('{"held": ')
    assert directory.load_state() == State()


def test_an_overlong_path_still_has_a_control_socket(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / ("long" * 30))
    directory.create()
    assert len(os.fsencode(directory.control_socket)) < 104
    assert DataDirectory(tmp_path / ("long" * 30)).control_socket == directory.control_socket


def test_the_log_of_a_run_starts_where_the_run_started(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    directory.log_file("x").write_text("old\nnew 1\nnew 2\n")
    assert directory.log_tail("x", lines=5, since=4) == ["new 1", "new 2"]
    assert directory.log_tail("x", lines=1) == ["new 2"]
    assert directory.log_tail("missing", lines=1) == []

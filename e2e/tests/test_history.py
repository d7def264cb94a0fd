"""Goal: written records can be read, however the writer ended; invalid files are refused with the line."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_e2e.judging.history import ERROR_LENGTH_MAX, History, HistoryError, read_history


def write(path: Path) -> History:
    ticks = itertools.count(1_000)
    return History(path, facts={"seed": 7}, clock=lambda: next(ticks), wall=lambda: 5_000_000)


def test_written_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h.jsonl"
    with write(path) as history:
        n = history.invoke("produce", "p0", topic="t", sequences=[0], sizes=[3], digests=["é"])
        history.ok(n, ids=["1:0:-1:-1"])
        history.failed(history.invoke("ack", "c", topic="t", subscription="s", ids=["1:0"]), "x" * 10_000)
        history.unknown(history.invoke("receive", "c", topic="t", subscription="s", kind="shared"), "cut")
        history.observe("note", text="line\nbreak")
    records = list(read_history(path))
    assert [record.type for record in records] == [
        "run", "invoke", "ok", "invoke", "failed", "invoke", "unknown", "observation",
    ]  # fmt: skip
    assert [record.n for record in records] == [0, 1, 1, 2, 2, 3, 3, 0]
    assert [record.at for record in records] == list(range(1_000, 1_008))
    assert {record.wall for record in records} == {5}
    assert records[0].values == {"version": 1, "seed": 7}
    assert records[1].values["digests"] == ["é"]
    assert len(records[4].values["error"]) == ERROR_LENGTH_MAX


def test_the_outcome_of_a_fault_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with write(path) as history:
        with history.fault("kill", "bookie-0", entries_copied_max=0) as fault:
            fault.measured(entries_copied=3)
        with history.fault("stop node", "node-1") as fault:
            fault.not_offered("no such tool here")
        with pytest.raises(RuntimeError), history.fault("scale", "bookies"):
            raise RuntimeError("it did not come back")
    ends = [record.values for record in read_history(path) if record.type == "fault-end"]
    assert ends == [
        {"outcome": "ok", "entries_copied": 3},
        {"outcome": "not offered", "detail": "no such tool here"},
        {"outcome": "failed", "detail": "RuntimeError: it did not come back"},
    ]


def test_each_line_is_written_at_once_and_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    program = (
        "import pathlib, sys, time; from bindery_e2e.judging.history import History\n"
        "history = History(pathlib.Path(sys.argv[1]))\n"
        "history.observe('note', text='the last words'); print('written', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [record.values.get("text") for record in read_history(path)] == [None, "the last words"]


def test_an_incomplete_last_line_is_ignored_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with write(path) as history:
        history.observe("note", text="first")
        history.observe("note", text="second")
    whole = path.read_bytes()
    keep = len(whole.rstrip(b"\n").rpartition(b"\n")[0]) + 1
    for size in range(keep, len(whole)):
        path.write_bytes(whole[:size])
        assert len(list(read_history(path))) == 2


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"7", b"{}", b'{"type":"odd","at":1,"wall":1}', b'{"type":"ok","at":"1","wall":1,"n":1}', b"\xff"],
)
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    write(path).close()
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(HistoryError, match="line 2 is no record"):
        list(read_history(path))


def test_a_file_without_the_first_line_of_a_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    for first in ({"type": "run", "at": 1, "wall": 1, "version": 2}, {"type": "ok", "at": 1, "wall": 1, "n": 1}):
        path.write_text(json.dumps(first) + "\n")
        with pytest.raises(HistoryError, match="no beginning of a history"):
            list(read_history(path))


def test_a_history_is_never_appended_to_by_another_run(tmp_path: Path) -> None:
    write(tmp_path / "h.jsonl").close()
    with pytest.raises(FileExistsError):
        write(tmp_path / "h.jsonl")

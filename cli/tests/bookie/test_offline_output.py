"""Lines of commands that read the files of a bookie."""

from typing import Any

import pytest
from bindery.bookie import offline_output
from bindery.bookie.offline_output import dump_line, results_only, step_lines, warn_if_running


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"what": "log", "path": "/l/1.log", "size": 5}, "/l/1.log size=5"),
        ({"what": "record", "kind": "entry", "offset": 64, "size": 5}, "  entry offset=64 size=5"),
        ({"what": "run", "first": 1}, "  run first=1"),
        ({"what": "end"}, "end"),
        ({"what": "record", "kind": "entry", "offset": 64, "problem": "cut off"}, "DAMAGED   entry offset=64: cut off"),
        ({"what": "log", "path": "/l", "kind": "k", "problem": "bad"}, "DAMAGED /l: bad"),
    ],
)
def test_a_record_is_one_line(facts: dict[str, Any], line: str) -> None:
    assert dump_line(facts) == line


STEP = {"path": "/l/1.log", "offset": 64, "problem": "cut off", "moved_to": "/q/1"}


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({"is_copy": True, "done": True}, ["  copied to /q/1", "  the shard is in limbo"]),
        ({"is_copy": False, "done": True}, ["  moved to /q/1", "  the shard is in limbo"]),
        ({"is_copy": False, "done": False}, ["  to be moved to /q/1", "  the shard goes into limbo"]),
        ({"moved_to": None, "done": False}, ["  the shard goes into limbo"]),
    ],
)
def test_a_step_of_a_salvage_tells_what_happens(more: dict[str, Any], lines: list[str]) -> None:
    assert step_lines({**STEP, **more}) == ["/l/1.log at 64: cut off", *lines]


@pytest.mark.parametrize(
    ("running", "err"),
    [
        ("", ""),
        ("bookie b0 runs on /l", "bookie b0 runs on /l: entries that it stores at this moment may be missing here\n"),
    ],
)
def test_a_running_bookie_is_a_warning(
    running: str, err: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offline_output, "running_on", lambda places: running)
    warn_if_running([])
    assert capsys.readouterr() == ("", err)


def test_only_errors_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[dict[str, str]] = []
    monkeypatch.setattr(offline_output.logs, "configure", lambda **options: levels.append(options))
    results_only()
    assert levels == [{"service": "cli", "level": "error"}]

"""The progress bar: for terminals and long work only, and gone without a trace at the end."""

import io
import sys

import pytest
from bindery.common.progress import SHOWN_FROM, WIDTH, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> str:
    """What a terminal's line shows after `written`."""
    line = ""
    for part in written.split("\r"):
        line = part + line[len(part) :]
    return line


def test_it_shows_how_far_it_is_and_leaves_the_line_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(SHOWN_FROM, "entries")
    progress.update(SHOWN_FROM // 2, "12 bad")
    assert screen(terminal.getvalue()) == f"[{'#' * (WIDTH // 2)}{'.' * (WIDTH // 2)}] 500/1000 entries, 12 bad"
    progress.update(SHOWN_FROM)
    assert screen(terminal.getvalue()).rstrip() == f"[{'#' * WIDTH}] 1000/1000 entries"
    progress.clear()
    assert screen(terminal.getvalue()).strip() == ""


@pytest.mark.parametrize(("total", "stderr"), [(SHOWN_FROM, io.StringIO()), (SHOWN_FROM - 1, Terminal())])
def test_it_is_silent_in_pipes_and_for_short_work(
    total: int, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = Progress(total, "entries")
    progress.update(total)
    progress.clear()
    assert stderr.getvalue() == ""

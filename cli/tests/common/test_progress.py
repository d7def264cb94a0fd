"""Progress on stderr: a bar or a line that is removed at the end; occasional lines or nothing in pipes."""

import io
import re
import sys

import pytest
from bindery.common import progress as progress_module
from bindery.common.progress import REDRAW_INTERVAL_S, SHOWN_FROM, WIDTH, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr. A fixture cannot do that: pytest sets stderr again between the set-up and the test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return found


def drawn(terminal: Terminal) -> str:
    """Return the text written since the last call, without control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    terminal.truncate(0)
    terminal.seek(0)
    return text.strip()


def test_a_bar_shows_the_progress_and_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    clock = Clock()
    progress = Progress(SHOWN_FROM, "entries", clock=clock)
    progress.update(SHOWN_FROM // 2, "12 bad")
    bar, _, text = drawn(terminal).partition(" ")
    assert (len(bar), text) == (WIDTH, "500/1000 entries, 12 bad")
    progress.update(SHOWN_FROM // 2 + 1)
    assert drawn(terminal) == "", "redrawn too soon"
    clock.now += REDRAW_INTERVAL_S
    progress.update(SHOWN_FROM // 2 + 1)
    assert "501/1000" in drawn(terminal)
    progress.update(SHOWN_FROM)
    assert "1000/1000 entries" in drawn(terminal)
    progress.clear()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K"), "the line is erased"


def test_a_line_is_replaced_by_the_next_and_a_message_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    clock = Clock()
    progress = Progress(clock=clock)
    progress.show("5 nodes")
    assert drawn(terminal) == "5 nodes"
    clock.now += 1
    progress.show("9 nodes")
    assert "\x1b[2K" in terminal.getvalue()
    assert drawn(terminal) == "9 nodes"
    progress.say("done")
    assert drawn(terminal).endswith("done")


@pytest.mark.parametrize(("total", "stderr"), [(SHOWN_FROM, io.StringIO()), (SHOWN_FROM - 1, Terminal())])
def test_no_bar_is_shown_in_pipes_and_for_short_work(
    total: int, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = Progress(total, "entries")
    progress.update(total)
    progress.clear()
    assert stderr.getvalue() == ""


def test_a_pipe_gets_a_line_at_most_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, clock = io.StringIO(), Clock()
    monkeypatch.setattr(sys, "stderr", pipe)
    progress = Progress(clock=clock)
    for count in range(11):
        progress.show(f"{count} nodes")
        clock.now += progress_module.LINE_INTERVAL_S / 5
    assert pipe.getvalue() == "5 nodes\n10 nodes\n"


def test_quiet_progress_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    progress = Progress(SHOWN_FROM, "entries", is_quiet=True)
    progress.update(SHOWN_FROM)
    progress.show("line")
    progress.say("message")
    progress.clear()
    assert terminal.getvalue() == ""

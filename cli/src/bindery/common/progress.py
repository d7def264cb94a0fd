"""Progress on stderr: one line that is replaced on a terminal, an occasional line or nothing elsewhere.

`update` shows a bar for work of a known amount. The bar appears only on a terminal and only from `SHOWN_FROM` steps,
because shorter work is over before it can be read. `show` replaces the line by a text; if stderr is no terminal, the
text is printed at most once per `LINE_INTERVAL_S`. `say` prints a line that stays. Call `clear` before printing to
stdout and at the end.
"""

import sys
import time
from typing import TYPE_CHECKING, Final

from bindery_core.sources import MonotonicClock

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

SHOWN_FROM: Final = 1000
"""Minimum number of steps for which a bar is shown."""
WIDTH: Final = 30
"""Width of the bar in characters."""
LINE_INTERVAL_S: Final = 5.0
"""Minimum interval in seconds between two lines of progress if stderr is no terminal."""
REDRAW_INTERVAL_S: Final = 0.1
"""Minimum interval in seconds between two updates of the progress line on a terminal."""


class Progress:
    """Progress of one command. `is_quiet` (as with --json) suppresses all of it."""

    def __init__(
        self, total: int = 0, unit: str = "", *, is_quiet: bool = False, clock: MonotonicClock = time.monotonic
    ) -> None:
        self._total = total
        self._unit = unit
        self._is_quiet = is_quiet
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._live: Live | None = None
        self._last = ""
        self._drawn_at = float("-inf")
        self._printed_at = clock()

    def update(self, done: int, note: str = "") -> None:
        """Show `done` of the total number of steps as a bar, and `note` behind it."""
        if self._is_quiet or not self._is_terminal or self._total < SHOWN_FROM:
            return
        if done < self._total and self._clock() - self._drawn_at < REDRAW_INTERVAL_S:
            return
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        text = f"{done}/{self._total} {self._unit}{note and ', ' + note}"
        grid.add_row(ProgressBar(total=self._total, completed=done, width=WIDTH), text)
        self._draw(grid)

    def show(self, line: str) -> None:
        """Replace the progress line by `line`."""
        if self._is_quiet or line == self._last:
            return
        if self._is_terminal:
            if self._clock() - self._drawn_at < REDRAW_INTERVAL_S:
                return
            from rich.text import Text

            self._draw(Text(line, no_wrap=True, overflow="ellipsis"))
        elif self._clock() - self._printed_at >= LINE_INTERVAL_S:
            print(line, file=sys.stderr, flush=True)
            self._printed_at = self._clock()
        self._last = line

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if not self._is_quiet:
            self.clear()
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the progress line from the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._last = ""

    def _draw(self, shown: "RenderableType") -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=sys.stderr, force_terminal=True, highlight=False),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(shown, refresh=True)
        self._drawn_at = self._clock()

"""A progress bar on stderr, for people who wait: nothing where stderr is no terminal, nothing for short work."""

import sys
from typing import Final

SHOWN_FROM: Final = 1000
"""Steps. Less is over before one could read it."""
WIDTH: Final = 30


class Progress:
    """`update` after each part, `clear` before other output goes to the terminal and at the end."""

    def __init__(self, total: int, unit: str) -> None:
        self._total = total
        self._unit = unit
        self._is_shown = total >= SHOWN_FROM and sys.stderr.isatty()
        self._size = 0

    def update(self, done: int, note: str = "") -> None:
        if not self._is_shown:
            return
        filled = WIDTH * done // self._total
        line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{self._total} {self._unit}{note and ', ' + note}"
        print("\r" + line.ljust(self._size), end="", file=sys.stderr, flush=True)
        self._size = len(line)

    def clear(self) -> None:
        if self._size:
            print("\r" + " " * self._size + "\r", end="", file=sys.stderr, flush=True)
            self._size = 0

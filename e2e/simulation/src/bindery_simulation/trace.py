"""Record the events of a simulated run with their time and place. Equal seeds give equal traces.

Events are converted to text only when they are read, so that recording costs little.
"""

import hashlib
from typing import Any


class Trace:
    """Events in their order. `is_on=False`: nothing is recorded."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.now = 0.0
        """Simulated time in seconds, updated by the loop."""
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []

    def add(self, where: str, what: str, /, **facts: Any) -> None:
        if self.is_on:
            self.events.append((self.now, where, what, facts))

    def lines(self) -> list[str]:
        return [_line(event) for event in self.events]

    def digest(self) -> str:
        """Return the SHA-256 of all lines. Equal digests mean equal runs."""
        found = hashlib.sha256()
        for event in self.events:
            found.update(_line(event).encode())
        return found.hexdigest()


def _line(event: tuple[float, str, str, dict[str, Any]]) -> str:
    at, where, what, facts = event
    text = "".join(f" {name}={value}" for name, value in facts.items())
    return f"{at:11.6f} {where:<10} {what}{text}\n"

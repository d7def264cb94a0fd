"""Trace: what happened in a simulated run, when and where; equal for equal seeds.

An event is kept as it came and made text only when somebody reads it, so that a run that is not looked at costs little.
"""

import hashlib
from typing import Any


class Trace:
    """Events in the order in which they happened. `is_on=False`: nothing is kept."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.now = 0.0
        """Simulated seconds; kept up by the loop."""
        self.events: list[tuple[float, str, str, dict[str, Any]]] = []

    def add(self, where: str, what: str, /, **facts: Any) -> None:
        if self.is_on:
            self.events.append((self.now, where, what, facts))

    def lines(self) -> list[str]:
        return [_line(event) for event in self.events]

    def digest(self) -> str:
        """SHA-256 over the text: two runs with the same digest were the same."""
        found = hashlib.sha256()
        for event in self.events:
            found.update(_line(event).encode())
        return found.hexdigest()


def _line(event: tuple[float, str, str, dict[str, Any]]) -> str:
    at, where, what, facts = event
    told = "".join(f" {name}={value}" for name, value in facts.items())
    return f"{at:11.6f} {where:<10} {what}{told}\n"

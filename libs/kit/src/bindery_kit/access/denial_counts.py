"""DenialCounts: bound the lines about refused requests, so that nobody can fill a disk with them.

Time is divided into windows of WINDOW_S, which begin with the first refusal after the last one ended:

| refusal in a window                                                       | result                          |
|---------------------------------------------------------------------------|---------------------------------|
| one of the first LINES_PER_ADDRESS_MAX of its address, and of the first   | a line of its own               |
| LINES_MAX of all addresses                                                |                                 |
| any other of one of the first ADDRESSES_MAX addresses                     | counted for its address         |
| of another address                                                        | counted together (OTHERS)       |

At the end of a window there is one count for each of the REPORTED_MAX addresses with the most counted refusals, and one
for all others. A window therefore has at most LINES_MAX + REPORTED_MAX + 1 lines. Pure: the caller has the clock.
"""

import heapq
from typing import Final

WINDOW_S: Final = 60.0
"""Length of a window in seconds."""
LINES_PER_ADDRESS_MAX: Final = 20
LINES_MAX: Final = 300
ADDRESSES_MAX: Final = 1_000
"""Maximum number of addresses that are counted separately, which bounds the memory."""
REPORTED_MAX: Final = 100
OTHERS: Final = "others"
"""Stands for all addresses that are not counted or reported separately."""


class DenialCounts:
    """Addresses are those of `bindery_kit.limits.address_counts.group_of`."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._lines = 0
        self._seen: dict[str, int] = {}
        """Refusals by address in this window."""
        self._left_out: dict[str, int] = {}
        self._left_out_of_others = 0

    @property
    def ends_s(self) -> float | None:
        """When the window ends; None if there is none."""
        return None if self._began_s is None else self._began_s + WINDOW_S

    def admit(self, address: str, *, now_s: float) -> bool:
        """Count a refusal. Return whether it gets a line of its own. Call `end` first if the window is over."""
        if self._began_s is None:
            self._began_s = now_s
        seen = self._seen.get(address)
        if seen is None:
            if len(self._seen) >= ADDRESSES_MAX:
                self._left_out_of_others += 1
                return False
            seen = 0
        self._seen[address] = seen + 1
        if seen < LINES_PER_ADDRESS_MAX and self._lines < LINES_MAX:
            self._lines += 1
            return True
        self._left_out[address] = self._left_out.get(address, 0) + 1
        return False

    def end(self) -> list[tuple[str, int]]:
        """End the window. Return the refusals without a line: (address, number), most first, OTHERS last."""
        shown = heapq.nlargest(REPORTED_MAX, self._left_out.items(), key=lambda one: one[1])
        others = self._left_out_of_others + sum(self._left_out.values()) - sum(count for _, count in shown)
        self.__init__()  # type: ignore[misc]
        return [*shown, (OTHERS, others)] if others else shown

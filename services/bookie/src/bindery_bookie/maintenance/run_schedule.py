"""Decide when garbage collection lists the metadata again. Pure.

A listing reads the children of all znodes of ledgers, so it must be rare in a large cluster; in a small one it costs
little, and space comes back soon only if it is frequent. The wait after a run is

| situation                                                   | wait                                                |
|-------------------------------------------------------------|-----------------------------------------------------|
| the run deleted ledgers                                     | `wait_min_s`                                        |
| it deleted none, or failed                                  | twice the wait before, at most `wait_max_s`         |
| `written_max` bytes were written since: any may be deleted  | over                                                |
| in all cases                                                | at least COST_PARTS times the duration of the run,  |
|                                                             | at most `wait_max_s`                                |

So at most `written_max` bytes are written and deleted between two listings, unless listings are slow.
"""

from typing import Final

COST_PARTS: Final = 30
"""Runs take at most about this part of the time: a run that takes three seconds, for some hundred thousand ledgers, is
repeated after a minute and a half."""


class RunSchedule:
    """Times are seconds. Invariant: 0 < `wait_s` <= wait_max_s."""

    def __init__(self, *, wait_min_s: float, wait_max_s: float, written_max: int) -> None:
        """`written_max`: bytes, summed over all shards."""
        self._max_s = wait_max_s
        self._min_s = min(wait_min_s, wait_max_s)
        self._written_max = written_max
        self._floor_s = self._unhurried_s = self._min_s

    @property
    def wait_s(self) -> float:
        """Wait before the next run, if little is written."""
        return max(self._unhurried_s, self._floor_s)

    @property
    def check_s(self) -> float:
        """Seconds between two checks whether a run is due."""
        return self._floor_s

    def is_due(self, *, waited_s: float, written: int) -> bool:
        """`waited_s`, `written`: time and bytes since the last run."""
        return waited_s >= self.wait_s or (waited_s >= self._floor_s and written >= self._written_max)

    def run_ended(self, *, seconds: float, deleted: int) -> None:
        """`deleted`: number of ledgers; 0 after a failure."""
        self._floor_s = min(max(self._min_s, COST_PARTS * seconds), self._max_s)
        self._unhurried_s = self._min_s if deleted else min(2 * self._unhurried_s, self._max_s)

"""Divide the ledgers of a run into groups. Each group is read, checked and stored before the next one. Pure.

A group is a range of ledger ids. The groups cover all ids from the first to the last one selected, so they include
orphaned data of ledgers that do not exist. Ledgers that need not be read (recently verified, or not selected) become a
gap only if that saves more than GAP_BYTES, because each group takes extra time.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bindery_core.ids import ID_MAX

GROUP_BYTES_MIN: Final = 2**30
"""Minimum payload bytes per group, because the checks of each group take seconds of processor time, whatever its
size."""
GROUP_BYTES_MAX: Final = 4 * 2**30
"""Maximum payload bytes per group, over all copies."""
GROUP_COPIES_MAX: Final = 8_000_000
"""Maximum copies per group. About 20 bytes of each are in memory while the group is checked."""
GROUPS_WANTED: Final = 10
"""Target number of groups; an interrupted run loses the work on one. Small plans have fewer groups."""
GAP_BYTES: Final = 256 * 2**20
"""Payload bytes of skipped ledgers above which they become a gap between groups."""
ENTRY_BYTES_GUESSED: Final = 1024
"""Assumed payload size in bytes of entries of ledgers that are not closed."""
OPEN_ENTRIES_GUESSED: Final = 1_000
"""Assumed number of entries of a ledger that is not closed."""


@dataclass(frozen=True, slots=True)
class PlannedLedger:
    """A ledger and the amount of data to read for it."""

    ledger_id: int
    copies: int
    """Entries times write quorum; an estimate if the ledger is not closed."""
    size: int
    """Payload size in bytes of all copies."""
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """A range of ledgers that are read, checked and stored together."""

    number: int
    first: int
    last: int
    """`first` and `last`: ledger ids, inclusive."""
    ledgers: int
    copies: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The groups of a run, in ascending order of ledger ids."""

    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    def covers(self, ledger_id: int) -> bool:
        """Whether a group reads this ledger. Groups may include ledgers that are not wanted, instead of a gap."""
        at = bisect_right(self.groups, ledger_id, key=lambda group: group.first) - 1
        return at >= 0 and ledger_id <= self.groups[at].last

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(group) for group in self.groups]

    @classmethod
    def from_json(cls, groups: Iterable[dict[str, Any]]) -> "Plan":
        return cls(tuple(Group(**fields) for fields in groups))


def planned(row: Any, *, is_wanted: bool = True) -> PlannedLedger:
    """The size of a ledger, from its row of LEDGERS. If its metadata is unreadable, there is nothing to read."""
    if row.problem is not None:
        return PlannedLedger(row.ledger_id, 0, 0)
    copies, size = (
        row.write_quorum * OPEN_ENTRIES_GUESSED,
        row.write_quorum * OPEN_ENTRIES_GUESSED * ENTRY_BYTES_GUESSED,
    )
    if row.state == "closed" and row.last_entry_id is not None:
        copies = (row.last_entry_id + 1) * row.write_quorum
        size = (row.length or 0) * row.write_quorum
    return PlannedLedger(row.ledger_id, copies, size, is_wanted)


def make_plan(
    ledgers: Sequence[PlannedLedger], *, first: int = 0, last: int = ID_MAX, group_bytes: int | None = None
) -> Plan:
    """Make groups that cover first..last except for gaps. `ledgers`: ascending by id, within this range. `group_bytes`:
    maximum payload bytes per group; None: derived from GROUPS_WANTED."""
    wanted_size = sum(ledger.size for ledger in ledgers if ledger.is_wanted)
    size_max = group_bytes or min(GROUP_BYTES_MAX, max(GROUP_BYTES_MIN, wanted_size // GROUPS_WANTED))
    groups: list[Group] = []
    held: list[PlannedLedger] = []
    start = first
    gap: list[PlannedLedger] = []

    def close(end: int) -> None:
        nonlocal held
        if held or start <= end:
            copies, size = sum(one.copies for one in held), sum(one.size for one in held)
            groups.append(Group(len(groups), start, end, len(held), copies, size))
        held = []

    for ledger in ledgers:
        if not ledger.is_wanted:
            gap.append(ledger)
            continue
        if sum(one.size for one in gap) > GAP_BYTES:
            if held:
                close(held[-1].ledger_id)
            start = gap[-1].ledger_id + 1
        elif gap:
            held += gap
        gap = []
        is_full = sum(one.size for one in held) + ledger.size > size_max
        if held and (is_full or sum(one.copies for one in held) + ledger.copies > GROUP_COPIES_MAX):
            close(held[-1].ledger_id)
            start = groups[-1].last + 1
        held.append(ledger)
    saves = sum(one.size for one in gap) > GAP_BYTES
    if held or not gap:
        close(held[-1].ledger_id if saves else last)
    return Plan(tuple(groups))


def batches(ledgers: Iterable[PlannedLedger], *, ledgers_max: int) -> Iterator[list[int]]:
    """Yield the ids of `ledgers` in their order, in parts that are small enough to be checked at once."""
    held: list[PlannedLedger] = []
    for ledger in ledgers:
        copies, size = sum(one.copies for one in held), sum(one.size for one in held)
        is_full = copies + ledger.copies > GROUP_COPIES_MAX or size + ledger.size > GROUP_BYTES_MAX
        if held and (is_full or len(held) >= ledgers_max):
            yield [one.ledger_id for one in held]
            held = []
        held.append(ledger)
    if held:
        yield [one.ledger_id for one in held]

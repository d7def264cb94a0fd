"""Write sets: which bookies of an ensemble hold an entry.

Entry e of an ensemble of E bookies with write quorum Qw is stored at the indexes (e + i) mod E, i = 0 .. Qw - 1, in
that order. E=4 Qw=3: entry 0 on 0 1 2, entry 1 on 1 2 3, entry 2 on 2 3 0, entry 3 on 3 0 1, entry 4 as entry 0.

Functions that compare many sets represent each as an int, in which bit i stands for ensemble index i.
Source: BookKeeper RoundRobinDistributionSchedule.
"""

from collections.abc import Sequence
from functools import lru_cache


def write_set(*, entry_id: int, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the ensemble indexes that hold `entry_id` (>= 0), in the order in which they are read."""
    assert entry_id >= 0
    return _rotations(ensemble_size, write_quorum)[entry_id % ensemble_size]


def write_set_masks(*, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    """Return the write set as bits for each entry id modulo the ensemble size."""
    return _masks(ensemble_size, write_quorum)


def write_set_contains(index: int, *, entry_id: int, ensemble_size: int, write_quorum: int) -> bool:
    """Return whether ensemble index `index` holds `entry_id`."""
    return (index - entry_id) % ensemble_size < write_quorum


def entries_of(index: int, *, first: int, last: int, ensemble_size: int, write_quorum: int) -> Sequence[int]:
    """Return the entry ids within first..last that ensemble index `index` holds, ascending.

    `last` is inclusive; the range may be empty.
    """
    assert 0 <= index < ensemble_size
    assert first >= 0
    if write_quorum == ensemble_size:
        return range(first, last + 1)
    return [entry_id for entry_id in range(first, last + 1) if (index - entry_id) % ensemble_size < write_quorum]


def entry_count_of(index: int, *, first: int, last: int, ensemble_size: int, write_quorum: int) -> int:
    """Return the number of ids in `entries_of`, without listing them."""
    rounds, rest = divmod(max(0, last - first + 1), ensemble_size)
    return rounds * write_quorum + sum(
        (index - entry_id) % ensemble_size < write_quorum for entry_id in range(last - rest + 1, last + 1)
    )


@lru_cache(maxsize=256)
def _rotations(ensemble_size: int, write_quorum: int) -> tuple[tuple[int, ...], ...]:
    assert 1 <= write_quorum <= ensemble_size
    return tuple(tuple((start + i) % ensemble_size for i in range(write_quorum)) for start in range(ensemble_size))


@lru_cache(maxsize=256)
def _masks(ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
    return tuple(sum(1 << index for index in indexes) for indexes in _rotations(ensemble_size, write_quorum))

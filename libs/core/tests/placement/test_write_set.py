"""Compare the functions for write sets with a slow implementation of their definition."""

import pytest
from bindery_core.placement.write_set import entries_of, entry_count_of, write_set, write_set_contains, write_set_masks

SIZES = [(e, w) for e in range(1, 7) for w in range(1, e + 1)]


def naive(entry_id: int, ensemble_size: int, write_quorum: int) -> list[int]:
    """Return the write set by rotating the list of indexes `entry_id` times."""
    ring = list(range(ensemble_size))
    for _ in range(entry_id):
        ring = [*ring[1:], ring[0]]
    return ring[:write_quorum]


def test_write_sets_of_four_bookies_with_write_quorum_three() -> None:
    """The example of docs/protocol.md, with bookies counted from 1: 1-2-3, 2-3-4, 3-4-1, 4-1-2, 1-2-3."""
    sets = [write_set(entry_id=entry_id, ensemble_size=4, write_quorum=3) for entry_id in range(5)]
    assert [tuple(index + 1 for index in indexes) for indexes in sets] == [
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 1),
        (4, 1, 2),
        (1, 2, 3),
    ]


@pytest.mark.parametrize(("ensemble_size", "write_quorum"), SIZES)
def test_all_functions_match_the_definition(ensemble_size: int, write_quorum: int) -> None:
    sizes = {"ensemble_size": ensemble_size, "write_quorum": write_quorum}
    masks = write_set_masks(**sizes)
    for entry_id in range(3 * ensemble_size):
        expected = naive(entry_id, ensemble_size, write_quorum)
        assert list(write_set(entry_id=entry_id, **sizes)) == expected
        assert masks[entry_id % ensemble_size] == sum(1 << index for index in expected)
        for index in range(ensemble_size):
            assert write_set_contains(index, entry_id=entry_id, **sizes) == (index in expected)


@pytest.mark.parametrize(("ensemble_size", "write_quorum"), SIZES)
def test_entries_of_an_index_have_the_index_in_their_write_set(ensemble_size: int, write_quorum: int) -> None:
    sizes = {"ensemble_size": ensemble_size, "write_quorum": write_quorum}
    for first in range(5):
        for last in range(first - 1, first + 14):
            for index in range(ensemble_size):
                expected = [e for e in range(first, last + 1) if index in naive(e, ensemble_size, write_quorum)]
                assert list(entries_of(index, first=first, last=last, **sizes)) == expected
                assert entry_count_of(index, first=first, last=last, **sizes) == len(expected)


def test_invalid_arguments_fail_an_assertion() -> None:
    with pytest.raises(AssertionError):
        write_set(entry_id=0, ensemble_size=2, write_quorum=3)
    with pytest.raises(AssertionError):
        write_set(entry_id=-1, ensemble_size=3, write_quorum=3)

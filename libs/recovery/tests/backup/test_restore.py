"""How a restore divides nodes into transactions."""

import pytest
from bindery_recovery.backup import restore
from bindery_recovery.backup.backup import BackedUpNode
from bindery_recovery.backup.restore import BATCH_NODES_MAX, BATCH_SIZE_MAX

OVERHEAD = 64
"""Bytes that a node counts besides its path and data."""


def nodes(*sizes: int) -> list[BackedUpNode]:
    """Return nodes of the given sizes in bytes. Besides OVERHEAD, a third of a size is the path."""
    found = []
    for size in sizes:
        path = (size - OVERHEAD) // 3
        found.append(BackedUpNode("/" * path, b"x" * (size - OVERHEAD - path), 0))
    return found


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([], []),
        ([BATCH_SIZE_MAX], [1]),
        ([BATCH_SIZE_MAX - 100, 100], [2]),
        ([BATCH_SIZE_MAX - 100, 101], [1, 1]),
        ([BATCH_SIZE_MAX - 100, 101, BATCH_SIZE_MAX - 101], [1, 2]),
        ([BATCH_SIZE_MAX - 100, 101, BATCH_SIZE_MAX - 100], [1, 1, 1]),
        ([BATCH_SIZE_MAX + 1, BATCH_SIZE_MAX + 1], [1, 1]),
        ([70] * BATCH_NODES_MAX, [BATCH_NODES_MAX]),
        ([70] * (2 * BATCH_NODES_MAX + 1), [BATCH_NODES_MAX, BATCH_NODES_MAX, 1]),
    ],
)
def test_a_transaction_ends_before_it_exceeds_a_limit(sizes: list[int], lengths: list[int]) -> None:
    given = nodes(*sizes)
    batches = list(restore._batches(given))
    assert [len(batch) for batch in batches] == lengths
    assert [node for batch in batches for node in batch] == given

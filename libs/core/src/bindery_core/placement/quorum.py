"""Quorum arithmetic: whether an entry is acknowledged, whether it still can be, and whether it never was.

With ensemble size E, write quorum Qw and ack quorum Qa an entry goes to Qw bookies and is acknowledged by Qa of them.

| question                                   | answer                                                               |
|--------------------------------------------|----------------------------------------------------------------------|
| is an entry acknowledged?                  | Qa members of its write set stored it                                |
| can it still be acknowledged?              | at most Qw - Qa members failed                                       |
| was an entry never acknowledged?           | Qw - Qa + 1 members of its write set do not have it                  |
| do the responses cover the ensemble?       | each window of Qw consecutive indexes has fewer than Qa silent ones  |

Source: BookKeeper protocol, "Closing a ledger as a reader"; RoundRobinDistributionSchedule.
"""

from collections.abc import Collection

from bindery_core.placement.write_set import write_set_masks


def is_covered(answered: Collection[int], *, ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return True if no entry can still reach its ack quorum with the bookies that have not replied.

    `answered`: ensemble indexes that replied definitely ("have it" or "never had it"); a timeout does not count.
    True once each write set has at least (write_quorum - ack_quorum) + 1 replies: too few members remain for a quorum.
    Source: BookKeeper protocol, "Closing a ledger as a reader".
    """
    silent = (1 << ensemble_size) - 1
    for index in answered:
        assert 0 <= index < ensemble_size
        silent &= ~(1 << index)
    masks = write_set_masks(ensemble_size=ensemble_size, write_quorum=write_quorum)
    return all((silent & mask).bit_count() < ack_quorum for mask in masks)


def can_be_covered(failed: Collection[int], *, ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
    """Return whether coverage is still possible if the indexes in `failed` never reply and all others do."""
    return is_covered(
        [index for index in range(ensemble_size) if index not in failed],
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
    )


def denials_needed(*, write_quorum: int, ack_quorum: int) -> int:
    """Return the number of "no such entry" replies of a write set that prove an entry was never acknowledged."""
    return write_quorum - ack_quorum + 1


def failures_bearable(*, write_quorum: int, ack_quorum: int) -> int:
    """Return the number of members of a write set that may fail while its entry can still be acknowledged."""
    return write_quorum - ack_quorum

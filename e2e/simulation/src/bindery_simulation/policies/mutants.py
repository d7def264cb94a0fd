"""Mutants of the policies. An invariant of `judge` must report each of them for some seed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from bindery_simulation.mutant import Kind, MutantTable, Trial
from bindery_simulation.policies import defects
from bindery_simulation.policies.world import FAULTS, run_seed
from bindery_simulation.runner import collect
from bindery_simulation.service.faults import Fault

COLLECT_EVERY: Final = 10
"""Number of seeds between two collections of garbage."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The faults to choose from; none: no faults."""

    faults: tuple[Fault, ...] = ()


def _trials(seeds: Iterable[int], conditions: Conditions) -> Iterator[Trial]:
    for number, seed in enumerate(seeds):
        violation = run_seed(seed, faults=conditions.faults).violation
        if number % COLLECT_EVERY == 0:
            collect()
        yield Trial(seed, 1, None if violation is None else violation.invariant, str(violation or ""))


CALM: Final = Conditions()
ANY: Final = Conditions(FAULTS)

# fmt: off
MUTANTS: Final[MutantTable[Conditions]] = MutantTable(Kind.POLICIES, _trials, (
    ("delay-does-not-count", "The time to live of a delayed message begins when it is published.",
     ("ttl-never-early", "trim-keeps-needed"), 0, CALM, defects.delay_does_not_count),
    ("delayed-never-expire", "A delayed message that was skipped once does not expire.",
     ("ttl-in-time",), 0, CALM, defects.delayed_never_expire),
    ("expires-at-half", "Messages expire after half of their time to live.",
     ("ttl-never-early", "trim-keeps-needed"), 0, CALM, defects.expires_at_half),
    ("retention-ignored", "Acknowledged ledgers are deleted, whatever the retention says.",
     ("retention-keeps",), 1, CALM, defects.retention_ignored),
    ("retention-needs-both", "A ledger is deleted only once it is too old and the topic is too large.",
     ("trim-in-time",), 3, CALM, defects.retention_needs_both),
    ("cursors-ignored", "Ledgers are deleted although subscriptions need them.",
     ("trim-keeps-needed", "no-crash"), 0, CALM, defects.cursors_ignored),
    ("trimmed-not-deleted", "Ledgers that a topic no longer names are not deleted.",
     ("no-leak",), 0, CALM, defects.trimmed_not_deleted),
    ("never-trimmed", "No ledger is trimmed.", ("trim-in-time",), 0, CALM, defects.open_ledger_is_kept),
    ("quota-ignored", "No quota refuses a message.", ("quota-refuses",), 2, CALM, defects.quota_ignored),
    ("quota-sticks", "A quota that was exceeded once refuses producers although the backlog is read.",
     ("quota-admits",), 2, CALM, defects.quota_sticks),
    ("evicts-all", "An eviction acknowledges the whole backlog.",
     ("ttl-never-early", "trim-keeps-needed"), 0, CALM, defects.evicts_all),
    ("evicts-nothing", "Backlogs above a quota stay as they are.", ("evict-in-time",), 14, CALM,
     defects.evicts_nothing),
    ("changes-ignored", "A loaded topic keeps the policies that it had when it was loaded.",
     ("ttl-in-time", "ttl-never-early", "quota-admits", "quota-refuses", "retention-keeps", "trim-in-time",
      "evict-in-time", "trim-keeps-needed"), 3, CALM, defects.changes_ignored),
    ("inactive-at-once", "A topic is deleted as soon as nobody is connected.",
     ("inactive-not-early",), 7, CALM, defects.inactive_at_once),
    ("inactive-with-backlog", "An inactive topic is deleted although a subscription has messages to read.",
     ("inactive-keeps-needed",), 10, CALM, defects.inactive_with_backlog),
    ("inactive-kept", "Inactive topics are kept.", ("inactive-in-time",), 8, CALM, defects.inactive_kept),
), unit="seeds")
# fmt: on

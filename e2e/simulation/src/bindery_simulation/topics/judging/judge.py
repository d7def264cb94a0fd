"""Judge a history: the names of the invariants, and what violates them.

| invariant                       | meaning                                                                        |
|---------------------------------|--------------------------------------------------------------------------------|
| acknowledged-is-delivered       | a message that was acknowledged to its producer is delivered to each            |
|                                 | subscription that existed, until it is acknowledged                             |
| no-delivery-after-durable-ack   | no delivery after an acknowledgement was answered, unless a seek undoes it      |
| nothing-invented                | a delivered message was sent, was not refused, and has one id                   |
| order-exclusive                 | Exclusive, Failover: the order of the topic between rewinds, without gaps       |
| order-per-key                   | Key_Shared: the order of each key, one consumer at a time                       |
| one-active-consumer             | Exclusive, Failover: one connected consumer receives                            |
| handover-waits                  | Failover: a new active consumer waits for acknowledgements of the former one    |
| one-lease                       | a message is held by one consumer                                               |
| never-early                     | no delayed message before its time                                              |
| redelivery-counts-never-go-down | redelivery counts do not decrease                                               |
| redelivery-counts-match-returns | returned messages count, and expired leases, and nothing else                   |
| seek-delivers-again             | a seek undoes acknowledgements from its target on                               |
| stale-owner-changes-nothing     | a broker that lost a topic carries out nothing                                  |
| trim-keeps-unacknowledged       | ledgers are deleted only once every subscription has acknowledged them          |
| one-copy                        | a message that was moved has exactly one copy in the topics of the moves        |
| move-loses-nothing              | a message that has no copy is delivered until it is acknowledged otherwise      |
| copies-in-order                 | the copies of one request have the order of the request                         |
| moved-is-not-delivered          | a message is not delivered once its copy is stored                              |

Outcomes that are unknown count in both ways: a message that may be acknowledged need not be delivered, and may be.
"""

from collections.abc import Callable, Iterator
from typing import Final

from bindery_simulation.topics.judging import completeness, delivery, moves, ownership
from bindery_simulation.topics.judging.facts import Facts
from bindery_simulation.topics.judging.history import Breach, History, Rules

Rule = Callable[[Facts, Rules], Iterator[Breach]]

INVARIANTS: Final[dict[str, Rule]] = {
    "nothing-invented": delivery.nothing_invented,
    "stale-owner-changes-nothing": ownership.stale_owner_changes_nothing,
    "trim-keeps-unacknowledged": completeness.trim_keeps_unacknowledged,
    "one-copy": moves.one_copy,
    "move-loses-nothing": moves.move_loses_nothing,
    "copies-in-order": moves.copies_in_order,
    "moved-is-not-delivered": moves.moved_is_not_delivered,
    "no-delivery-after-durable-ack": delivery.no_delivery_after_durable_ack,
    "order-exclusive": delivery.order_exclusive,
    "order-per-key": delivery.order_per_key,
    "one-active-consumer": delivery.one_active_consumer,
    "handover-waits": delivery.handover_waits,
    "one-lease": delivery.one_lease,
    "never-early": delivery.never_early,
    "redelivery-counts-never-go-down": delivery.redelivery_counts_never_go_down,
    "redelivery-counts-match-returns": delivery.redelivery_counts_match_returns,
    "seek-delivers-again": completeness.seek_delivers_again,
    "acknowledged-is-delivered": completeness.acknowledged_is_delivered,
}
"""The rules by name. The first rule that reports a breach names the violation of a run."""


def judge(history: History, rules: Rules | None = None) -> Iterator[Breach]:
    """Return the breaches of a history, in the order of INVARIANTS."""
    facts = Facts(history)
    for rule in INVARIANTS.values():
        yield from rule(facts, rules or Rules())

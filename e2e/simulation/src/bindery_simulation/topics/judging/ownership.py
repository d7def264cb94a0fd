"""Rules about brokers that lost a topic: they change nothing.

A broker that opens a topic fences its last ledger, writes its znode, and fences the ledgers of its cursors. Whatever
another broker starts after that must fail, unless it changes nothing.
"""

from collections.abc import Iterator

from bindery_simulation.topics.judging.facts import Facts, topic_of
from bindery_simulation.topics.judging.history import (
    Acknowledge,
    Breach,
    Call,
    Produce,
    Rules,
    Seek,
    Subscribe,
    Unsubscribe,
)


def stale_owner_changes_nothing(facts: Facts, _rules: Rules) -> Iterator[Breach]:
    """A broker does not carry out a request that it started after another broker had opened the topic.

    It may confirm an acknowledgement that was sent before, or of what a seek has skipped before: that may be stored
    already. Nor does it write znodes.
    """
    for call in facts.history.calls:
        if not call.is_done or call.started is None:
            continue
        after = facts.successor(topic_of(call), call.incarnation, call.started)
        if after is not None and _changes(facts, call):
            problem = f"{call} was carried out after incarnation {after} had opened the topic"
            yield Breach("stale-owner-changes-nothing", problem, (call.number,))
    owners: dict[str, str] = {}
    for written in facts.history.written:
        if written.cursor is None:
            owners[written.topic] = written.process
            continue
        owner = owners.get(written.topic, written.process)
        if owner != written.process:
            problem = f"{written.process} wrote cursor {written.cursor} of {written.topic}, which {owner} owns"
            yield Breach("stale-owner-changes-nothing", problem)


def _changes(facts: Facts, call: Call) -> bool:
    request = call.request
    if isinstance(request, Produce | Seek | Unsubscribe):
        return True
    if isinstance(request, Subscribe):
        return bool(call.result)
    if not isinstance(request, Acknowledge):
        return False
    life = facts.lives[request.subscription]
    for key in request.keys:
        message = facts.stored[life.id.topic].get(key)
        if message is not None and facts.may_be_skipped(life, message, call.sent):
            continue
        if not any(
            earlier is not call and earlier.sent < call.sent and (earlier.incarnation or 0) <= (call.incarnation or 0)
            for earlier in facts.acks_of(life, key)
        ):
            return True
    return False

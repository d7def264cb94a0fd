"""Judge a run: the names of the invariants, and what violates them. Pure.

| invariant             | meaning                                                                                      |
|-----------------------|----------------------------------------------------------------------------------------------|
| trim-keeps-needed     | no ledger is deleted while a subscription needs a message of it (1)                          |
| retention-keeps       | no ledger is deleted before the retention in force allows it (1)                             |
| trim-in-time          | what is acknowledged and not retained is deleted within DELAY_S (2)                          |
| no-leak               | a ledger that a topic no longer names is deleted, unless a fault may have prevented it (2)   |
| ttl-never-early       | nothing is acknowledged but by its consumer, after its time to live, or by an eviction that  |
|                       | leaves 90 % of the quota (2, 3)                                                              |
| ttl-in-time           | a message whose time to live is over is acknowledged within DELAY_S (2)                      |
| evict-in-time         | a backlog above a quota with eviction shrinks within DELAY_S (2)                             |
| quota-refuses         | nothing is stored while a quota is certainly exceeded (3)                                    |
| quota-admits          | no producer is refused unless a quota may be exceeded, and as its action says (3)            |
| inactive-not-early    | a topic is deleted only after it was unused for the time of the policy (4)                   |
| inactive-keeps-needed | no topic is deleted while a subscription needs a message of it, or, by the mode, while it    |
|                       | has a subscription (4)                                                                       |
| inactive-in-time      | an unused topic is deleted within DELAY_S (2)                                                |

Sources: Pulsar's (1) ManagedLedgerImpl.internalTrimLedgers, (3) BacklogQuotaManager, (4) PersistentTopic.checkGC;
(2) docs/policies.md.

The rules that demand something within a time apply only if nothing failed for CALM_S before.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bindery_simulation.policies.model import Action, Key, Message, Policy, Topic

DELAY_S: Final = 90.0
"""Maximum seconds until a broker has done what a policy demands: some rounds of maintenance, and reads that fail."""
CALM_S: Final = 240.0
"""Seconds after a fault until its consequences are certainly over: a restart, a lost session, a new owner."""
ANSWER_S: Final = 1.5
"""Maximum seconds by which a broker's check of a quota is older than its answer."""
LEAK_S: Final = 60.0
"""Seconds after which a ledger is deleted that a topic no longer names."""


class Breach(NamedTuple):
    invariant: str
    text: str


class Ledger(NamedTuple):
    """A ledger as the metadata of its topic describes it."""

    id: int
    size: int
    closed_s: float
    """When the metadata first had its size, or a later ledger; FOREVER: it is open."""
    followed_s: float
    """When the metadata first had a later ledger; FOREVER: it is the last one."""


class Trim(NamedTuple):
    at_s: float
    ledgers: tuple[Ledger, ...]
    """All ledgers before, the oldest first."""
    gone: tuple[int, ...]


class Seen(NamedTuple):
    """The entries that a subscription had not acknowledged."""

    subscription: str
    begin_s: float
    end_s: float
    keys: frozenset[Key]


class Write(NamedTuple):
    """An answer to a producer."""

    begin_s: float
    """When the broker began with the request."""
    end_s: float
    error: str
    """Name of the error; empty: the message is stored."""


class Use(NamedTuple):
    """A use of a topic that may become inactive."""

    begin_s: float
    end_s: float


@dataclass(slots=True)
class Record:
    """What was observed of one topic."""

    topic: Topic
    trims: list[Trim] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    deletions: list[float] = field(default_factory=list)
    subscribed: list[tuple[float, float]] = field(default_factory=list)
    """When the subscription of an inactive topic certainly existed."""
    remaining: tuple[Ledger, ...] = ()
    """The ledgers at the end, the oldest first; none: the topic does not exist."""
    ended_s: float = 0.0
    """When `remaining` was read. Clients had ended DELAY_S and more before."""


@dataclass(slots=True)
class Run:
    records: list[Record]
    faults_s: Sequence[float]
    unsubscribed_s: float
    existing: frozenset[int] = frozenset()
    """The ledgers that exist at the end, of topics and of others."""

    def is_calm(self, begin_s: float, end_s: float) -> bool:
        return not any(begin_s - CALM_S <= fault_s <= end_s for fault_s in self.faults_s)


def judge(run: Run) -> Iterator[Breach]:
    """Return the breaches of a run."""
    for record in run.records:
        yield from _trims(run, record)
        yield from _acknowledged(run, record)
        yield from _quotas(run, record)
        yield from _inactive(run, record)
        yield from _remaining(run, record)


def _trims(run: Run, record: Record) -> Iterator[Breach]:
    topic = record.topic
    for trim in record.trims:
        size = sum(one.size for one in trim.ledgers)
        open_size = _open_size(topic, trim.ledgers, trim.at_s)
        for ledger in trim.ledgers:
            if ledger.id not in trim.gone:
                break
            stored_s = [one.stored_s for one in topic.messages if one.key is not None and one.key[0] == ledger.id]
            if not stored_s:
                continue  # an empty ledger is dropped when another one takes its place
            # A ledger without writes is closed some time before the metadata says so.
            closed_s = min(ledger.closed_s, max(stored_s))
            name = f"ledger {ledger.id} of {topic.name}, deleted at {trim.at_s:.1f} s,"
            for message, subscription in _needed(topic, ledger.id, trim.at_s):
                yield Breach("trim-keeps-needed", f"{name} has {message.key}, which {subscription} needs")
            if not topic.may_trim(closed_s, size + open_size, trim.at_s, run.unsubscribed_s):
                text = f"{name} was last written at {closed_s:.1f} s, with {size} to {size + open_size} bytes in total"
                yield Breach("retention-keeps", text)
            size -= ledger.size
        if run.is_calm(trim.at_s - LEAK_S, trim.at_s + LEAK_S) and record.ended_s > trim.at_s + LEAK_S:
            for ledger_id in run.existing.intersection(trim.gone):
                yield Breach("no-leak", f"ledger {ledger_id} of {topic.name} exists, trimmed at {trim.at_s:.1f} s")


def _open_size(topic: Topic, ledgers: Sequence[Ledger], at_s: float) -> int:
    """Return the maximum bytes that the metadata does not know yet: those of the open ledger."""
    known = {one.id for one in ledgers if one.size}
    count = sum(one.sent_s < at_s and (one.key is None or one.key[0] not in known) for one in topic.messages)
    return count * (topic.size + 1_000)


def _needed(topic: Topic, ledger_id: int, at_s: float) -> Iterator[tuple[Message, str]]:
    for message in topic.messages:
        if message.key is not None and message.key[0] == ledger_id:
            for name in topic.subscriptions:
                if not topic.may_be_released(message, name, at_s):
                    yield message, name


def _acknowledged(run: Run, record: Record) -> Iterator[Breach]:
    topic = record.topic
    for seen in record.seen:
        policy = None
        if run.is_calm(seen.begin_s - DELAY_S, seen.end_s):
            policy = topic.timeline.certain(seen.begin_s - DELAY_S, seen.end_s)
        unread = []
        for message in topic.messages:
            if message.stored_s >= seen.begin_s or message.key is None:
                continue
            if message.key not in seen.keys:
                if not topic.may_be_released(message, seen.subscription, seen.end_s):
                    text = (
                        f"{message.key} of {topic.name} is acknowledged for {seen.subscription} at {seen.end_s:.1f} s"
                    )
                    yield Breach("ttl-never-early", f"{text}, sent at {message.sent_s:.1f} s")
                continue
            unread.append(message)
            expires_s = max(message.stored_s, message.deliver_at_s) + (policy.ttl_s if policy else 0)
            if policy is not None and policy.ttl_s and expires_s + DELAY_S < seen.begin_s:
                text = f"{message.key} of {topic.name} is not acknowledged for {seen.subscription}"
                yield Breach("ttl-in-time", f"{text} at {seen.begin_s:.1f} s, expired at {expires_s:.1f} s")
        if policy is not None and policy.action is Action.EVICT:
            yield from _evicted(topic, seen, policy, unread)


def _evicted(topic: Topic, seen: Seen, policy: Policy, unread: Iterable[Message]) -> Iterator[Breach]:
    old = [one for one in unread if one.stored_s + DELAY_S < seen.begin_s]
    text = f"{len(old)} old messages of {topic.name} for {seen.subscription} at {seen.begin_s:.1f} s"
    if policy.quota_size is not None and len(old) * topic.size > policy.quota_size:
        yield Breach("evict-in-time", f"{text}: {len(old) * topic.size} bytes, quota {policy.quota_size}")
    if policy.quota_age_s is not None:
        for one in old:
            if one.stored_s + policy.quota_age_s + DELAY_S < seen.begin_s:
                yield Breach("evict-in-time", f"{text}: {one.key} is {seen.begin_s - one.stored_s:.0f} s old")


def _quotas(run: Run, record: Record) -> Iterator[Breach]:
    topic = record.topic
    for write in record.writes:
        name = f"a message to {topic.name} between {write.begin_s:.1f} and {write.end_s:.1f} s"
        begin_s = write.begin_s - ANSWER_S
        if not write.error:
            policy = topic.timeline.certain(begin_s, write.end_s)
            if policy is None or policy.action is Action.EVICT or not run.is_calm(begin_s, write.end_s):
                continue
            if topic.must_exceed(policy, begin_s, write.end_s):
                yield Breach("quota-refuses", f"{name} was stored above the quota")
            continue
        action = {"BacklogQuotaRefused": Action.REFUSE, "BacklogQuotaExceeded": Action.HOLD}.get(write.error)
        if action is None:
            continue
        policies = {
            one
            for at_s in (begin_s, write.end_s)
            for one in topic.timeline.possible(at_s)
            if one.action is action and topic.may_exceed(one, begin_s, write.end_s)
        }
        if not policies:
            yield Breach("quota-admits", f"{name} was refused with {write.error}")


def _inactive(run: Run, record: Record) -> Iterator[Breach]:
    topic = record.topic
    begin_s = 0.0
    for at_s in record.deletions:
        policies = [one for one in topic.timeline.possible(at_s) if one.inactive_s is not None]
        name = f"{topic.name}, deleted at {at_s:.1f} s,"
        used_s = max((one.begin_s for one in record.uses if one.begin_s < at_s), default=0.0)
        if not any(at_s - used_s >= (one.inactive_s or 0) - SLACK_S for one in policies):
            yield Breach("inactive-not-early", f"{name} was used at {used_s:.1f} s")
        subscribed = any(first_s < at_s < last_s for first_s, last_s in record.subscribed)
        if subscribed and not any(one.deletes_caught_up for one in policies):
            yield Breach("inactive-keeps-needed", f"{name} has a subscription")
        for message in topic.messages:
            is_there = begin_s < message.sent_s and message.stored_s < at_s
            is_owed = any(first_s < message.sent_s and at_s < last_s for first_s, last_s in record.subscribed)
            if is_owed and is_there and not topic.may_be_released(message, SUBSCRIPTION, at_s):
                yield Breach("inactive-keeps-needed", f"{name} has {message.key}, which is needed")
        begin_s = at_s
    policy = topic.timeline.certain(record.ended_s, record.ended_s)
    used_s = max((one.end_s for one in record.uses if one.begin_s < record.ended_s), default=0.0)
    if not used_s or policy is None or policy.inactive_s is None or not record.remaining:
        return
    subscribed = any(last_s > record.ended_s for _, last_s in record.subscribed)
    needed = subscribed and any(
        begin_s < one.sent_s < record.ended_s and not one.is_acked(SUBSCRIPTION, used_s) for one in topic.messages
    )
    is_due = used_s + policy.inactive_s + DELAY_S < record.ended_s and run.is_calm(used_s, record.ended_s)
    if is_due and not needed and (policy.deletes_caught_up or not subscribed):
        yield Breach("inactive-in-time", f"{topic.name} exists at {record.ended_s:.1f} s, last used at {used_s:.1f} s")


SLACK_S: Final = 0.1
"""Seconds by which the loop's clock differs from the times that clients see."""
SUBSCRIPTION: Final = "s0"
"""The subscription of topics that become inactive."""


def _remaining(run: Run, record: Record) -> Iterator[Breach]:
    """Judge what is left at the end. Only the last ledger, and what is needed or retained, may be left."""
    topic = record.topic
    policy = topic.timeline.certain(record.ended_s - 2 * DELAY_S, record.ended_s)
    if policy is None or record.uses or not run.is_calm(record.ended_s - DELAY_S, record.ended_s):
        return
    last = {seen.subscription: seen for seen in record.seen}
    if set(last) != set(topic.subscriptions):
        return
    needed = {key[0] for seen in last.values() for key in seen.keys}
    size = sum(one.size for one in record.remaining)
    for ledger in record.remaining[:-1]:
        at_s = record.ended_s - DELAY_S
        if ledger.id in needed or not topic.must_trim(policy, ledger.followed_s, size, at_s, run.unsubscribed_s):
            return
        yield Breach(
            "trim-in-time", f"ledger {ledger.id} of {topic.name} exists, followed at {ledger.followed_s:.1f} s"
        )
        return

"""What the policies of a topic allow and demand, as documented. Pure; it knows nothing of the broker.

Clients, network and clocks leave every time uncertain by some seconds. The model therefore has bounds: a policy *may*
be in force from the moment at which its change was sent until STALE_S after the next change was stored, and *is* in
force from STALE_S after it was stored until the next change is sent. The same holds for messages and acknowledgements.

Sources: docs/policies.md; Pulsar's ManagedLedgerImpl.internalTrimLedgers (retention), PersistentMessageExpiryMonitor
(time to live), BacklogQuotaManager (quotas), PersistentTopic.checkGC (inactive topics).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

Key = tuple[int, int, int]

STALE_S: Final = 30.0
"""Maximum seconds until a broker follows a change of policies, also one whose session was interrupted meanwhile."""
SKEW_S: Final = 0.2
"""Maximum seconds by which the clocks of two brokers differ."""
CLOSING_S: Final = 10.0
"""Maximum seconds from the time that a broker notes as that of the close of a ledger until the metadata has it."""
OVERHEAD: Final = 150
"""Maximum bytes of an entry in addition to its payload."""
EVICTED_TO: Final = 0.9
"""Part of a quota that an eviction leaves."""
ESTIMATE: Final = 0.8
"""Part of its true bytes to which a broker may underestimate a backlog: it only knows the sizes of ledgers."""
FOREVER: Final = float("inf")


class Action(StrEnum):
    HOLD = "producer_request_hold"
    REFUSE = "producer_exception"
    EVICT = "consumer_backlog_eviction"


@dataclass(frozen=True, slots=True)
class Policy:
    """The policies of a topic. Times in seconds, sizes in bytes."""

    ttl_s: int = 0
    """0: messages do not expire."""
    has_retention: bool = False
    retention_s: int | None = 0
    """None: without limit, as that of the size."""
    retention_size: int | None = 0
    action: Action = Action.REFUSE
    quota_size: int | None = None
    quota_age_s: int | None = None
    inactive_s: int | None = None
    """None: inactive topics are kept."""
    deletes_caught_up: bool = False
    """Whether subscriptions that have nothing to read do not keep an inactive topic."""


class Span(NamedTuple):
    """When a policy may be in force."""

    policy: Policy
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Timeline:
    """The policies of a topic over time."""

    changes: list[tuple[float, float, Policy]] = field(default_factory=list)
    """When the change was sent and when it was stored, in this order."""

    def spans(self, until_s: float) -> Iterator[Span]:
        """Yield the policies that may have been in force until then."""
        for index, (sent_s, _, policy) in enumerate(self.changes):
            end_s = self.changes[index + 1][1] + STALE_S if index + 1 < len(self.changes) else FOREVER
            if sent_s <= until_s:
                yield Span(policy, sent_s, min(end_s, until_s))

    def possible(self, at_s: float) -> list[Policy]:
        """Return the policies that may be in force at a time."""
        return [span.policy for span in self.spans(at_s) if span.end_s >= at_s]

    def certain(self, begin_s: float, end_s: float) -> Policy | None:
        """Return the only policy that was in force all the time; None: that is not certain."""
        found = None
        for index, (_, stored_s, policy) in enumerate(self.changes):
            next_s = self.changes[index + 1][0] if index + 1 < len(self.changes) else FOREVER
            if stored_s + STALE_S <= begin_s and next_s >= end_s:
                found = policy
        return found


@dataclass(slots=True)
class Message:
    """A message that was or may have been stored."""

    sent_s: float
    """Its publish time is not earlier."""
    stored_s: float = FOREVER
    """Its publish time is not later; FOREVER: nobody knows whether it is stored."""
    key: Key | None = None
    deliver_at_s: float = 0.0
    acks: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """When acknowledgements were sent and when they were answered (FOREVER: never), by subscription."""

    def may_be_acked(self, subscription: str, at_s: float) -> bool:
        return any(sent_s < at_s for sent_s, _ in self.acks.get(subscription, ()))

    def is_acked(self, subscription: str, at_s: float) -> bool:
        return any(done_s < at_s for _, done_s in self.acks.get(subscription, ()))


@dataclass(slots=True)
class Topic:
    name: str
    size: int
    """Bytes of the payload of each message."""
    subscriptions: tuple[str, ...]
    """They exist before the first message."""
    timeline: Timeline = field(default_factory=Timeline)
    messages: list[Message] = field(default_factory=list)

    # --- what a policy may have done --------------------------------------------------------------------------------

    def may_be_released(self, message: Message, subscription: str, at_s: float) -> bool:
        """Return whether a subscription need not have the message any more."""
        if message.may_be_acked(subscription, at_s):
            return True
        return any(
            self._may_be_expired(message, span) or self._may_be_evicted(message, span)
            for span in self.timeline.spans(at_s)
        )

    @staticmethod
    def _may_be_expired(message: Message, span: Span) -> bool:
        expires_s = max(message.sent_s, message.deliver_at_s) + span.policy.ttl_s - SKEW_S
        return bool(span.policy.ttl_s) and max(span.begin_s, expires_s) <= span.end_s

    def _may_be_evicted(self, message: Message, span: Span) -> bool:
        policy = span.policy
        if policy.action is not Action.EVICT:
            return False
        if policy.quota_age_s is not None and span.end_s - message.sent_s >= EVICTED_TO * policy.quota_age_s - SKEW_S:
            return True
        if policy.quota_size is None or message.key is None:
            return False
        younger = sum(one.sent_s < span.end_s and (one.key is None or one.key >= message.key) for one in self.messages)
        # The message was evicted while it was among the surplus: with those after it there is more than is left.
        return younger * (self.size + OVERHEAD) >= ESTIMATE * EVICTED_TO * policy.quota_size

    # --- quotas -----------------------------------------------------------------------------------------------------

    def certain_backlog(self, subscription: str, begin_s: float, end_s: float) -> list[Message]:
        """Return the messages that a subscription certainly had to read all the time."""
        return [
            one
            for one in self.messages
            if one.stored_s < begin_s and not self.may_be_released(one, subscription, end_s)
        ]

    def possible_backlog(self, subscription: str, begin_s: float, end_s: float) -> list[Message]:
        """Return the messages that a subscription may have had to read at some time."""
        return [one for one in self.messages if one.sent_s < end_s and not one.is_acked(subscription, begin_s)]

    def must_exceed(self, policy: Policy, begin_s: float, end_s: float) -> bool:
        """Return whether a quota was certainly exceeded all the time."""
        for name in self.subscriptions:
            backlog = self.certain_backlog(name, begin_s, end_s)
            if policy.quota_size is not None and len(backlog) * self.size > policy.quota_size:
                return True
            if policy.quota_age_s is not None and any(begin_s - one.stored_s > policy.quota_age_s for one in backlog):
                return True
        return False

    def may_exceed(self, policy: Policy, begin_s: float, end_s: float) -> bool:
        """Return whether a quota may have been exceeded at some time."""
        for name in self.subscriptions:
            backlog = self.possible_backlog(name, begin_s, end_s)
            if policy.quota_size is not None and len(backlog) * (self.size + OVERHEAD) > policy.quota_size:
                return True
            if policy.quota_age_s is not None and any(
                end_s - one.sent_s + SKEW_S >= policy.quota_age_s for one in backlog
            ):
                return True
        return False

    # --- retention --------------------------------------------------------------------------------------------------

    def may_trim(self, closed_s: float, size: int, at_s: float, unsubscribed_s: float) -> bool:
        """Return whether the retention may release the oldest ledger of a topic of `size` bytes at most.

        `unsubscribed_s`: seconds that topics without subscriptions and without the policy are kept.
        """
        for policy in self.timeline.possible(at_s):
            if not policy.has_retention:
                if self.subscriptions or at_s - closed_s >= unsubscribed_s - CLOSING_S:
                    return True
                continue
            if policy.retention_s is not None and at_s - closed_s >= policy.retention_s - CLOSING_S:
                return True
            if policy.retention_size is not None and size > policy.retention_size:
                return True
        return False

    def must_trim(self, policy: Policy, closed_s: float, size: int, at_s: float, unsubscribed_s: float) -> bool:
        """Return whether the retention certainly releases the oldest ledger of a topic of `size` bytes at least."""
        if not policy.has_retention:
            return bool(self.subscriptions) or at_s - closed_s > unsubscribed_s
        if policy.retention_s is not None and at_s - closed_s > policy.retention_s:
            return True
        return policy.retention_size is not None and size > policy.retention_size

"""Admit messages of producers to a topic, as far as its policies allow.

| policy                     | a request that does not conform                                                     |
|----------------------------|-------------------------------------------------------------------------------------|
| encryption_required        | PolicyForbids                                                                       |
| message_size_max           | TooLarge                                                                            |
| delay_s_max                | DelayTooLong                                                                        |
| producers_max              | TooManyProducers, for a named producer that is not connected                        |
| publish_rate               | waits for its turn; PublishRateExceeded if that takes longer than PUBLISH_WAIT_S_MAX |
| backlog quota, hold        | waits for HOLD_S_MAX at most, then BacklogQuotaExceeded                             |
| backlog quota, exception   | BacklogQuotaRefused                                                                 |
| backlog quota, eviction    | is admitted; maintenance evicts                                                     |

A request that waits delays no other one: each has its own turn. What waits for the publish rate is bounded by the rate
itself, times PUBLISH_WAIT_S_MAX. Messages that the broker moves, to retry and dead-letter topics and back from these,
are not checked: their subscription would stop otherwise. `publishing_once` asks only about messages that are not stored
yet.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from bindery_core.errors import TooLarge
from bindery_core.sources import MonotonicClock
from bindery_pulsar.message_codec import OutgoingMessage

from bindery_broker.errors import (
    BacklogQuotaExceeded,
    BacklogQuotaRefused,
    DelayTooLong,
    PolicyForbids,
    PublishRateExceeded,
)
from bindery_broker.limits.backlog_quota import Excess, SubscriptionBacklog, find_excess
from bindery_broker.limits.rate_limit import RateLimit
from bindery_broker.managed_ledger import WallClock
from bindery_broker.namespaces.policies import EffectivePolicies, QuotaAction
from bindery_broker.topics.topic import Topic

PUBLISH_WAIT_S_MAX: Final = 2.0
"""Maximum seconds that a request waits for the publish rate."""
HOLD_S_MAX: Final = 5.0
"""Maximum seconds that a request waits for a backlog to shrink."""
HELD_MAX: Final = 16
"""Maximum number of requests of a topic that wait for its backlog to shrink; others are refused at once. They hold
their bodies in memory."""
CHECK_S: Final = 0.25
"""Seconds after which the backlogs are looked at again. So producers are admitted soon after the limit clears."""


class Admission:
    """Of one loaded topic."""

    def __init__(self, topic: Topic, *, now: MonotonicClock, clock: WallClock) -> None:
        self._topic = topic
        self._now = now
        self._clock = clock
        self._rate = RateLimit()
        self._excess: Excess | None = None
        self._checked_at = float("-inf")
        self._held = 0

    async def admit(
        self, messages: Sequence[OutgoingMessage], *, producer: str | None = None, may_wait: bool = True
    ) -> None:
        """Return once the messages may be stored. Raises the errors of the table; nothing was stored then."""
        policies = self._topic.policies
        self._check_messages(messages, policies)
        if producer is not None:
            self._topic.connect_producer(producer)
        if policies.backlog_quota_size is not None or policies.backlog_quota_age is not None:
            await self._check_quota(may_wait=may_wait)
        await self._pace(messages, policies, may_wait=may_wait)

    def _check_messages(self, messages: Sequence[OutgoingMessage], policies: EffectivePolicies) -> None:
        if policies.encryption_required:
            raise PolicyForbids(
                "the policy encryption_required admits encrypted messages only, and a broker cannot encrypt; use a "
                "client of Pulsar with encryption keys",
                topic=self._topic.name.short,
            )
        size_max = policies.message_size_max
        if size_max:
            for index, message in enumerate(messages):
                if len(message.payload) > size_max:
                    raise TooLarge(
                        "a message is larger than the policy message_size_max allows",
                        index=index,
                        size=len(message.payload),
                        size_max=size_max,
                    )
        if policies.delayed_delivery and policies.delay_s_max:
            now_ms = self._clock()
            for index, message in enumerate(messages):
                delay_ms = (message.deliver_at_ms or 0) - now_ms
                if delay_ms > policies.delay_s_max * 1_000:
                    raise DelayTooLong(
                        "the delay is longer than the policy delay_s_max allows",
                        index=index,
                        delay_ms=delay_ms,
                        delay_s_max=policies.delay_s_max,
                    )

    async def _pace(self, messages: Sequence[OutgoingMessage], policies: EffectivePolicies, *, may_wait: bool) -> None:
        now = self._now()
        self._rate.set(policies.publish_rate, now)
        wait_s = self._rate.wait_s(now)
        if wait_s:
            self._topic.statistics.publish_limited += 1
        if wait_s > (PUBLISH_WAIT_S_MAX if may_wait else 0.0):
            raise PublishRateExceeded(
                f"messages come faster than the policy publish_rate allows: {self._rate.text()}",
                topic=self._topic.name.short,
                retry_after_s=round(wait_s, 3),
            )
        self._rate.take(len(messages), sum(len(message.payload) for message in messages), now)
        if wait_s:
            await asyncio.sleep(wait_s)

    async def _check_quota(self, *, may_wait: bool) -> None:
        excess = await self.excess()
        if excess is None:
            return
        if excess.action is QuotaAction.REFUSE:
            raise BacklogQuotaRefused(f"the backlog of the topic exceeds its quota: {excess.text}", **_facts(excess))
        if may_wait and self._held < HELD_MAX:
            ends = asyncio.get_running_loop().time() + HOLD_S_MAX
            self._held += 1
            try:
                while asyncio.get_running_loop().time() < ends and self._topic.is_open and not self._topic.is_draining:
                    await asyncio.sleep(CHECK_S)
                    excess = await self.excess(is_waiting=True)
                    if excess is None:
                        return
            finally:
                self._held -= 1
        assert excess is not None
        raise BacklogQuotaExceeded(
            f"the backlog of the topic exceeds its quota, and producers are held: {excess.text}", **_facts(excess)
        )

    async def excess(self, *, is_waiting: bool = False) -> Excess | None:
        """Return the quota that refuses producers now; None: none does. The answer is at most CHECK_S old.

        `is_waiting`: the caller has waited since the last answer.
        """
        now = self._now()
        if is_waiting or now >= self._checked_at + CHECK_S or now < self._checked_at:
            self._checked_at = now
            found = await excesses(self._topic, now_ms=self._clock())
            self._excess = next((one for one in found if one.action is not QuotaAction.EVICT), None)
        return self._excess


async def excesses(topic: Topic, *, now_ms: int) -> list[Excess]:
    """Return the quotas of a topic that are exceeded. Reads at most one entry, and only for a quota of age."""
    policies = topic.policies
    size, age = policies.backlog_quota_size, policies.backlog_quota_age
    if size is None and age is None:
        return []
    kept = [one for one in topic.subscriptions.values() if one.is_durable and not one.is_system]
    if age is not None and kept:  # the subscription whose oldest message is the oldest of all
        slowest = min(kept, key=lambda one: one.cursor.next_unacked(one.cursor.mark_delete))
        await slowest.oldest.read()
    backlogs = []
    for one in kept:
        entries, size_left = one.cursor.backlog
        oldest = one.cursor.next_unacked(one.cursor.mark_delete)
        backlogs.append(SubscriptionBacklog(one.name, entries, size_left, str(oldest), one.oldest.publish_time_ms))
    return find_excess(backlogs, size=size, age=age, now_ms=now_ms)


def _facts(excess: Excess) -> dict[str, object]:
    facts: dict[str, object] = {
        "quota": excess.quota,
        "limit": excess.limit,
        "value": excess.value,
        "subscription": excess.backlog.subscription,
        "oldest": excess.backlog.oldest_id,
    }
    if excess.backlog.oldest_ms is not None:  # read only for a quota of age
        facts["oldest_at"] = excess.backlog.oldest_ms
    return facts

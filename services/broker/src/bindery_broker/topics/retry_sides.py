"""The subscription of a retry topic, as seen by the broker of the topic: in this broker, or in the one that owns it.

The partitions of a topic are used in the same way (`partitioned.consumers`).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName

from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.dispatch_loop import Deliveries
from bindery_broker.subscriptions.explaining import Reason
from bindery_broker.subscriptions.moving import MoveResult, RetryTo
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic


class RetrySide(Protocol):
    """The calls are those of `Subscription`, with its errors. Another broker that does not answer is NotOwner."""

    @property
    def partition(self) -> int:
        """The partition of the retry topic."""
        ...

    def may_have_messages(self, consumer: str) -> bool:
        """Whether it is worth asking for messages without a wait."""
        ...

    async def receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None = None
    ) -> Deliveries: ...

    async def still_holds(self, consumer: str, request_id: str) -> bool:
        """As `Subscription.still_holds`."""
        ...

    def hand_back(self, consumer: str, deliveries: Deliveries) -> None:
        """As `Subscription.hand_back`, of all that `receive` returned. It may end after the call."""
        ...

    async def leave(self, consumer: str) -> bool: ...

    async def claimed(self, ledger_ids: Collection[int], *, main_first: int) -> Collection[int]:
        """Return those ledgers that are, or may have been, of the retry topic. None of them is one of the topic's.

        `main_first`: first ledger of the topic; 0: it has none. A ledger after it that is older than those of the retry
        topic may be one that the retry topic has trimmed; other unknown ones are trimmed ledgers of the topic. Ids are
        unique in the cluster and ascend in each topic, and only the first ledgers of a topic are trimmed: so neither of
        both claims a ledger of the other one.
        """
        ...

    async def unknown(self, ids: Sequence[MessageId]) -> list[MessageId]: ...

    async def ack(self, ids: Sequence[MessageId], *, consumer: str | None) -> None: ...

    async def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None) -> list[MessageId]: ...

    async def retry(
        self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None
    ) -> MoveResult: ...

    async def explain(self, message_id: MessageId, *, consumer: str | None) -> Reason: ...

    async def backlog_entries(self) -> int:
        """Return the number of entries that are not completely acknowledged."""
        ...

    def in_use(self) -> AbstractContextManager[None]:
        """Keep the retry topic open during the block."""
        ...


class Peers(Protocol):
    """The other brokers: `http.peers.retries.RemoteRetries`."""

    def retry_side(
        self,
        url: str,
        topic: TopicName,
        subscription: str,
        *,
        ledger_ids: "LedgerIds",
        on_lost: Callable[[], None],
        is_partition: bool = False,
    ) -> RetrySide:
        """Return the subscription of a topic that the broker at `url` owns. `on_lost`: called when it does not answer,
        or does not own the topic any more. `is_partition`: it is a partition, and its retry topic is left out."""
        ...


class LedgerIds(Protocol):
    async def __call__(self) -> list[int]:
        """Return the ids of the topic's ledgers, ascending. Raises TryAgain."""
        ...


class LocalSide:
    """The subscription of a retry topic that is open here."""

    def __init__(self, topic: Topic, subscription: Subscription, *, in_use: Callable[[], AbstractContextManager[None]]):
        self.topic = topic
        self.subscription = subscription
        self._in_use = in_use

    @property
    def partition(self) -> int:
        return self.topic.partition

    def may_have_messages(self, _consumer: str) -> bool:
        return self.subscription.cursor.backlog_entries > 0

    async def receive(
        self, request: ReceiveRequest, *, kind: SubscriptionType, charge: Charge, client: ClientWatch | None = None
    ) -> Deliveries:
        deliveries, _ = await self.subscription.receive(request, kind=kind, charge=charge, client=client)
        return deliveries

    async def still_holds(self, consumer: str, request_id: str) -> bool:
        return self.subscription.still_holds(consumer, request_id)

    def hand_back(self, consumer: str, deliveries: Deliveries) -> None:
        self.subscription.hand_back(consumer, deliveries)

    async def leave(self, consumer: str) -> bool:
        return self.subscription.leave(consumer)

    async def claimed(self, ledger_ids: Collection[int], *, main_first: int) -> Collection[int]:
        ledger = self.topic.ledger
        first = ledger.first_position.ledger_id
        return {one for one in ledger_ids if ledger.has_ledger(one) or main_first <= one < first}

    async def unknown(self, ids: Sequence[MessageId]) -> list[MessageId]:
        return await self.subscription.unknown(ids)

    async def ack(self, ids: Sequence[MessageId], *, consumer: str | None) -> None:
        await self.subscription.ack(ids, consumer=consumer)

    async def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None) -> list[MessageId]:
        return self.subscription.nack(ids, delay_s=delay_s, consumer=consumer)

    async def retry(self, ids: Sequence[MessageId], to: RetryTo, *, charge: Charge, consumer: str | None) -> MoveResult:
        return await self.subscription.retry(ids, to, charge=charge, consumer=consumer)

    async def explain(self, message_id: MessageId, *, consumer: str | None) -> Reason:
        return await self.subscription.explain(message_id, consumer=consumer)

    async def backlog_entries(self) -> int:
        return self.subscription.cursor.backlog_entries

    def in_use(self) -> AbstractContextManager[None]:
        return self._in_use()

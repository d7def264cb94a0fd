"""Which producer has a topic exclusively over HTTP, and in which epoch. Durable, so that fencing survives its broker.

HTTP has no connections, so a producer that takes the topic keeps it until it releases it or is fenced; no clock and no
lease decides. Who may take it is decided by `access`. Requests that wait for the topic (Pulsar's WaitForExclusive) are
in a queue in memory, in order of arrival:

| what happens                                     | requests that wait                                           |
|--------------------------------------------------|--------------------------------------------------------------|
| the producer that has the topic releases it      | the first one takes it, the others wait on                   |
| a producer takes the topic with fencing          | ProducerFenced                                               |
| the same producer begins to wait once more       | the new request has the place; ProducerBusy for the old one  |
| the time of one is over                          | ProducerBusy                                                 |
| its client disconnects                           | it leaves the queue                                          |
| the broker stops, or the topic moves             | TryAgain or NotOwner: to be repeated at the next owner       |

While one waits, other producers are refused as if it had the topic, so none overtakes it. Two properties of the
topic's znode store who has the topic:

| property                   | value                                                                                 |
|----------------------------|---------------------------------------------------------------------------------------|
| pulsar.topic.epoch         | epoch of the topic in decimal; each exclusive producer raises it, also one of Pulsar  |
| bindery.exclusive.producer | `EPOCH:NAME` of the producer that has the topic; void if the epoch is not the topic's |

Invariants: the epoch never decreases; a new epoch counts as soon as it is, or may be, durable, and never before.
Whoever stores messages calls `check` and submits them in one turn of the event loop, so that nothing of a former
producer is stored after the first message of the next one.
Source: Pulsar's PersistentTopic (TOPIC_EPOCH_PROPERTY_NAME) for the first property.
"""

import asyncio
import copy
from collections.abc import Mapping
from typing import Final

from bindery_core.errors import BinderyError, MetadataOutcomeUnknown, TooManyRequests

from bindery_broker.errors import ProducerBusy, ProducerFenced, TopicTerminated
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.producers.access import AccessMode, Admitted, Joining, ProducerAccess

EPOCH_PROPERTY: Final = "pulsar.topic.epoch"
HOLDER_PROPERTY: Final = "bindery.exclusive.producer"
WAITING_MAX: Final = 100
"""Maximum number of requests that wait for a topic."""


class _Turn:
    """A request that waits for the topic."""

    def __init__(self, producer: str) -> None:
        self.producer = producer
        self.changed = asyncio.Event()
        """Set once it may be its turn, or `error` is set."""
        self.error: BinderyError | None = None
        """Why it does not wait any more."""

    def end(self, error: BinderyError) -> None:
        self.error = error
        self.changed.set()


class TopicHold:
    """Of one loaded topic."""

    def __init__(self, ledger: ManagedLedger, *, topic: str) -> None:
        self._ledger = ledger
        self._topic = topic
        self._lock = asyncio.Lock()
        epoch = _number(ledger.properties.get(EPOCH_PROPERTY, ""))
        self._access = ProducerAccess(topic_epoch=epoch)
        self._holder: str | None = None
        self._waiting: list[_Turn] = []
        """In order of arrival."""
        stored, _, name = ledger.properties.get(HOLDER_PROPERTY, "").partition(":")
        if name and _number(stored) == epoch:
            self._holder = name
            self._access.join(Joining(0, name, AccessMode.EXCLUSIVE, topic_epoch=epoch))

    @property
    def holder(self) -> str | None:
        """The producer that has the topic exclusively; None: there is none."""
        return self._holder

    @property
    def epoch(self) -> int:
        return self._access.topic_epoch

    def check(self, producer: str | None, epoch: int | None) -> None:
        """Raise an error if a request may not be stored now. `epoch`: the one that the producer got from `take`.

        Raises ProducerBusy for a request without an epoch while another producer has the topic, or waits for it,
        ProducerFenced for one with an epoch unless its producer has the topic in that epoch.
        """
        if epoch is None:
            if self._is_waited_for:
                raise ProducerBusy("a producer waits for the topic to have it exclusively", topic=self._topic)
            self._access.check_request()
        elif producer != self._holder or epoch != self._access.topic_epoch:
            raise ProducerFenced(
                "the producer does not have the topic any more; take it again, if no other one should",
                topic=self._topic,
                producer=producer,
                producer_epoch=epoch,
                topic_epoch=self._access.topic_epoch,
            )

    async def take(self, producer: str, mode: AccessMode) -> int:
        """Give the topic to a producer. Returns the epoch for its requests; former ones of the same name are fenced.

        Raises ProducerFenced if another producer has the topic and `mode` does not fence it, MetadataUnavailable if
        nothing has changed, MetadataOutcomeUnknown if the producer may have it: take it again. TopicTerminated if
        nothing can be stored.
        """
        async with self._lock:
            if mode is not AccessMode.EXCLUSIVE_FENCING and self._is_waited_for and producer != self._holder:
                raise ProducerFenced("other producers wait for the topic", topic=self._topic, producer=producer)
            epoch = await self._take(producer, mode)
            if mode is AccessMode.EXCLUSIVE_FENCING:
                self.end_waiting(
                    ProducerFenced(
                        "another producer took the topic with fencing; repeat the request to wait again",
                        topic=self._topic,
                        holder=producer,
                    )
                )
            return epoch

    async def take_in_turn(self, producer: str, *, wait_s: float) -> int:
        """Give the topic to a producer once no other one has it, and none that came before waits. Returns as `take`.

        Raises ProducerBusy after `wait_s`, and the errors of the table of the module.
        """
        self._check_open()
        turn = self._begin_turn(producer)
        try:
            try:
                async with asyncio.timeout(wait_s):
                    while turn.error is None and not self._is_turn(turn):
                        turn.changed.clear()
                        await turn.changed.wait()
            except TimeoutError:
                raise ProducerBusy(
                    "another producer still has the topic, or waits for it; repeat the request to wait on, or take it "
                    "with access_mode exclusive_with_fencing",
                    topic=self._topic,
                    producer=producer,
                    holder=self._holder,
                    waited_ms=round(wait_s * 1000),
                ) from None
            async with self._lock:
                if turn.error is not None:
                    raise turn.error
                return await self._take(producer, AccessMode.EXCLUSIVE)
        finally:
            self._waiting.remove(turn)
            self._wake()

    def end_waiting(self, error: BinderyError, *, producer: str | None = None) -> None:
        """End the waiting of all producers, or of one, with an error. One that is taking the topic goes on."""
        for turn in self._waiting:
            if producer in (None, turn.producer):
                turn.end(error)

    def _check_open(self) -> None:
        """Raise TopicTerminated if nothing can be stored."""
        if self._ledger.is_terminated:
            raise TopicTerminated.of(self._topic)

    def _begin_turn(self, producer: str) -> _Turn:
        turn = _Turn(producer)
        for index, former in enumerate(self._waiting):
            if former.producer == producer and former.error is None:
                former.end(ProducerBusy("a later request of the producer waits for the topic", producer=producer))
                self._waiting[index] = turn
                self._waiting.append(former)  # until its own end
                return turn
        if len(self._waiting) >= WAITING_MAX:
            raise TooManyRequests("too many producers wait for the topic; retry", topic=self._topic, max=WAITING_MAX)
        self._waiting.append(turn)
        return turn

    @property
    def _is_waited_for(self) -> bool:
        return any(turn.error is None for turn in self._waiting)

    def _is_turn(self, turn: _Turn) -> bool:
        """Whether a turn that has not ended may take the topic. The producer that has it comes first, as by `take`."""
        if self._holder is not None:
            return turn.producer == self._holder
        return next(one for one in self._waiting if one.error is None) is turn

    def _wake(self) -> None:
        for turn in self._waiting:
            turn.changed.set()

    async def _take(self, producer: str, mode: AccessMode) -> int:
        """See `take`. The caller holds the lock."""
        self._check_open()
        after = copy.deepcopy(self._access)
        former = 0 if self._holder is None else self._access.topic_epoch
        actions = after.join(Joining(after.topic_epoch + 1, producer, mode, epoch=former + 1))
        assert isinstance(actions[-1], Admitted)
        changes = {EPOCH_PROPERTY: str(after.topic_epoch), HOLDER_PROPERTY: f"{after.topic_epoch}:{producer}"}
        await self._store(changes, after, producer)
        return after.topic_epoch

    async def release(self, producer: str, *, epoch: int | None) -> bool:
        """End the hold of a producer, durably. Returns False if it does not have the topic.

        Raises ProducerFenced if `epoch` is given and another one. Errors as `take`.
        """
        async with self._lock:
            if producer != self._holder:
                return False
            if epoch is not None:
                self.check(producer, epoch)
            await self._store({HOLDER_PROPERTY: None}, ProducerAccess(topic_epoch=self._access.topic_epoch), None)
            return True

    async def _store(self, changes: Mapping[str, str | None], after: ProducerAccess, holder: str | None) -> None:
        try:
            await self._ledger.set_properties(changes)
        except MetadataOutcomeUnknown:
            self._access, self._holder = after, holder
            self._wake()
            raise
        self._access, self._holder = after, holder
        self._wake()


def _number(text: str) -> int:
    """Return a stored epoch; 0: there is none, or it is not one."""
    return int(text) if text.isascii() and text.isdigit() else 0

"""Which producer has a topic exclusively over HTTP, and in which epoch. Durable, so that fencing survives its broker.

HTTP has no connections, so a producer that takes the topic keeps it until it releases it or is fenced; no clock and no
lease decides. Who may take it is decided by `access`. Two properties of the topic's znode store the state:

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

from bindery_core.errors import MetadataOutcomeUnknown

from bindery_broker.errors import ProducerFenced
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.producers.access import AccessMode, Admitted, Joining, ProducerAccess

EPOCH_PROPERTY: Final = "pulsar.topic.epoch"
HOLDER_PROPERTY: Final = "bindery.exclusive.producer"


class TopicHold:
    """Of one loaded topic."""

    def __init__(self, ledger: ManagedLedger, *, topic: str) -> None:
        self._ledger = ledger
        self._topic = topic
        self._lock = asyncio.Lock()
        epoch = _number(ledger.properties.get(EPOCH_PROPERTY, ""))
        self._access = ProducerAccess(topic_epoch=epoch)
        self._holder: str | None = None
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

        Raises ProducerBusy for a request without an epoch while another producer has the topic, ProducerFenced for one
        with an epoch unless its producer has the topic in that epoch.
        """
        if epoch is None:
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
        nothing has changed, MetadataOutcomeUnknown if the producer may have it: take it again. Conflict if the topic is
        terminated.
        """
        async with self._lock:
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
            raise
        self._access, self._holder = after, holder


def _number(text: str) -> int:
    """Return a stored epoch; 0: there is none, or it is not one."""
    return int(text) if text.isascii() and text.isdigit() else 0

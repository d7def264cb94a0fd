"""Decide which producers may be connected to a topic, by their access modes. Pure.

| mode                 | nobody connected | shared ones connected    | an exclusive one is connected, or waited for    |
|----------------------|------------------|--------------------------|-------------------------------------------------|
| SHARED               | admitted         | admitted                 | busy                                            |
| EXCLUSIVE            | admitted, epoch  | fenced                   | fenced                                          |
| WAIT_FOR_EXCLUSIVE   | admitted, epoch  | queued                   | queued                                          |
| EXCLUSIVE_FENCING    | admitted, epoch  | the others are removed,  | holder and waiting ones are removed, admitted,  |
|                      |                  | admitted, epoch          | epoch                                           |

"epoch": the epoch of the topic is raised by one, and must be durable before the producer is told. A producer that
reconnects names the epoch in which it had the topic: with the present one it is admitted without another, unless
another producer has the topic now; with an older one it is fenced. When the last connected producer leaves, the first
of those that wait gets the topic.

A shared producer is refused if as many others are connected as the policy `producers_max` allows. One that it
replaces does not count. An exclusive producer is the only one, and one that waits is not connected.

A name can be connected once. The same name replaces its former connection if its epoch is higher (the client has
reconnected before the broker noticed); otherwise it is busy.

The HTTP API has no connections: each of its requests is a shared producer while it is in progress (`check_request`), so
it is refused while an exclusive producer has the topic or waits for it. `holding` has the exclusive producers of HTTP.
Source: Pulsar's AbstractTopic.addProducer, isProducersExceeded and ProducerAccessMode, CommandProducer.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from bindery_broker.errors import ProducerBusy, ProducerFenced, TooManyProducers


class AccessMode(IntEnum):
    """Values of Pulsar's protocol."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_FENCING = 3


class Joining(NamedTuple):
    """A producer that wants to connect."""

    id: int
    """Number of the connection's producer, unique in the topic."""
    name: str
    mode: AccessMode = AccessMode.SHARED
    epoch: int = 0
    """Number of reconnections of the client with this producer."""
    topic_epoch: int | None = None
    """Epoch of the topic in which the producer had it exclusively; None: it did not."""


class Admitted(NamedTuple):
    """The producer is connected."""

    id: int
    topic_epoch: int
    raised: bool
    """Whether the epoch is a new one, which must be durable first."""


class Queued(NamedTuple):
    """The producer waits for the topic."""

    id: int


class Removed(NamedTuple):
    """A producer is not connected, or does not wait, any more."""

    id: int
    is_fenced: bool
    """Whether it has lost the topic to another producer. False: its own next connection replaces it."""


Action = Admitted | Queued | Removed


class ProducerAccess:
    """The producers of one loaded topic."""

    def __init__(self, *, topic_epoch: int = 0) -> None:
        """`topic_epoch`: the stored one."""
        self.topic_epoch = topic_epoch
        self._connected: dict[int, Joining] = {}
        self._waiting: list[Joining] = []
        self._holder: int | None = None
        """The exclusive producer."""

    @property
    def connected(self) -> Iterator[int]:
        return iter(self._connected)

    @property
    def waiting(self) -> list[int]:
        return [one.id for one in self._waiting]

    @property
    def is_exclusive(self) -> bool:
        """Whether a producer has the topic exclusively, or one waits for that."""
        return self._holder is not None or bool(self._waiting)

    def check_request(self) -> None:
        """Raise ProducerBusy if a request without a connection may not be stored."""
        if self.is_exclusive:
            raise ProducerBusy("an exclusive producer has the topic, or waits for it")

    def join(self, producer: Joining, *, producers_max: int = 0) -> list[Action]:
        """Return what happens, in order. Raises ProducerBusy, ProducerFenced or TooManyProducers, and changes nothing
        then. `producers_max`: the policy; 0: no limit. Those that are connected stay, also above it."""
        former = self._named(producer.name)
        if former is not None and former.epoch >= producer.epoch:
            raise ProducerBusy("a producer with this name is connected", producer=producer.name)
        if producer.topic_epoch is not None and producer.topic_epoch < self.topic_epoch:
            raise ProducerFenced(
                "another producer has had the topic since",
                producer=producer.name,
                topic_epoch=self.topic_epoch,
            )
        others = [one for one in self._connected.values() if one is not former]
        keeps = former is not None and former.id == self._holder
        has_holder = self._holder is not None and not keeps
        waits = [] if keeps and producer.mode else [one for one in self._waiting if one is not former]
        match producer.mode:
            case AccessMode.SHARED:
                if has_holder or waits:
                    raise ProducerBusy("an exclusive producer has the topic, or waits for it", producer=producer.name)
                if former is None and producers_max and len(others) >= producers_max:
                    raise TooManyProducers.of(producer.name, producers=len(others), limit=producers_max)
            case AccessMode.EXCLUSIVE:
                if others or waits:
                    raise ProducerFenced("the topic has other producers", producer=producer.name)
        actions: list[Action] = []
        if former is not None:
            self._forget(former.id)
            actions.append(Removed(former.id, is_fenced=False))
        if producer.mode is AccessMode.WAIT_FOR_EXCLUSIVE and (others or waits):
            self._waiting.append(producer)
            actions.append(Queued(producer.id))
            return actions if self._connected else [*actions, self._admit(self._waiting.pop(0))]
        if producer.mode is AccessMode.EXCLUSIVE_FENCING:
            for one in [*self._connected.values(), *self._waiting]:
                actions.append(Removed(one.id, is_fenced=True))
            self._connected.clear()
            self._waiting.clear()
            self._holder = None
        return [*actions, self._admit(producer)]

    def leave(self, producer_id: int) -> list[Action]:
        """A producer closed, or its connection ended. Returns what happens; an unknown one changes nothing."""
        self._forget(producer_id)
        if self._connected or not self._waiting:
            return []
        return [self._admit(self._waiting.pop(0))]

    def _admit(self, producer: Joining) -> Admitted:
        self._connected[producer.id] = producer
        if producer.mode is AccessMode.SHARED:
            return Admitted(producer.id, self.topic_epoch, raised=False)
        self._holder = producer.id
        raised = producer.topic_epoch != self.topic_epoch
        self.topic_epoch += raised
        return Admitted(producer.id, self.topic_epoch, raised=raised)

    def _named(self, name: str) -> Joining | None:
        return next((one for one in [*self._connected.values(), *self._waiting] if one.name == name), None)

    def _forget(self, producer_id: int) -> None:
        self._connected.pop(producer_id, None)
        self._waiting = [one for one in self._waiting if one.id != producer_id]
        if self._holder == producer_id:
            self._holder = None

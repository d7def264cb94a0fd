"""The history of a run with brokers: calls of clients, as the broker and the client saw them, and events of metadata.

A call has up to four instants: it is sent, a broker starts it, the broker settles it, the client gets the answer. Each
may be missing: a request may be lost, a broker may be killed before it settles the call, an answer may be lost.

| outcome   | meaning                                                                  |
|-----------|--------------------------------------------------------------------------|
| `DONE`    | the broker answered that the request was carried out                     |
| `REFUSED` | the broker answered, or the network proves, that nothing was done        |
| `UNKNOWN` | the request may have been carried out, or may still be                   |

Instants are totally ordered. A call that a broker settled as done counts as done, even if its answer was lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

Key = tuple[int, int, int]
"""Ledger id, entry id, index in the batch. The index is `WHOLE_ENTRY` if the message is an entry of its own."""
WHOLE_ENTRY: Final = -1


def id_text(key: Key) -> str:
    return ":".join(map(str, key))


class Instant(NamedTuple):
    """A time in seconds, and a number that orders instants of equal time."""

    time_s: float
    number: int


class Kind(StrEnum):
    """Types of subscriptions."""

    EXCLUSIVE = "exclusive"
    FAILOVER = "failover"
    SHARED = "shared"
    KEY_SHARED = "key_shared"


class SubscriptionId(NamedTuple):
    """One life of a subscription. A subscription that is deleted and created again has the next generation."""

    topic: str
    name: str
    generation: int = 0


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Payload:
    """A message to be stored. `text` is unique in a history."""

    text: str
    key: str | None = None
    deliver_at_s: float | None = None
    """Time before which the message must not be delivered; None: at once."""

    @property
    def is_delayed(self) -> bool:
        return self.deliver_at_s is not None


@dataclass(frozen=True, slots=True)
class Produce:
    """Store messages. Its result is the keys of the messages."""

    topic: str
    messages: tuple[Payload, ...]
    batch: bool = True


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Create a subscription, unless it exists. Its result is whether this call created it."""

    subscription: SubscriptionId
    earliest: bool = True
    """Whether the subscription begins with the oldest message; otherwise with the next one that is stored."""


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    subscription: SubscriptionId


@dataclass(frozen=True, slots=True)
class Receive:
    """Lease messages to a consumer. Its result is a tuple of `Delivered`."""

    subscription: SubscriptionId
    consumer: str
    kind: Kind
    count_max: int = 10
    wait_s: float = 0.0
    ack_timeout_s: float = 5.0
    session_ttl_s: float = 5.0
    request_id: str | None = None
    """A call with the id of an earlier one of the consumer returns the messages of that one which are still held."""
    redeliver: bool = False
    """Whether everything that the consumer holds is returned first."""


@dataclass(frozen=True, slots=True)
class Acknowledge:
    subscription: SubscriptionId
    keys: tuple[Key, ...]
    cumulative: bool = False
    """Whether everything up to the only key is acknowledged."""


@dataclass(frozen=True, slots=True)
class Retry(Acknowledge):
    """Move messages to the retry topic, which acknowledges them. Its result is the keys of those that were moved."""

    delay_s: float = 0.0
    is_dead: bool = False
    """Whether they are moved to the dead-letter topic instead."""


@dataclass(frozen=True, slots=True)
class ReadCopies:
    """Read the whole retry topic of a subscription. Its result is a tuple of `Copied`."""

    subscription: SubscriptionId
    is_dead: bool = False
    """Whether the dead-letter topic is read instead."""


@dataclass(frozen=True, slots=True)
class Return:
    """Return messages for redelivery after a delay (negative acknowledgement)."""

    subscription: SubscriptionId
    keys: tuple[Key, ...]
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Leave:
    """End a consumer. What it holds is delivered to others."""

    subscription: SubscriptionId
    consumer: str


@dataclass(frozen=True, slots=True)
class Seek:
    """Move a subscription. Its result is the (ledger, entry) that comes next.

    `to`: the message that comes next; None: the oldest one if `earliest`, else the next one that is stored.
    """

    subscription: SubscriptionId
    to: Key | None
    earliest: bool = True


@dataclass(frozen=True, slots=True)
class Drain:
    """Return the number of entries that a subscription has not acknowledged."""

    subscription: SubscriptionId


@dataclass(frozen=True, slots=True)
class Inspect:
    """Return the keys of the entries that a subscription has not acknowledged, as those of whole entries."""

    subscription: SubscriptionId


Request = (
    Produce
    | Subscribe
    | Unsubscribe
    | Receive
    | Acknowledge
    | Retry
    | ReadCopies
    | Return
    | Leave
    | Seek
    | Drain
    | Inspect
)


class Delivered(NamedTuple):
    """A message as a consumer receives it."""

    key: Key
    text: str
    redelivery_count: int = 0


class Copied(NamedTuple):
    """A message of a retry topic."""

    origin: Key
    """Key of the message that was moved."""
    text: str
    stored_at_s: float
    """When the broker began to write the copy, by the clock of that broker."""


class Outcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class Call:
    """One call of a client. See the module docstring."""

    number: int
    client: str
    request: Request
    sent: Instant
    broker: str = ""
    incarnation: int | None = None
    """Which opening of the topic served the call. A broker that takes the topic over has a higher number."""
    started: Instant | None = None
    settled: Instant | None = None
    outcome: Outcome = Outcome.UNKNOWN
    result: object = None
    error: str = ""
    is_lost: bool = False
    """Whether the process that served the call ended before it settled the call."""

    @property
    def is_done(self) -> bool:
        return self.outcome is Outcome.DONE

    @property
    def may_be_done(self) -> bool:
        """Whether the request was or may have been carried out."""
        return self.outcome is not Outcome.REFUSED

    @property
    def deliveries(self) -> tuple[Delivered, ...]:
        """The messages that a `Receive` returned."""
        return self.result if isinstance(self.result, tuple) and isinstance(self.request, Receive) else ()

    def settled_before(self, instant: Instant) -> bool:
        """Return whether the call certainly ended before `instant`."""
        return self.settled is not None and self.settled < instant

    def __str__(self) -> str:
        at = f" at {self.broker}/{self.incarnation}" if self.broker else ""
        return f"call {self.number} ({type(self.request).__name__.lower()} of {self.client}{at})"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A broker has opened a topic: all steps of its opening are complete."""

    at: Instant
    topic: str
    incarnation: int
    broker: str


@dataclass(frozen=True, slots=True)
class Trimmed:
    """The metadata of a topic no longer names these ledgers."""

    at: Instant
    topic: str
    ledgers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A process wrote a znode of a topic: its list of ledgers, or the state of a cursor."""

    at: Instant
    topic: str
    cursor: str | None
    """Name of the cursor; None: the list of ledgers."""
    process: str


class History:
    """Calls and events in the order in which they began."""

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        self.calls: list[Call] = []
        self.opened: list[Opened] = []
        self.trimmed: list[Trimmed] = []
        self.written: list[Written] = []
        self._now_s = now_s
        self._number = 0

    def instant(self) -> Instant:
        """Return the present instant, which is later than all earlier ones."""
        self._number += 1
        return Instant(self._now_s(), self._number)

    def topic_opened(self, topic: str, incarnation: int, broker: str) -> None:
        self.opened.append(Opened(self.instant(), topic, incarnation, broker))

    def lasting(self) -> list[SubscriptionId]:
        """Return the subscriptions that certainly exist at the end."""
        created: dict[SubscriptionId, None] = {}
        deleted: set[SubscriptionId] = set()
        for call in self.calls:
            if isinstance(call.request, Subscribe) and call.is_done:
                created[call.request.subscription] = None
            elif isinstance(call.request, Unsubscribe) and call.may_be_done:
                deleted.add(call.request.subscription)
        return [one for one in created if one not in deleted]

    def begin(self, client: str, request: Request) -> Call:
        call = Call(len(self.calls), client, request, self.instant())
        self.calls.append(call)
        return call


@dataclass(frozen=True, slots=True)
class Rules:
    """What the brokers of a run promise beyond the common invariants."""

    durable_counts: bool = False
    """Whether redelivery counts survive a change of the owner."""
    early_s_max: float = 0.0
    """Maximum seconds by which a delayed message may be early, because clocks differ."""


@dataclass(slots=True)
class Breach:
    """A violated invariant. `calls`: the numbers of the calls that show it."""

    invariant: str
    text: str
    calls: tuple[int, ...] = field(default=())

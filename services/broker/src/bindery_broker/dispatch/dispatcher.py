"""The protocol of dispatchers: one state machine for each subscription type, with the same operations.

The owner of a dispatcher reads entries for it and asks it, for consumers that have room, what to deliver (`taker`,
`take`). A dispatcher that keeps the order of the topic (`in_order`) returns all messages in delivery together: it
requests that the owner reads again from the lowest unacknowledged message (`rewind_wanted`), and it may delay delivery
(`paused_until`). Other dispatchers return single messages, which the owner reads again (`replay`).

| event                         | operation                                  |
|-------------------------------|--------------------------------------------|
| a consumer joins, leaves      | `join`, `leave`                            |
| entries were read             | `offer`, `offer_again`, `give_back`        |
| consumers have room           | `taker`, `take`                            |
| messages are acknowledged     | `begin_ack`, then `finish_ack`, `fail_ack` |
| messages are held to be moved | `hold`, then `finish_ack`, `return_held`   |
| messages are returned         | `nack`, `release`                          |
| time passes                   | `tick`                                     |
| the cursor was moved          | `reset`                                    |
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from bindery_pulsar.message_id import Position

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import Delivery, DispatchLimits, Item, MessageRef
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.portions import Portion

B = TypeVar("B")


class Redelivered(NamedTuple):
    """Messages of one entry that were returned, and how often by now."""

    position: Position
    bits: int
    redelivery_count: int


class CountsOf(Protocol):
    """Return the redelivery counts of an entry's messages above 0: (count, bits), without a message in common."""

    def __call__(self, position: Position, /) -> Sequence[tuple[int, int]]: ...


def no_counts(_position: Position, /) -> Sequence[tuple[int, int]]:
    return ()


class Dispatcher(Protocol[B]):
    """The interface of a dispatcher. Times are monotonic seconds."""

    in_order: bool
    """Whether messages are delivered in the topic's order. Cumulative acknowledgements require this order."""
    keeps_delays: bool
    """Whether delayed messages wait for their time. Otherwise they are delivered in the order of the topic."""
    hash_of: Callable[[bytes], int] | None
    """Hash of an entry's key, which its items must have; None: they need none."""
    limits: DispatchLimits
    leases: LeaseTable
    generation: int
    """Number that is incremented when all messages read before must be dropped."""
    rewind_wanted: bool
    """Whether the owner must move its read position to the lowest unacknowledged message and call `rewound`."""
    paused_until: float | None
    """Time before which nothing is delivered; None: not paused."""
    redelivered: list[Redelivered]
    """Counts that the owner must store, and remove from this list, before it reads again what was returned."""

    @property
    def ready_count(self) -> int: ...

    @property
    def ready_bytes(self) -> int: ...

    @property
    def known_count(self) -> int: ...
    def known_bits(self, position: Position) -> int: ...

    def find(self, ref: MessageRef) -> Portion[Any] | None: ...

    # Consumers
    def join(self, consumer: Consumer) -> None: ...
    def leave(self, consumer: Consumer) -> int: ...

    # Reading
    def room(self, *, asked: int | None = None) -> int: ...
    def replayable(self) -> bool: ...
    def replay(self, count_max: int, *, entries_max: int | None = None) -> list[MessageRef]: ...
    def replay_due(self, positions: Iterable[Position]) -> None: ...
    def give_back(self, refs: Iterable[MessageRef]) -> None: ...
    def forget_missing(self, refs: Iterable[MessageRef]) -> None: ...
    def rewound(self) -> None: ...
    def offer(self, items: Sequence[Item[B]], *, generation: int) -> None: ...
    def offer_again(self, items: Sequence[Item[B]], *, generation: int) -> None: ...

    # Delivery
    def reads_for(self, waiting: Collection[Consumer]) -> Consumer | None: ...
    def prepare(self, waiting: Collection[Consumer]) -> None: ...
    def make_room(self, waiting: Collection[Consumer]) -> None: ...
    def taker(self, waiting: Collection[Consumer], *, now: float) -> Consumer | None: ...
    def next_size(self, consumer: Consumer) -> int: ...
    def take(
        self,
        consumer: Consumer,
        *,
        count_max: int,
        bytes_max: int,
        lease_s: float,
        now: float,
        alone_from: int | None = None,
    ) -> list[Delivery[B]]: ...
    def held(self, consumer: Consumer, refs: Iterable[MessageRef]) -> list[Portion[Any]]: ...
    def renew(
        self, consumer: Consumer, refs: Iterable[MessageRef], *, lease_s: float, now: float
    ) -> tuple[str, list[Portion[Any]]]: ...

    # Acknowledgement and redelivery
    def begin_ack(self, refs: Iterable[MessageRef]) -> list[Portion[Any]]: ...
    def begin_cumulative_ack(self, last: MessageRef) -> list[Portion[Any]]: ...
    def finish_ack(self, portions: Iterable[Portion[Any]]) -> None: ...
    def fail_ack(self, portions: Iterable[Portion[Any]]) -> None: ...
    def hold(self, refs: Iterable[MessageRef]) -> tuple[list[Portion[Any]], list[Portion[Any]]]: ...
    def part_of(self, portion: Portion[Any], bits: int) -> Portion[Any]: ...
    def return_held(self, portions: Iterable[Portion[Any]], *, delay_s: float, now: float) -> None: ...
    def forget_upto(self, position: Position) -> None: ...
    def nack(
        self, refs: Iterable[MessageRef], *, delay_s: float, now: float, consumer: Consumer | None = None
    ) -> list[MessageRef]: ...
    def hand_back(self, consumer: Consumer, refs: Iterable[MessageRef]) -> None: ...
    def release(self, consumer: Consumer) -> int: ...
    def put_down(self) -> MessageRef | None: ...
    def tick(self, *, now: float) -> int: ...
    def next_deadline(self) -> float | None: ...
    def reset(self) -> None: ...
    def state_counts(self) -> dict[str, int]: ...

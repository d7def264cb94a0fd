"""Judge the deliveries of delayed messages, and compute how late they were. Pure.

A message is a number from 0 on; it is due at a known time. Consumers record each receive as a `Receipt`, which also
acknowledges messages of earlier ones. Broker and consumers share the clock of one machine.

| error       | meaning                                                                            |
|-------------|------------------------------------------------------------------------------------|
| early       | received before it was due                                                         |
| redelivered | delivered by a receive that was sent after its acknowledgement had been answered   |
| phantom     | a number that was not sent                                                         |
| missing     | never received, or received and never acknowledged                                 |

The *lateness* of a message is the time from when it is due to the response that has it first. It includes the way to
the consumer, and the time in which the consumers had no request that waits.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

EXAMPLES_MAX: Final = 5
LATE_MS: Final = 1_000
"""Lateness in milliseconds up to which a message is in time."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receive. Times are milliseconds since 1970."""

    begun: int
    ended: int
    outcome: str
    """ok, failed or unknown."""
    got: "array[int]"
    """Numbers of the messages in the response."""
    acked: "array[int]"
    """Numbers of the messages that it acknowledged."""


@dataclass(slots=True)
class Lateness:
    """Of the messages of a part of the run, in milliseconds."""

    count: int = 0
    p50: int = 0
    p99: int = 0
    p999: int = 0
    longest: int = 0
    in_time: float = 1.0
    """Share of the messages that were at most LATE_MS late."""

    def __str__(self) -> str:
        return (
            f"{self.count:,} messages: p50 {self.p50:,} ms, p99 {self.p99:,} ms, p99.9 {self.p999:,} ms, longest "
            f"{self.longest:,} ms; {self.in_time:.3%} within {LATE_MS:,} ms"
        )


@dataclass(slots=True)
class Delays:
    """The judgement."""

    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    delivered: int = 0
    repeated: int = 0
    """Deliveries of messages that were received before, and were not certainly acknowledged."""
    steady: Lateness = field(default_factory=Lateness)
    """Of the messages that were due while no broker was dead or caught up."""
    disturbed: Lateness = field(default_factory=Lateness)
    """Of the others."""

    def add(self, kind: str, text: str) -> None:
        self.errors[kind] += 1
        if self.errors[kind] <= EXAMPLES_MAX:
            self.examples.append(f"{kind}: {text}")


def judge_delays(
    due_at: Sequence[int],
    receipts: Iterable[Receipt],
    *,
    drained: bool,
    disturbances: Sequence[tuple[int, int]] = (),
) -> Delays:
    """Judge a run.

    `due_at`: when each message is due. `drained`: whether the broker confirmed at the end that all messages are
    acknowledged; an acknowledgement without an answer then counts. `disturbances`: periods in which the broker was dead
    or had not caught up. Times are milliseconds since 1970.
    """
    found = Delays()
    count = len(due_at)
    first_at = array("q", [0]) * count
    done_at = array("q", [0]) * count
    """When the acknowledgement was answered; -1: it has an unknown outcome."""
    for receipt in sorted(receipts, key=lambda receipt: receipt.ended):
        for number in receipt.got:
            if not 0 <= number < count:
                found.add("phantom", f"message {number} of {count:,}")
                continue
            found.delivered += 1
            if receipt.ended < due_at[number]:
                found.add("early", f"message {number} came {due_at[number] - receipt.ended} ms before it was due")
            if 0 < done_at[number] < receipt.begun:
                late = receipt.begun - done_at[number]
                found.add(
                    "redelivered", f"message {number}, asked for {late} ms after its acknowledgement was answered"
                )
            elif first_at[number]:
                found.repeated += 1
            first_at[number] = first_at[number] or receipt.ended
        if receipt.outcome != "failed":
            for number in receipt.acked:
                if done_at[number] <= 0:
                    done_at[number] = receipt.ended if receipt.outcome == "ok" else -1
    for number in range(count):
        if not first_at[number]:
            found.add("missing", f"message {number} was never received")
        elif not done_at[number] or (done_at[number] < 0 and not drained):
            found.add("missing", f"message {number} was received and not acknowledged")
    steady: list[int] = []
    disturbed: list[int] = []
    for due, first in zip(due_at, first_at, strict=True):
        if first:
            is_disturbed = any(begin <= due < end for begin, end in disturbances)
            (disturbed if is_disturbed else steady).append(max(0, first - due))
    found.steady, found.disturbed = lateness_of(steady), lateness_of(disturbed)
    return found


def lateness_of(values: list[int]) -> Lateness:
    """Return the figures of some values, in milliseconds."""
    if not values:
        return Lateness()
    values.sort()
    count = len(values)

    def share(part: float) -> int:
        return values[max(0, math.ceil(count * part) - 1)]

    in_time = sum(value <= LATE_MS for value in values) / count
    return Lateness(count, share(0.5), share(0.99), share(0.999), values[-1], in_time)


def caught_up_at(due_at: Sequence[int], receipts: Iterable[Receipt], *, since: int) -> int | None:
    """Return the end of the first response from `since` on whose messages were all in time; None: there is none.

    Responses without messages do not count.
    """
    for receipt in sorted(receipts, key=lambda receipt: receipt.ended):
        if receipt.begun >= since and receipt.got:
            known = [number for number in receipt.got if 0 <= number < len(due_at)]
            if known and all(receipt.ended - due_at[number] <= LATE_MS for number in known):
                return receipt.ended
    return None

"""State of the leader between its rounds: what it has moved, until the reports show it. Pure.

Reports are some seconds old. A bundle that has just moved may still be in the report of its source, in none, or in that
of its destination with hardly any load, because its rates begin again there. Until SETTLE_S after a move, its weight
counts as at least what it was before, and it counts for its destination unless a report says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bindery_broker.balancing.planning import Loaded, Move
from bindery_broker.balancing.weights import weight, weight_of
from bindery_broker.ownership.records import BrokerRecord

SETTLE_S: Final = 20.0
"""Seconds after a move until the reports are taken as they are: rates cover ten seconds, and reports are late by five.
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A move that has ended."""

    move: Move
    moved: bool
    """False: it failed, and the bundle rests before the next attempt."""
    at: float


class Rounds:
    """Times are monotonic seconds."""

    def __init__(self, *, rest_s: float) -> None:
        self._rest_s = rest_s
        self._ended: dict[str, Ended] = {}
        """By bundle: the last move."""

    def ended(self, move: Move, *, moved: bool, now: float) -> None:
        """Record that a move has succeeded or failed."""
        self._ended[move.bundle] = Ended(move, moved, now)

    def resting(self, now: float) -> set[str]:
        """Return the bundles that stay where they are, because they have moved a short time ago."""
        keep_s = max(self._rest_s, SETTLE_S)
        self._ended = {name: one for name, one in self._ended.items() if now - one.at < keep_s}
        return {name for name, one in self._ended.items() if now - one.at < self._rest_s}

    def loaded(self, records: Mapping[str, BrokerRecord], *, now: float) -> list[Loaded]:
        """Return the brokers that may get bundles, with their bundles. `records`: by name, of all live brokers."""
        weights = {name: weight_of(one) for name, one in records.items() if is_receiver(one)}
        bundles: dict[str, dict[str, float]] = {
            name: {bundle: weight(load) for bundle, load in records[name].bindery_bundles.items()} for name in weights
        }
        for name, ended in self._ended.items():
            if not ended.moved or now - ended.at >= SETTLE_S:
                continue
            move, at = ended.move, {broker for broker, held in bundles.items() if name in held}
            if move.destination not in weights or at - {move.source, move.destination}:
                continue  # it has gone on since
            units = max(move.weight, bundles[move.destination].get(name, 0.0))
            for broker in at:
                weights[broker] -= bundles[broker].pop(name)
            bundles[move.destination][name] = units
            weights[move.destination] += units
        return [Loaded(name, one, bundles[name]) for name, one in weights.items()]


def is_receiver(record: BrokerRecord) -> bool:
    """Return whether a broker may get bundles: one of Bindery that is not draining."""
    return record.bindery and not record.draining and bool(record.url)

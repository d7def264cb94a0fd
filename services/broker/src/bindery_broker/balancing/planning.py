"""Plan which bundles move from which broker to which. Pure.

Nothing moves while the weight of each broker is within `threshold` of the mean. Otherwise bundles move from the
heaviest broker that has a suitable one to the lightest, until all are within half of the threshold, no bundle suits, or
the maximum of a round is reached:

    - |------------[-----[-- mean --]-----]------------| +
                   |     `- stop ---'     |
                   `------- start --------'

The bundle that moves is the one that brings its two brokers closest to each other, among those that weigh at most
SHARE_MAX of the difference of the two. So each move makes the sum of the squares of all weights smaller, and the moves
come to an end. The distance between the two thresholds and SHARE_MAX keep bundles from going back and forth while rates
vary. A bundle that is heavier never moves: it would only make the other broker the heaviest. It can be split.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

SHARE_MAX: Final = 2 / 3
"""Maximum weight of a bundle that moves, as a part of the difference between its two brokers."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A broker of Bindery that may get bundles."""

    name: str
    """`host:port`."""
    weight: float
    """Units, with the bundles that are not in `bundles`."""
    bundles: dict[str, float] = field(default_factory=dict)
    """Weights of the bundles that may move, by name."""


@dataclass(frozen=True, slots=True)
class Move:
    bundle: str
    source: str
    destination: str
    weight: float
    """Of the bundle, in units."""


def is_even(weights: Collection[float], *, threshold: float) -> bool:
    """Return whether each weight is within this part of their mean."""
    mean = sum(weights) / len(weights) if weights else 0.0
    return all(abs(one - mean) <= threshold * mean for one in weights)


def plan(brokers: Iterable[Loaded], *, threshold: float, moves_max: int, resting: Collection[str] = ()) -> list[Move]:
    """Return the moves of one round, in their order. `resting`: bundles that stay where they are."""
    weights: dict[str, float] = {}
    movable: dict[str, dict[str, float]] = {}
    for broker in brokers:
        weights[broker.name] = broker.weight
        movable[broker.name] = {name: one for name, one in broker.bundles.items() if name not in resting}
    moves: list[Move] = []
    if is_even(weights.values(), threshold=threshold):
        return moves
    while len(moves) < moves_max and not is_even(weights.values(), threshold=threshold / 2):
        move = _next(weights, movable)
        if move is None:
            break
        moves.append(move)
        del movable[move.source][move.bundle]  # a bundle moves once in a round
        weights[move.source] -= move.weight
        weights[move.destination] += move.weight
    return moves


def _next(weights: dict[str, float], movable: dict[str, dict[str, float]]) -> Move | None:
    lightest = min(weights, key=lambda name: (weights[name], name))
    for source in sorted(weights, key=lambda name: (-weights[name], name)):
        gap = weights[source] - weights[lightest]
        fitting = [(abs(gap - 2 * one), name) for name, one in movable[source].items() if 0 < one <= SHARE_MAX * gap]
        if fitting:
            _, bundle = min(fitting)
            return Move(bundle, source, lightest, movable[source][bundle])
    return None

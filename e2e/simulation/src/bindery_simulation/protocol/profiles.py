"""Choose the profile of a history at random: the weights of its events and the probabilities of its faults.

Profiles lead random histories to states in which protocols often fail: races with a fence, ensemble changes without a
spare bookie, concurrent recoveries, lost disks, tailing readers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

QUORUMS = (
    (3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 2, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3), (2, 2, 1), (2, 2, 2), (1, 1, 1),
    (4, 4, 3), (4, 2, 2), (5, 4, 2), (3, 2, 1),
)  # fmt: skip
"""(ensemble size, write quorum, ack quorum) of a history. The default of the product is the most frequent."""


@dataclass(slots=True)
class Profile:
    """Weights and probabilities of one history. A probability applies to each step or to each message."""

    name: str
    events: dict[str, int]
    """Weights of the events."""
    steps: int = 40
    event_rate: float = 0.15
    loss: float = 0.0
    duplication: float = 0.0
    refusal: float = 0.0
    fence_loss: float = 0.0
    unknown: float = 0.0
    early_timeout: float = 0.0
    slow: float = 0.0
    """Probability that a link between a client and a bookie is slow."""
    spares: tuple[int, ...] = (0, 1, 2)
    quorums: tuple[tuple[int, int, int], ...] = QUORUMS
    opening: tuple[str, ...] = ("add",)
    """Events before the first step."""
    bag: tuple[str, ...] = field(default=())
    """Each event as many times as its weight."""

    def __post_init__(self) -> None:
        self.bag = tuple(name for name, weight in self.events.items() for _ in range(weight))


def _fence_race(rng: Random) -> Profile:
    """A writer under load, and a recovery whose first fence is lost."""
    return Profile(
        "fence race",
        {"add": 4, "recover": 3, "kill recovery": 1, "close": 1},
        steps=rng.choice((20, 30)),
        duplication=rng.choice((0.0, 0.0, 0.05)),
        fence_loss=rng.choice((0.0, 0.4, 0.4)),
        slow=rng.choice((0.0, 0.3, 0.3)),
        spares=(0, 0, 1),
        opening=("add", "recover"),
    )


def _change_race(rng: Random) -> Profile:
    """Several bookies fail during adds, there are few spare bookies, and answers of the metadata are lost."""
    return Profile(
        "change race",
        {
            "add": 9,
            "crash": 4,
            "two crash": 3,
            "restart": 3,
            "time": 1,
            "recover": 2,
            "close": 1,
            "metadata cut": 1,
            "cut": 2,
            "heal": 1,
        },
        steps=rng.choice((25, 50)),
        event_rate=0.2,
        duplication=rng.choice((0.0, 0.0, 0.1)),
        loss=rng.choice((0.0, 0.03)),
        unknown=rng.choice((0.0, 0.4)),
        refusal=rng.choice((0.0, 0.03, 0.1)),
        slow=rng.choice((0.0, 0.2)),
        early_timeout=rng.choice((0.0, 0.02)),
        spares=(0, 1, 1, 2),
        quorums=(*QUORUMS, (3, 3, 1), (4, 4, 2), (5, 5, 3)),
        opening=("add", rng.choice(("crash", "two crash", "add"))),
    )


def _rivals(rng: Random) -> Profile:
    """Several concurrent recoveries, some of which are killed, while bookies fail."""
    return Profile(
        "rival recoveries",
        {
            "add": 3,
            "recover": 5,
            "kill recovery": 2,
            "crash": 3,
            "restart": 3,
            "kill writer": 1,
            "time": 1,
            "cut": 2,
            "heal": 1,
            "metadata cut": 1,
        },
        steps=rng.choice((25, 50)),
        duplication=rng.choice((0.0, 0.0, 0.1)),
        loss=rng.choice((0.0, 0.03)),
        unknown=rng.choice((0.0, 0.3)),
        slow=rng.choice((0.0, 0.3)),
        spares=(1, 2, 2),
        opening=("add", "add", "recover"),
    )


def _lost_disks(rng: Random) -> Profile:
    """Disks are replaced by empty disks and entries are corrupted, as far as the quorums tolerate it."""
    return Profile(
        "lost disks",
        {"add": 4, "lose storage": 2, "rot": 2, "recover": 2, "crash": 1, "restart": 1, "read": 1, "replicate": 1},
        steps=rng.choice((25, 50)),
        duplication=rng.choice((0.0, 0.0, 0.1)),
        loss=rng.choice((0.0, 0.02)),
        slow=rng.choice((0.0, 0.3)),
        quorums=((3, 3, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3), (2, 2, 2), (4, 4, 3), (5, 3, 2)),
        opening=("add", "add"),
    )


def _tail(rng: Random) -> Profile:
    """Readers open and tail the ledger."""
    return Profile(
        "tail",
        {"add": 5, "read": 3, "crash": 1, "restart": 1, "recover": 1, "close": 1, "time": 2},
        steps=rng.choice((25, 50)),
        event_rate=0.2,
        loss=rng.choice((0.0, 0.02)),
        slow=rng.choice((0.0, 0.2)),
        opening=("add", "read"),
    )


def _deletion(rng: Random) -> Profile:
    """The ledger is deleted while its writer adds entries."""
    return Profile(
        "deletion",
        {"add": 6, "delete": 2, "crash": 1, "restart": 1, "read": 1, "recover": 1},
        steps=rng.choice((25, 40)),
        event_rate=0.25,
        loss=rng.choice((0.0, 0.02)),
        opening=("add",),
    )


def _repair(rng: Random) -> Profile:
    """A ledger is closed, bookies are lost permanently, and copies are restored."""
    return Profile(
        "repair",
        {
            "replicate": 4,
            "lose storage": 2,
            "rot": 2,
            "lose bookie": 1,
            "crash": 1,
            "restart": 2,
            "read": 1,
            "recover": 1,
        },
        steps=rng.choice((30, 60)),
        event_rate=0.12,
        loss=rng.choice((0.0, 0.01)),
        unknown=rng.choice((0.0, 0.2)),
        spares=(1, 1, 2),
        quorums=((3, 3, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3), (2, 2, 2), (4, 4, 3)),
        opening=rng.choice(
            (
                ("add", "add", "rest", "close", "rest"),
                ("add", "add", "rest", "close", "rest"),
                ("add", "rest", "crash", "add", "rest", "restart", "add", "rest"),  # open, with two ensembles or more
            )
        ),
    )


def _anything(rng: Random) -> Profile:
    """All events, in a longer history."""
    return Profile(
        "anything",
        {
            "add": 8,
            "crash": 2,
            "restart": 2,
            "recover": 2,
            "kill recovery": 1,
            "kill writer": 1,
            "close": 1,
            "lose storage": 1,
            "rot": 1,
            "read": 2,
            "replicate": 1,
            "delete": 1,
            "cut": 1,
            "heal": 1,
            "metadata cut": 1,
            "lose bookie": 1,
            "time": 1,
        },
        steps=rng.choice((30, 60, 120)),
        event_rate=rng.choice((0.1, 0.2)),
        loss=rng.choice((0.0, 0.02, 0.05)),
        duplication=rng.choice((0.0, 0.1)),
        refusal=rng.choice((0.0, 0.02)),
        fence_loss=rng.choice((0.0, 0.3)),
        unknown=rng.choice((0.0, 0.3)),
        early_timeout=rng.choice((0.0, 0.01, 0.03)),
        slow=rng.choice((0.0, 0.25)),
    )


PROFILES: dict[str, Callable[[Random], Profile]] = {
    "fence race": _fence_race,
    "change race": _change_race,
    "rival recoveries": _rivals,
    "lost disks": _lost_disks,
    "tail": _tail,
    "deletion": _deletion,
    "repair": _repair,
    "anything": _anything,
}
_WEIGHTED = (
    ("fence race",) * 5 + ("change race",) * 5 + ("rival recoveries",) * 3 + ("lost disks",) * 3 + ("tail",) * 2
    + ("deletion",) + ("repair",) * 2 + ("anything",) * 3
)  # fmt: skip


def draw_profile(rng: Random, name: str | None = None) -> Profile:
    """Return the profile `name`, or a random profile if None."""
    return PROFILES[name or _WEIGHTED[int(rng.random() * len(_WEIGHTED))]](rng)

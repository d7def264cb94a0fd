"""Profiles of histories. A profile weights the events and sets the chances of faults, so that random histories reach
the states where protocols break: races of fencing, changes without a spare, rival recoveries, lost disks, tails.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

QUORUMS = (
    (3, 3, 2), (3, 3, 2), (3, 3, 2), (3, 2, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3), (2, 2, 1), (2, 2, 2), (1, 1, 1),
    (4, 4, 3), (4, 2, 2), (5, 4, 2), (3, 2, 1),
)  # fmt: skip
"""Ensemble size, write quorum, ack quorum; the default one most often."""


@dataclass(slots=True)
class Profile:
    """Chances are per step or per message."""

    name: str
    events: dict[str, int]
    """Weight of each event, when one happens at all."""
    steps: int = 40
    event_rate: float = 0.15
    loss: float = 0.0
    doubling: float = 0.0
    refusal: float = 0.0
    fence_loss: float = 0.0
    unknown: float = 0.0
    haste: float = 0.0
    slow: float = 0.0
    """Chance that a link between a client and a bookie is slow."""
    spares: tuple[int, ...] = (0, 1, 2)
    quorums: tuple[tuple[int, int, int], ...] = QUORUMS
    opening: tuple[str, ...] = ("add",)
    """Events before the first step."""
    bag: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self.bag = tuple(name for name, weight in self.events.items() for _ in range(weight))


def _fence_race(rng: Random) -> Profile:
    """Nothing but a writer in full swing and a recovery whose first fence gets lost."""
    return Profile(
        "fence race",
        {"add": 4, "recover": 3, "kill recovery": 1, "close": 1},
        steps=rng.choice((20, 30)),
        doubling=rng.choice((0.0, 0.0, 0.05)),
        fence_loss=rng.choice((0.0, 0.4, 0.4)),
        slow=rng.choice((0.0, 0.3, 0.3)),
        spares=(0, 0, 1),
        opening=("add", "recover"),
    )


def _change_race(rng: Random) -> Profile:
    """Bookies fail while adds fly, several at once, spares are few, and metadata keeps its answers to itself."""
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
        doubling=rng.choice((0.0, 0.0, 0.1)),
        loss=rng.choice((0.0, 0.03)),
        unknown=rng.choice((0.0, 0.4)),
        refusal=rng.choice((0.0, 0.03, 0.1)),
        slow=rng.choice((0.0, 0.2)),
        haste=rng.choice((0.0, 0.02)),
        spares=(0, 1, 1, 2),
        quorums=(*QUORUMS, (3, 3, 1), (4, 4, 2), (5, 5, 3)),
        opening=("add", rng.choice(("crash", "two crash", "add"))),
    )


def _rivals(rng: Random) -> Profile:
    """Several recoveries at once; some die half-way, over bookies that fail."""
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
        doubling=rng.choice((0.0, 0.0, 0.1)),
        loss=rng.choice((0.0, 0.03)),
        unknown=rng.choice((0.0, 0.3)),
        slow=rng.choice((0.0, 0.3)),
        spares=(1, 2, 2),
        opening=("add", "add", "recover"),
    )


def _lost_disks(rng: Random) -> Profile:
    """Disks are replaced by empty ones and bits rot, within what the quorums bear."""
    return Profile(
        "lost disks",
        {"add": 4, "lose storage": 2, "rot": 2, "recover": 2, "crash": 1, "restart": 1, "read": 1, "replicate": 1},
        steps=rng.choice((25, 50)),
        doubling=rng.choice((0.0, 0.0, 0.1)),
        loss=rng.choice((0.0, 0.02)),
        slow=rng.choice((0.0, 0.3)),
        quorums=((3, 3, 2), (3, 2, 2), (4, 3, 2), (3, 3, 3), (2, 2, 2), (4, 4, 3), (5, 3, 2)),
        opening=("add", "add"),
    )


def _tail(rng: Random) -> Profile:
    """Readers that open, tail and follow."""
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
    """The ledger is deleted under its writer."""
    return Profile(
        "deletion",
        {"add": 6, "delete": 2, "crash": 1, "restart": 1, "read": 1, "recover": 1},
        steps=rng.choice((25, 40)),
        event_rate=0.25,
        loss=rng.choice((0.0, 0.02)),
        opening=("add",),
    )


def _repair(rng: Random) -> Profile:
    """A ledger is closed, bookies go for good, copies are brought back."""
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
                ("add", "rest", "crash", "add", "rest", "restart", "add", "rest"),  # open, of two ensembles or more
            )
        ),
    )


def _anything(rng: Random) -> Profile:
    """All at once, longer."""
    return Profile(
        "anything",
        {
            "add": 8, "crash": 2, "restart": 2, "recover": 2, "kill recovery": 1, "kill writer": 1, "close": 1,
            "lose storage": 1, "rot": 1, "read": 2, "replicate": 1, "delete": 1, "cut": 1, "heal": 1, "metadata cut": 1,
            "lose bookie": 1, "time": 1,
        },
        steps=rng.choice((30, 60, 120)),
        event_rate=rng.choice((0.1, 0.2)),
        loss=rng.choice((0.0, 0.02, 0.05)),
        doubling=rng.choice((0.0, 0.1)),
        refusal=rng.choice((0.0, 0.02)),
        fence_loss=rng.choice((0.0, 0.3)),
        unknown=rng.choice((0.0, 0.3)),
        haste=rng.choice((0.0, 0.01, 0.03)),
        slow=rng.choice((0.0, 0.25)),
    )  # fmt: skip


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
    """A profile at random, or the one of that name."""
    return PROFILES[name or _WEIGHTED[int(rng.random() * len(_WEIGHTED))]](rng)

"""Placement: which bookies a new ledger, or a hole in an ensemble, gets.

Pure: the candidates are given as they stand now, and chance comes from `rng`, so equal inputs choose alike.

- Racks: the bookies of each write quorum are spread over as many racks as there are. It is a preference, never a
  reason to refuse: with every bookie in `DEFAULT_RACK` it decides nothing.
- Free space: when every usable candidate tells its free bytes, the chance of being chosen is proportional to them;
  else all are alike.
- Refusals are kept: NotEnoughBookies says what was asked, what was there, and why each bookie was not taken.

Source: BookKeeper RackawareEnsemblePlacementPolicy, of which this keeps the intent.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import BookieId

DEFAULT_RACK: Final = "/default-rack"


class RandomSource(Protocol):
    """As much of `random.Random` as is needed."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bookie as the cluster knows it now."""

    bookie_id: BookieId
    rack: str = DEFAULT_RACK
    free_bytes: int | None = None
    """None: not known."""
    refusal: str | None = None
    """Why it takes no new ledgers ("read-only", "draining", ...); None: it does."""


def choose_ensemble(
    candidates: Collection[Candidate],
    *,
    ensemble_size: int,
    write_quorum: int,
    ack_quorum: int,
    rng: RandomSource,
    exclude: Mapping[BookieId, str] | None = None,
) -> tuple[BookieId, ...]:
    """Bookies for a new ledger, in ensemble order. `exclude`: bookie -> why not (a reason for the error's text).

    Raises NotEnoughBookies with the facts asked, usable, known and refused (bookie -> reason).
    """
    raise NotImplementedError


def choose_replacements(
    candidates: Collection[Candidate],
    *,
    ensemble: Sequence[BookieId],
    failed: Mapping[int, BookieId],
    write_quorum: int,
    rng: RandomSource,
    exclude: Mapping[BookieId, str] | None = None,
) -> dict[int, BookieId]:
    """Replacements by ensemble index for the members in `failed`; fewer than asked when spares run out.

    Members of the ensemble and the failed bookies are never chosen. Raises NotEnoughBookies when there is none at all.
    """
    raise NotImplementedError

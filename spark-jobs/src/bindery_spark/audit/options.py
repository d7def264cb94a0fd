"""Options of an audit run. They are stored with the run, so that a resumed run reads and checks the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bindery_client.connection.security import NO_FILES, SecurityFiles
from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX
from bindery_metadata.ledgers.verified_records import LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one run."""

    zookeeper: str = ""
    ledgers_root: str = "/ledgers"
    level: str = "deep"
    first: int = 0
    last: int = ID_MAX
    bookie: str | None = None
    """Audit only ledgers whose metadata names this bookie; None: all ledgers."""
    since_verified_ms: int | None = None
    """Skip ledgers that a run of the same or a deeper level verified within this time (ms); None: skip none."""
    open_max_ms: int = 7 * 86_400_000
    """Age in ms above which an open ledger is a finding."""
    orphan_after_ms: int = 3_600_000
    """Age in ms above which a ledger that no topic or cursor names is a finding."""
    rate: str = "64MiB/s"
    """Maximum bytes per second read from one bookie."""
    timeout_s: float = 10.0
    """Per-bookie read timeout in seconds."""
    group_bytes: int | None = None
    """Bytes to read between two checkpoints; None: chosen by `plan`."""
    security: SecurityFiles = NO_FILES
    orphans: bool = True
    """Whether a deep audit also lists orphaned data on each bookie, through the bookie's admin HTTP port."""
    record: bool = True
    """Whether to record in the cluster which ledgers were verified, and the run's verdict."""

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Options":
        """Raise BadRequest if another version stored options that this one does not have."""
        try:
            return cls(**{**given, "security": SecurityFiles(**given.get("security", {}))})
        except TypeError as error:
            raise BadRequest("another version started this run; start a new run", reason=str(error)) from None

    @property
    def ends_only(self) -> bool:
        return self.level == "quick"

    @property
    def entries(self) -> str:
        """The entries to read, as an option of `BookieReader`."""
        return {"quick": "ends", "standard": "listed", "deep": "all"}[self.level]

    @property
    def is_deep(self) -> bool:
        return self.level == "deep"

    @property
    def reads_orphans(self) -> bool:
        return self.is_deep and self.orphans

    @property
    def covers_all_ledgers(self) -> bool:
        """Whether the run audits all ledgers. Only then can it check references between tables."""
        return (self.first, self.last, self.bookie) == (0, ID_MAX, None)

    def is_covered_by(self, other: Mapping[str, Any]) -> bool:
        """Return True if a run with the options `other` checked at least what this run checks, at least as deeply.

        Only then does the absence of a finding in the other run mean that the problem did not exist. Without this rule,
        an hourly quick run would reset the time at which weekly deep runs first saw a problem.
        """
        level, first, last = other.get("level"), other.get("first", 0), other.get("last", -1)
        is_as_deep = level in LEVELS and LEVELS.index(level) >= LEVELS.index(self.level)
        is_as_wide = first <= self.first and self.last <= last and other.get("bookie") in (None, self.bookie)
        return is_as_deep and is_as_wide and other.get("orphans", True) >= self.orphans

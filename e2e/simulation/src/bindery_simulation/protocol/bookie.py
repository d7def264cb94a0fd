"""One ledger's worth of a bookie: what the protocol may rely on, and what a crash or a lost disk leaves of it.

Adds, fences and explicit LACs are durable before they are answered, so a crash costs only what was not answered. Lost
storage under a ledger that metadata places here makes the bookie *limbo* and fenced: what it misses it answers with
UNKNOWN_LEDGER_STATE, until it was repaired.
"""

from bindery_core.entry import peek_lac
from bindery_core.ids import BookieId
from bindery_core.wire.messages import Status

OK, NO_ENTRY, FENCED = int(Status.OK), int(Status.NO_ENTRY), int(Status.FENCED)
UNKNOWN = int(Status.UNKNOWN_LEDGER_STATE)


class Bookie:
    __slots__ = (
        "bookie_id", "entries", "explicit_lac", "explicit_lac_packet", "gone", "has_answered_fence", "is_fenced",
        "is_gone_for_good", "is_limbo", "is_up", "lac", "rotten",
    )  # fmt: skip

    def __init__(self, bookie_id: BookieId) -> None:
        self.bookie_id = bookie_id
        self.entries: dict[int, bytes] = {}
        self.lac = -1
        self.explicit_lac = -1
        self.explicit_lac_packet: bytes | None = None
        self.is_fenced = False
        self.is_limbo = False
        self.is_up = True
        # what only the checks know
        self.is_gone_for_good = False
        self.has_answered_fence = False
        self.gone: set[int] = set()
        """Entries that it stored and that the fault model took away."""
        self.rotten: set[int] = set()
        """Entries that stand here with flipped bits."""

    def add(self, entry_id: int, frame: bytes, *, recovery: bool) -> int:
        """Store durably; the status."""
        if self.is_fenced and not recovery:
            return FENCED
        self.entries[entry_id] = frame
        self.rotten.discard(entry_id)
        self.gone.discard(entry_id)
        lac = peek_lac(frame)
        if lac > self.lac:
            self.lac = lac
        return OK

    def read(self, entry_id: int) -> tuple[int, bytes | None]:
        """Status and frame; -1: of the last entry."""
        if entry_id < 0:
            if self.is_limbo:
                return UNKNOWN, None
            entry_id = max(self.entries, default=-1)
        frame = self.entries.get(entry_id)
        if frame is not None:
            return OK, frame
        return (UNKNOWN if self.is_limbo else NO_ENTRY), None

    def fence(self) -> None:
        """Durable, before it is answered."""
        self.is_fenced = True

    def write_lac(self, lac: int, packet: bytes) -> None:
        if lac > self.explicit_lac:
            self.explicit_lac, self.explicit_lac_packet = lac, packet
            self.lac = max(self.lac, lac)

    def restart(self) -> None:
        """After a crash: what was answered is there; the LAC is derived from what stands."""
        self.is_up = True
        last = self.entries.get(max(self.entries, default=-1))
        self.lac = max(self.explicit_lac, -1 if last is None else peek_lac(last))

    def lose_storage(self, *, is_listed: bool) -> None:
        """It starts with an empty disk. `is_listed`: metadata places the ledger here, so it knows what it misses."""
        self.gone.update(self.entries)
        self.entries.clear()
        self.rotten.clear()
        self.explicit_lac, self.explicit_lac_packet, self.lac = -1, None, -1
        self.is_fenced = self.is_limbo = is_listed
        self.has_answered_fence = self.has_answered_fence and is_listed
        self.is_up = True

    def rot(self, entry_id: int) -> None:
        """Flip a bit of the payload, or of the digest where there is none."""
        frame = self.entries[entry_id]
        self.entries[entry_id] = frame[:-1] + bytes([frame[-1] ^ 1])
        self.rotten.add(entry_id)
        self.gone.add(entry_id)

    def has_good(self, entry_id: int) -> bool:
        return entry_id in self.entries and entry_id not in self.rotten

    def describe(self) -> str:
        """For the trace."""
        flags = "".join(
            name
            for name, is_set in (
                (" FENCED", self.is_fenced), (" LIMBO", self.is_limbo), ("" if self.is_up else " DOWN", not self.is_up)
            )
            if is_set
        )  # fmt: skip
        ids = ",".join(f"{entry_id}{'!' if entry_id in self.rotten else ''}" for entry_id in sorted(self.entries))
        return f"{self.bookie_id}:{{{ids}}}{flags}"

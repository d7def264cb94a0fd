"""Model one ledger on one bookie: the guarantees that the protocol requires, and the effects of crashes and lost disks.

Adds, fences and explicit LACs are durable before they are acknowledged, so that a crash loses only unacknowledged
requests. If the disk of a bookie is lost and the metadata places the ledger on it, the bookie is in *limbo* and fenced:
it answers UNKNOWN_LEDGER_STATE for missing entries until it is repaired.
"""

from bindery_core.entry import peek_lac
from bindery_core.ids import BookieId
from bindery_core.wire.messages import Status

OK, NO_ENTRY, FENCED = int(Status.OK), int(Status.NO_ENTRY), int(Status.FENCED)
UNKNOWN = int(Status.UNKNOWN_LEDGER_STATE)


class Bookie:
    """A bookie with its replicas of the ledger's entries."""

    __slots__ = (
        "bookie_id",
        "entries",
        "explicit_lac",
        "explicit_lac_packet",
        "has_answered_fence",
        "is_fenced",
        "is_limbo",
        "is_lost",
        "is_up",
        "lac",
        "removed",
        "rotten",
    )

    def __init__(self, bookie_id: BookieId) -> None:
        self.bookie_id = bookie_id
        self.entries: dict[int, bytes] = {}
        self.lac = -1
        self.explicit_lac = -1
        self.explicit_lac_packet: bytes | None = None
        self.is_fenced = False
        self.is_limbo = False
        self.is_up = True
        # Used by the checks only:
        self.is_lost = False
        self.has_answered_fence = False
        self.removed: set[int] = set()
        """Entries that the bookie stored and that a fault removed."""
        self.rotten: set[int] = set()
        """Entries that are stored with flipped bits."""

    def add(self, entry_id: int, frame: bytes, *, recovery: bool) -> int:
        """Store an entry durably. Return the status."""
        if self.is_fenced and not recovery:
            return FENCED
        self.entries[entry_id] = frame
        self.rotten.discard(entry_id)
        self.removed.discard(entry_id)
        lac = peek_lac(frame)
        if lac > self.lac:
            self.lac = lac
        return OK

    def read(self, entry_id: int) -> tuple[int, bytes | None]:
        """Return the status and the frame of an entry. `entry_id` -1: the last entry."""
        if entry_id < 0:
            if self.is_limbo:
                return UNKNOWN, None
            entry_id = max(self.entries, default=-1)
        frame = self.entries.get(entry_id)
        if frame is not None:
            return OK, frame
        return (UNKNOWN if self.is_limbo else NO_ENTRY), None

    def fence(self) -> None:
        """Fence the ledger durably."""
        self.is_fenced = True

    def write_lac(self, lac: int, packet: bytes) -> None:
        if lac > self.explicit_lac:
            self.explicit_lac, self.explicit_lac_packet = lac, packet
            self.lac = max(self.lac, lac)

    def restart(self) -> None:
        """Start after a crash. Acknowledged data is present; the LAC is derived from it."""
        self.is_up = True
        last = self.entries.get(max(self.entries, default=-1))
        self.lac = max(self.explicit_lac, -1 if last is None else peek_lac(last))

    def lose_storage(self, *, is_listed: bool) -> None:
        """Start with an empty disk. `is_listed`: the metadata places the ledger on the bookie, so it enters limbo."""
        self.removed.update(self.entries)
        self.entries.clear()
        self.rotten.clear()
        self.explicit_lac, self.explicit_lac_packet, self.lac = -1, None, -1
        self.is_fenced = self.is_limbo = is_listed
        self.has_answered_fence = self.has_answered_fence and is_listed
        self.is_up = True

    def rot(self, entry_id: int) -> None:
        """Corrupt an entry: flip a bit of the payload, or of the digest if the payload is empty."""
        frame = self.entries[entry_id]
        self.entries[entry_id] = frame[:-1] + bytes([frame[-1] ^ 1])
        self.rotten.add(entry_id)
        self.removed.add(entry_id)

    def has_good(self, entry_id: int) -> bool:
        return entry_id in self.entries and entry_id not in self.rotten

    def describe(self) -> str:
        """Describe the state for the trace."""
        flags = "".join(
            name
            for name, is_set in (
                (" FENCED", self.is_fenced),
                (" LIMBO", self.is_limbo),
                ("" if self.is_up else " DOWN", not self.is_up),
            )
            if is_set
        )
        ids = ",".join(f"{entry_id}{'!' if entry_id in self.rotten else ''}" for entry_id in sorted(self.entries))
        return f"{self.bookie_id}:{{{ids}}}{flags}"

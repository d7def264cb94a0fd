"""BookieState: what the bookie takes and refuses now, and why. Written by those who find out, read by the server."""

from collections.abc import Callable, Mapping
from typing import Final

READ_ONLY_SESSION: Final = "session"
READ_ONLY_DISK: Final = "disk"
READ_ONLY_FLUSH: Final = "flush"
READ_ONLY_JOURNAL: Final = "journal"
READ_ONLY_ADMIN: Final = "admin"
READ_ONLY_DRAINING: Final = "draining"
READ_ONLY_REMOVED: Final = "removed"


class BookieState:
    """Invariants: read-only exactly while somebody has a reason; each part removes only its own reason."""

    def __init__(self) -> None:
        self.running = False
        """Serving requests: storage is open and the port listens."""
        self.shutting_down = False
        self.registered = False
        self.high_priority_writes = False
        """Whether adds of high priority (recovery) are taken in spite of being read-only."""
        self.membership: Mapping[str, object] = {
            "intent": "active", "sinceMs": 0, "untilMs": None, "reason": "", "by": "",
        }  # fmt: skip
        """What operators said about this bookie, as the admin API shows it; see `own_membership`."""
        self._reasons: dict[str, str] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def read_only(self) -> bool:
        return bool(self._reasons)

    @property
    def reasons(self) -> dict[str, str]:
        """part -> why no adds are taken; empty when writable."""
        return dict(self._reasons)

    def accepts_add(self, *, priority: int) -> bool:
        """Whether an add of this priority is taken now. Above 0 is high, as for BookKeeper."""
        return not self._reasons or (priority > 0 and self.high_priority_writes)

    def set_read_only(self, part: str, reason: str | None) -> None:
        """`part` has a reason to refuse writes, or, with None, has it no longer."""
        before = dict(self._reasons)
        if reason is None:
            self._reasons.pop(part, None)
        else:
            self._reasons[part] = reason
        if before.keys() != self._reasons.keys():
            for listener in tuple(self._listeners):
                listener()

    def has_reason_besides(self, part: str) -> bool:
        """Whether anybody but `part` wants the bookie read-only."""
        return any(name != part for name in self._reasons)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after a part came to want the bookie read-only, or ceased to."""
        self._listeners.append(listener)

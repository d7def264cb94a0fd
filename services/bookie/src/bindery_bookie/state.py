"""BookieState: which requests the bookie accepts at present, and why. Its parts write it, and the server reads it."""

from collections.abc import Callable, Mapping
from typing import Final

# Names of the parts that can make the bookie read-only (`BookieState.set_read_only`).
READ_ONLY_SESSION: Final = "session"
READ_ONLY_DISK: Final = "disk"
READ_ONLY_FLUSH: Final = "flush"
READ_ONLY_JOURNAL: Final = "journal"
READ_ONLY_ADMIN: Final = "admin"
READ_ONLY_DRAINING: Final = "draining"
READ_ONLY_REMOVED: Final = "removed"


class BookieState:
    """Invariants: the bookie is read-only exactly while at least one part has a reason; each part removes only its own
    reason."""

    def __init__(self) -> None:
        self.running = False
        """Whether the bookie serves requests: storage is open and the port listens."""
        self.shutting_down = False
        self.registered = False
        self.high_priority_writes = False
        """Whether a read-only bookie accepts adds of high priority (recovery)."""
        self.membership: Mapping[str, object] = {
            "intent": "active",
            "sinceMs": 0,
            "untilMs": None,
            "reason": "",
            "by": "",
        }
        """The membership that operators set for this bookie, as in the admin API; see `own_membership`."""
        self._reasons: dict[str, str] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def read_only(self) -> bool:
        return bool(self._reasons)

    @property
    def reasons(self) -> dict[str, str]:
        """Return part -> why adds are refused; empty if the bookie is writable."""
        return dict(self._reasons)

    def accepts_add(self, *, priority: int) -> bool:
        """Return whether an add of this priority is accepted at present. Above 0 is high, as in BookKeeper."""
        return not self._reasons or (priority > 0 and self.high_priority_writes)

    def set_read_only(self, part: str, reason: str | None) -> None:
        """Set the reason of `part` to refuse writes; None removes it."""
        before = dict(self._reasons)
        if reason is None:
            self._reasons.pop(part, None)
        else:
            self._reasons[part] = reason
        if before.keys() != self._reasons.keys():
            for listener in tuple(self._listeners):
                listener()

    def has_reason_besides(self, part: str) -> bool:
        """Return whether a part other than `part` has a reason."""
        return any(name != part for name in self._reasons)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after a part has set its first reason or removed its reason."""
        self._listeners.append(listener)

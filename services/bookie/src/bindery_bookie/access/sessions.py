"""Sessions: connections of the ledger port whose client has authenticated, until its credentials are refused.

A session ends when its token or certificate expires, or when a file of keys, secrets or CAs was replaced by one with
which they are not accepted any more (`bindery_kit.access.held_credentials`). The connection then refuses new
operations.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bindery_core.errors import Unauthorized
from bindery_kit.access.held_credentials import ExpiryTimer, Rechecks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """The credentials with which a client has authenticated."""

    who: str
    """Name of the client."""
    expires_at_s: float | None
    """When they expire, in seconds since 1970; None: never."""
    verify: Callable[[], str]
    """Returns the name that they prove now. Raises Unauthorized."""


class Session:
    """One connection. `on_end`: called once, in the event loop, with the reason."""

    __slots__ = ("_on_end", "_sessions", "held", "timer")

    def __init__(self, sessions: "Sessions", held: Held, on_end: Callable[[Unauthorized], None]) -> None:
        self._sessions = sessions
        self.held = held
        self._on_end: Callable[[Unauthorized], None] | None = on_end
        self.timer: ExpiryTimer | None = None

    def forget(self) -> None:
        """End without a call. Nothing refers to the connection afterwards. Idempotent."""
        self._on_end = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._sessions.rechecks.forget(self)

    def end(self, reason: Unauthorized) -> None:
        """Call `on_end`, unless the session has ended."""
        on_end = self._on_end
        self.forget()
        if on_end is not None:
            on_end(reason)

    def expire(self) -> None:
        self.end(Unauthorized("the client's token or certificate has expired while the connection was open"))


class Sessions:
    """All sessions of a bookie. `now_s`: seconds since 1970."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.rechecks: Rechecks[Session] = Rechecks(_is_accepted, _refuse)

    def __len__(self) -> int:
        return len(self.rechecks)

    def begin(self, held: Held, on_end: Callable[[Unauthorized], None]) -> Session:
        """Return the session of credentials that have just been verified."""
        session = Session(self, held, on_end)
        self.rechecks.watch(session, generation=self.rechecks.generation)
        if held.expires_at_s is not None:
            session.timer = ExpiryTimer(held.expires_at_s, now_s=self._now_s, on_expired=session.expire)
        return session

    def check_again(self) -> None:
        """Verify the credentials of all sessions again, because a file was replaced."""
        self.rechecks.check_again()


async def _is_accepted(session: Session) -> bool:
    try:
        return session.held.verify() == session.held.who
    except Unauthorized:
        return False


def _refuse(session: Session) -> None:
    session.end(
        Unauthorized(
            "the client's token or certificate is not accepted any more: its key, secret or CA was removed while the "
            "connection was open"
        )
    )

"""The bookies of the cluster and their memberships at one moment, read again before each decision."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bindery_client.ledger.api import LedgerClient
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, Membership, MembershipStore


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The bookies at one moment."""

    bookies: Mapping[BookieId, bool]
    """Registered bookies; True: writable."""
    memberships: Mapping[BookieId, Membership] = field(default_factory=dict)
    known: frozenset[BookieId] = frozenset()
    """Bookies with a cookie: all bookies of this cluster, running or not."""
    now_ms: int = 0

    def intent(self, bookie_id: BookieId) -> Intent:
        membership = self.memberships.get(bookie_id)
        return Intent.ACTIVE if membership is None else membership.effective(self.now_ms)

    @property
    def leaving(self) -> frozenset[BookieId]:
        """Bookies that are to be emptied, registered or not."""
        return frozenset(b for b in self.memberships if self.intent(b) in (Intent.DRAINING, Intent.REMOVED))

    @property
    def not_for_copies(self) -> dict[BookieId, str]:
        """Bookies that must not receive copies, even if registered, with the reason."""
        return {b: str(intent.value) for b in self.memberships if (intent := self.intent(b)) is not Intent.ACTIVE}

    def is_exempt(self, bookie_id: BookieId) -> bool:
        """Return True if the bookie is absent under a maintenance lease, and therefore not lost."""
        return bookie_id not in self.bookies and self.intent(bookie_id) is Intent.MAINTENANCE

    def exempt_until_ms(self, bookie_id: BookieId) -> int | None:
        """Return the end of the bookie's maintenance in ms since 1970; None: it has no end. The bookie must have a
        membership."""
        return self.memberships[bookie_id].until_ms

    def is_gone(self, bookie_id: BookieId) -> bool:
        """Return True if the bookie is permanently absent: removed, or without a cookie in a cluster that has
        cookies."""
        if bookie_id in self.bookies:
            return False
        return self.intent(bookie_id) is Intent.REMOVED or bool(self.known and bookie_id not in self.known)

    def spares(self, ensemble: tuple[BookieId, ...]) -> frozenset[BookieId]:
        """Return the bookies that can take copies of a ledger stored on `ensemble`."""
        refused = self.not_for_copies
        return frozenset(b for b, is_writable in self.bookies.items() if is_writable and b not in refused) - set(
            ensemble
        )


class ClusterReader:
    """Reads a ClusterView. `clock_ms`: the wall clock, which decides when maintenance ends."""

    def __init__(
        self,
        client: LedgerClient,
        memberships: MembershipStore,
        cookies: CookieStore,
        *,
        clock_ms: Callable[[], int],
    ) -> None:
        self._client = client
        self._memberships = memberships
        self._cookies = cookies
        self._clock_ms = clock_ms

    async def read(self) -> ClusterView:
        """Read the bookies, memberships and cookies. Raises MetadataUnavailable."""
        bookies = await self._client.list_bookies()
        memberships = await self._memberships.all()
        return ClusterView(bookies, memberships, frozenset(await self._cookies.bookies()), self._clock_ms())

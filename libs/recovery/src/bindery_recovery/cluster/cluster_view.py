"""ClusterView: who is there and who is meant to be, read anew before anything is decided by it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bindery_client.ledger.api import LedgerClient
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, Membership, MembershipStore


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The bookies as they were at one moment."""

    bookies: Mapping[BookieId, bool]
    """Registered; True: writable."""
    memberships: Mapping[BookieId, Membership] = field(default_factory=dict)
    known: frozenset[BookieId] = frozenset()
    """With a cookie: bookies of this cluster, up or down."""
    now_ms: int = 0

    def intent(self, bookie_id: BookieId) -> Intent:
        membership = self.memberships.get(bookie_id)
        return Intent.ACTIVE if membership is None else membership.effective(self.now_ms)

    @property
    def leaving(self) -> frozenset[BookieId]:
        """Those that shall hold nothing any more, registered or not."""
        return frozenset(b for b in self.memberships if self.intent(b) in (Intent.DRAINING, Intent.REMOVED))

    @property
    def not_for_copies(self) -> dict[BookieId, str]:
        """Bookies that get no copies whatever their registration says, and why."""
        return {b: str(intent.value) for b in self.memberships if (intent := self.intent(b)) is not Intent.ACTIVE}

    def is_excused(self, bookie_id: BookieId) -> bool:
        """Away under a maintenance lease: it is not lost."""
        return bookie_id not in self.bookies and self.intent(bookie_id) is Intent.MAINTENANCE

    def excused_until_ms(self, bookie_id: BookieId) -> int | None:
        """End of its maintenance; None: it has none."""
        return self.memberships[bookie_id].until_ms

    def is_gone(self, bookie_id: BookieId) -> bool:
        """For good: removed, or without a cookie (which says nothing in a cluster that has none)."""
        if bookie_id in self.bookies:
            return False
        return self.intent(bookie_id) is Intent.REMOVED or bool(self.known and bookie_id not in self.known)

    def spares(self, ensemble: tuple[BookieId, ...]) -> frozenset[BookieId]:
        """Bookies that could take copies of a ledger which `ensemble` holds."""
        refused = self.not_for_copies
        return frozenset(b for b, is_writable in self.bookies.items() if is_writable and b not in refused) - set(
            ensemble
        )


class ClusterLook:
    """Reads views. `clock_ms`: the wall clock, by which maintenance ends."""

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

    async def look(self) -> ClusterView:
        """Raises MetadataUnavailable."""
        bookies = await self._client.list_bookies()
        memberships = await self._memberships.all()
        return ClusterView(bookies, memberships, frozenset(await self._cookies.bookies()), self._clock_ms())

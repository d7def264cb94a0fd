"""Which bookies are to be emptied, are gone for good, are exempt, and can take copies."""

import pytest
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, Membership, MembershipStore
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.cluster.cluster_view import ClusterReader, ClusterView

B = [BookieId(f"b{number}") for number in range(7)]
NOW_MS = 1000


def view(
    intents: dict[int, Intent], *, writable: tuple[int, ...] = (), read_only: tuple[int, ...] = (), known: str = ""
) -> ClusterView:
    """A cluster in which every maintenance ends 1 ms after now. `known`: the numbers of the bookies with a cookie."""
    return ClusterView(
        bookies={B[n]: n in writable for n in (*writable, *read_only)},
        memberships={
            B[n]: Membership(B[n], intent, until_ms=NOW_MS + 1 if intent is Intent.MAINTENANCE else None)
            for n, intent in intents.items()
        },
        known=frozenset(B[int(n)] for n in known),
        now_ms=NOW_MS,
    )


INTENTS = dict(enumerate([Intent.ACTIVE, Intent.JOINING, Intent.MAINTENANCE, Intent.DRAINING, Intent.REMOVED]))


def test_draining_and_removed_bookies_are_leaving_registered_or_not() -> None:
    assert view(INTENTS).leaving == view(INTENTS, writable=(3, 4)).leaving == {B[3], B[4]}


def test_only_active_bookies_may_receive_copies() -> None:
    found = view(INTENTS, writable=(0, 1, 2, 3, 4, 5), read_only=(6,))
    assert found.not_for_copies == {B[1]: "joining", B[2]: "maintenance", B[3]: "draining", B[4]: "removed"}
    assert found.spares(()) == {B[0], B[5]}
    assert found.spares((B[0], B[6])) == {B[5]}


def test_a_maintenance_that_has_ended_has_no_effect() -> None:
    ended = ClusterView({B[1]: True}, {B[0]: Membership(B[0], Intent.MAINTENANCE, until_ms=NOW_MS)}, now_ms=NOW_MS)
    assert ended.intent(B[0]) is Intent.ACTIVE
    assert not ended.is_exempt(B[0])
    assert ended.not_for_copies == {}


def test_only_an_absent_bookie_in_maintenance_is_exempt() -> None:
    assert [view(INTENTS).is_exempt(bookie_id) for bookie_id in B[:6]] == [False, False, True, False, False, False]
    assert not view(INTENTS, read_only=(2,)).is_exempt(B[2]), "it is registered"
    assert view(INTENTS).exempt_until_ms(B[2]) == NOW_MS + 1
    assert view(INTENTS).exempt_until_ms(B[4]) is None


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (view({}), False),
        (view({0: Intent.REMOVED}), True),
        (view({0: Intent.REMOVED}, known="0"), True),
        (view({0: Intent.REMOVED}, read_only=(0,)), False),
        (view({}, known="0"), False),
        (view({}, known="1"), True),
        (view({}, known="1", writable=(0,)), False),
        (view({0: Intent.DRAINING}, known="0"), False),
    ],
)
def test_a_bookie_is_gone_if_it_was_removed_or_has_no_cookie_among_bookies_that_do(
    given: ClusterView, gone: bool
) -> None:
    assert given.is_gone(B[0]) is gone


async def test_a_reader_reads_bookies_memberships_and_cookies() -> None:
    store, layout = MemoryTree().connect(), LedgersLayout()
    memberships = MembershipStore(store, clock_ms=lambda: NOW_MS)
    await memberships.set(B[1], Intent.REMOVED)
    cookies = CookieStore(store, layout)
    await cookies.write(B[2], b"cookie", version=None)
    client = MemoryLedgerClient(MemoryLedgers(bookies=B[:1]))
    found = await ClusterReader(client, memberships, cookies, clock_ms=lambda: NOW_MS).read()
    assert (found.bookies, found.leaving, found.known, found.now_ms) == ({B[0]: True}, {B[1]}, {B[2]}, NOW_MS)

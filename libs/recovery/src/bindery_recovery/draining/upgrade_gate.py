"""Check whether bookies may be restarted one by one, or removed. The check changes nothing.

During an upgrade each bookie is unavailable for a while, so an entry with one missing replica would then have two.
Removing a bookie loses the entries that only this bookie holds. An upgrade is refused in these cases:

| reason           | condition                                                                 | what to do           |
|------------------|---------------------------------------------------------------------------|----------------------|
| under_replicated | a ledger is marked                                                        | wait for the repair  |
| unknown_copies   | a closed ledger has a closing record: its replicas are not checked yet    | wait for the auditor |
| lost             | a known bookie is not registered, and neither in maintenance nor removed  | start or recover it  |
| not_drained      | a bookie to be removed is writable or holds ledgers                       | `drain --wait`       |
| not_named        | no known bookie has an id that matches the template of ids                | fix the template     |
| rollback         | a bookie is to be removed, and the metadata may have been rolled back, so | restore or accept    |
|                  | that ledgers of that bookie may be missing in it (`known_ledgers`)        | the metadata         |
| unreachable      | ZooKeeper does not answer                                                 | start it             |

| a bookie is    | and registered                     | and absent                                         |
|----------------|------------------------------------|----------------------------------------------------|
| active         | passes, unless to be removed       | refused: lost                                      |
| joining        | passes, unless to be removed       | passes: it never served, so it holds nothing       |
| in maintenance | passes, unless to be removed       | passes, unless to be removed                       |
| draining       | passes; if to be removed, only     | passes if it is empty; otherwise refused: lost     |
|                | when read-only and empty           |                                                    |
| removed        | passes                             | passes: its ledgers are marked until repaired      |

What a draining bookie holds is read from the metadata of all ledgers. The result counts only if the bookie was
registered as read-only before they were read: a writable bookie may receive new ledgers at any time.

A rollback (`only_going`) may be needed to end an outage, so it is refused in fewer cases: only if a ledger names a
bookie that is to be removed and whose membership is not `removed`, or for `not_named` and `rollback`. The bookies
need not have been drained, because bookies that failed to start must be removable. A ledger that is created between the
check and their removal may name them: it loses these copies, as if the bookies had failed.

A cluster that is not initialized passes: it holds nothing.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import (
    BadRequest,
    BadVersion,
    Corrupt,
    MetadataUnavailable,
    NoSuchLedger,
    OutcomeUnknown,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomBits
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.cluster import ClusterStatus, cluster_status
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingRecords
from bindery_metadata.ledgers.known_ledgers import MetadataRollbackSuspected, refuse_if_suspected
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import Mark, UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.draining.drain import Holdings, holdings_of, still_writable
from bindery_recovery.records.reasons import is_move

SHOWN_MAX: Final = 5
"""Maximum number of ledgers listed in a message."""
NOTES_READ_MAX: Final = 200
"""Maximum number of ledgers with a closing record that one check reads."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """`kind`: a reason of the module's table. `text`: what is wrong. `fix`: what to do."""

    kind: str
    text: str
    fix: str
    bookie_id: BookieId | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate is open if there is no refusal. `notes`: further information."""

    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return not self.refusals


@dataclass(frozen=True, slots=True)
class Scale:
    """The bookies that are to stay: those with the ordinals 0 to `bookies` - 1. Those with higher ordinals are to be
    removed."""

    bookies: int
    """Number of bookies that stay."""
    id_template: str
    """A bookie id with `{}` in place of the ordinal."""

    def __post_init__(self) -> None:
        if self.id_template.count("{}") != 1:
            raise BadRequest("the template of bookie ids needs {} once, for the ordinal", template=self.id_template)

    def ordinal(self, bookie_id: str) -> int | None:
        """Return the ordinal of a bookie; None: its id does not match the template."""
        before, after = map(re.escape, self.id_template.split("{}"))
        found = re.fullmatch(f"{before}(0|[1-9][0-9]*){after}", bookie_id)
        return None if found is None else int(found[1])

    def goes(self, bookie_id: str) -> bool:
        """Return True if the bookie is to be removed."""
        ordinal = self.ordinal(bookie_id)
        return ordinal is not None and ordinal >= self.bookies


async def check_gate(
    store: MetadataStore,
    layout: LedgersLayout,
    *,
    scale: Scale | None,
    randomness: RandomBits,
    clock_ms: Callable[[], int],
    only_going: bool = False,
) -> Verdict:
    """Check the cluster once. `clock_ms`: the wall clock, which decides when maintenance ends. A metadata store that
    does not answer is a refusal.

    `only_going` is for a rollback and requires a `scale`.
    """
    assert scale is not None or not only_going
    try:
        status = await cluster_status(store, layout)
        if status.instance_id is None:
            return Verdict(notes=("the cluster is not initialized: there is no data to protect",))
        await store.sync(layout.root)  # marks and registrations written just before must be seen
        if only_going and scale is not None:
            members = await _Members.read(store, layout, clock_ms=clock_ms, randomness=randomness, leaving=scale)
            refusals = [*members.refusals_of_going(scale), *await _rolled_back(store, layout, status, scale)]
            return Verdict(tuple(refusals), tuple(members.notes(scale)))
        marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms)
        marked = [mark.ledger_id async for mark in marks.list() if not await _is_move(store, mark)]
        noted = await _noted(store, LedgerManager(store, layout, randomness=randomness), frozenset(marked))
        is_paused = not await marks.is_enabled()
        auditor = await current_auditor(store, layout)
        notes = [] if auditor else ["no auditor is running: under-replicated ledgers may not be marked"]
        members = await _Members.read(store, layout, clock_ms=clock_ms, randomness=randomness)
        refusals = [
            *_marks(marked, is_paused=is_paused),
            *_unknown(noted, is_paused=is_paused, has_auditor=bool(auditor)),
            *members.refusals(scale),
            *await _rolled_back(store, layout, status, scale),
        ]
    except (MetadataUnavailable, OutcomeUnknown) as error:
        return Verdict(
            (Refusal("unreachable", f"ZooKeeper does not answer: {error}", "start ZooKeeper, then try again"),)
        )
    return Verdict(tuple(refusals), (*notes, *members.notes(scale)))


async def _is_move(store: MetadataStore, mark: Mark) -> bool:
    """Whether the ledger is marked only because it can be on more racks."""
    return not mark.replicas and is_move(mark.replicas, await RecoveryRecords(store).get(mark.ledger_id))


async def _rolled_back(
    store: MetadataStore, layout: LedgersLayout, status: ClusterStatus, scale: Scale | None
) -> list[Refusal]:
    """Refuse to remove bookies while the metadata may not contain all of their ledgers."""
    if scale is None or not any(scale.goes(bookie_id) for bookie_id in _bookies(status)):
        return []
    try:
        await refuse_if_suspected(store, layout, "no bookies are removed")
    except (MetadataRollbackSuspected, Corrupt) as error:
        return [Refusal("rollback", str(error), "restore the newer metadata, or accept the present one")]
    return []


def _marks(marked: list[LedgerId], *, is_paused: bool) -> list[Refusal]:
    if not marked:
        return []
    shown = ", ".join(map(str, marked[:SHOWN_MAX])) + (", ..." if len(marked) > SHOWN_MAX else "")
    what = f"{len(marked)} ledgers are" if len(marked) > 1 else "1 ledger is"
    if is_paused:
        fix = "automatic recovery is paused: run `bindery recovery resume`"
    else:
        fix = "wait until `bindery recovery status --watch` shows none"
    return [
        Refusal(
            "under_replicated",
            f"{what} under-replicated ({shown})",
            f"{fix}; `bindery recovery explain {marked[0]}` shows the reason",
        )
    ]


async def _noted(store: MetadataStore, ledgers: LedgerManager, marked: frozenset[LedgerId]) -> list[LedgerId]:
    """Return the ledgers with a closing record that are closed, or whose state is unknown. Marked ledgers are left out
    because they are refused anyway, and open ones because their writer or recovery completes them."""
    found = []
    ledger_ids = [one for one in await ClosingRecords(store).ledger_ids() if one not in marked]
    for ledger_id in ledger_ids[:NOTES_READ_MAX]:
        try:
            if (await ledgers.read(ledger_id)).value.state is LedgerState.CLOSED:
                found.append(ledger_id)
        except NoSuchLedger:
            continue
        except (Corrupt, BadVersion):
            found.append(ledger_id)
    return found + ledger_ids[NOTES_READ_MAX:]


def _unknown(noted: list[LedgerId], *, is_paused: bool, has_auditor: bool) -> list[Refusal]:
    if not noted:
        return []
    shown = ", ".join(map(str, noted[:SHOWN_MAX])) + (", ..." if len(noted) > SHOWN_MAX else "")
    what = f"{len(noted)} ledgers were" if len(noted) > 1 else "1 ledger was"
    if is_paused:
        fix = "automatic recovery is paused: run `bindery recovery resume`"
    elif not has_auditor:
        fix = "start an auditor, which checks them"
    else:
        fix = "wait some seconds: the auditor checks them when all their bookies are registered"
    return [
        Refusal(
            "unknown_copies",
            f"{what} closed by recovery, or by a writer that missed copies, and not checked "
            f"for missing copies since ({shown})",
            f"{fix}; `bindery recovery explain {noted[0]}` shows details",
        )
    ]


def _names(bookies: Sequence[BookieId], scale: Scale) -> list[Refusal]:
    """Refuse if no bookie id matches: a changed template would start new bookies and remove all that hold data."""
    if not scale.bookies or not bookies or any(scale.ordinal(bookie_id) is not None for bookie_id in bookies):
        return []
    like = scale.id_template.format(0)
    return [
        Refusal(
            "not_named",
            f"none of the {len(bookies)} bookies (such as {bookies[0]}) has an id like {like}",
            "use the same release name and bookie ids as before, or pass the template of their ids",
        )
    ]


@dataclass(frozen=True, slots=True)
class _Members:
    status: ClusterStatus
    intents: Mapping[BookieId, Intent]
    holdings: Mapping[BookieId, Holdings]
    """Ledgers by bookie, for the draining bookies or for those that are to be removed."""
    were_writable: frozenset[str]
    """Bookies registered as writable before the ledgers were read."""

    @classmethod
    async def read(
        cls,
        store: MetadataStore,
        layout: LedgersLayout,
        *,
        clock_ms: Callable[[], int],
        randomness: RandomBits,
        leaving: Scale | None = None,
    ) -> "_Members":
        # Registrations are read last, so that a bookie that joins or returns in the meantime does not count as lost.
        memberships = await MembershipStore(store, clock_ms=clock_ms).all()
        intents = {bookie_id: found.effective(clock_ms()) for bookie_id, found in memberships.items()}
        before = await cluster_status(store, layout)
        if leaving is None:
            asked = [bookie_id for bookie_id, intent in sorted(intents.items()) if intent is Intent.DRAINING]
        else:
            asked = [bookie_id for bookie_id in _bookies(before) if leaving.goes(bookie_id)]
        ledgers = _Ledgers(LedgerManager(store, layout, randomness=randomness))
        holdings = {bookie_id: await holdings_of(ledgers, bookie_id) for bookie_id in asked}
        return cls(await cluster_status(store, layout), intents, holdings, frozenset(before.writable))

    def refusals(self, scale: Scale | None) -> list[Refusal]:
        bookies = _bookies(self.status)
        found = [] if scale is None else _names(bookies, scale)
        for bookie_id in bookies:
            goes = scale is not None and scale.goes(bookie_id)
            refusal = self._refusal(bookie_id, is_registered=self._is_registered(bookie_id), goes=goes)
            if refusal is not None:
                found.append(refusal)
        return found

    def refusals_of_going(self, scale: Scale) -> list[Refusal]:
        """Return the refusals of a rollback. `holdings` must be those of the bookies to be removed. A bookie that has
        registered since they were read holds no data yet."""
        found = _names(_bookies(self.status), scale)
        for bookie_id in self.holdings:
            intent = self.intents.get(bookie_id, Intent.ACTIVE)
            if intent is Intent.REMOVED or self._is_empty(bookie_id):
                continue
            is_there = self._is_registered(bookie_id) or intent is Intent.MAINTENANCE
            found.append(self._still_draining(bookie_id) if is_there else _lost(bookie_id, intent))
        return found

    def _is_registered(self, bookie_id: BookieId) -> bool:
        return bookie_id in self.status.writable or bookie_id in self.status.read_only

    def _refusal(self, bookie_id: BookieId, *, is_registered: bool, goes: bool) -> Refusal | None:
        intent = self.intents.get(bookie_id, Intent.ACTIVE)
        if intent is Intent.REMOVED or (intent is Intent.JOINING and not is_registered):
            return None
        if intent is Intent.DRAINING and (is_registered or self._is_empty(bookie_id)):
            is_done = self._is_empty(bookie_id) and bookie_id not in self.were_writable
            return self._still_draining(bookie_id) if goes and not is_done else None
        if not is_registered and intent is not Intent.MAINTENANCE:
            return _lost(bookie_id, intent)
        if goes:
            return Refusal(
                "not_drained",
                f"bookie {bookie_id} is to be removed, but was not drained",
                f"`bindery bookie drain {bookie_id} --wait`",
                bookie_id,
            )
        return None

    def _still_draining(self, bookie_id: BookieId) -> Refusal:
        if self._is_empty(bookie_id):
            return Refusal(
                "not_drained",
                f"bookie {bookie_id} is to be removed and is empty, but {still_writable(bookie_id)}",
                "wait until it is read-only",
                bookie_id,
            )
        holdings = self.holdings[bookie_id]
        count = len(holdings.ledgers) + len(holdings.unreadable)
        return Refusal(
            "not_drained",
            f"bookie {bookie_id} is to be removed, but {count} ledgers still name it",
            f"`bindery bookie drain {bookie_id} --wait`",
            bookie_id,
        )

    def notes(self, scale: Scale | None) -> list[str]:
        """Return notes about bookies that stay but cannot serve as intended, and about leases that an upgrade may
        outlast."""
        found = []
        for bookie_id, intent in sorted(self.intents.items()):
            if intent is Intent.MAINTENANCE:
                found.append(f"bookie {bookie_id} is in maintenance: it does not count as lost")
            stays = scale is not None and scale.ordinal(bookie_id) is not None and not scale.goes(bookie_id)
            if stays and intent in (Intent.DRAINING, Intent.REMOVED):
                effect = "does not start" if intent is Intent.REMOVED else "accepts no new ledgers"
                found.append(
                    f"bookie {bookie_id} is to stay, but is {intent.value}: it {effect}; "
                    f"`bindery bookie drain {bookie_id} --cancel` makes it active again"
                )
        return found

    def _is_empty(self, bookie_id: BookieId) -> bool:
        holdings = self.holdings[bookie_id]
        return not holdings.ledgers and not holdings.unreadable


def _bookies(status: ClusterStatus) -> list[BookieId]:
    """Return all bookies that are known or registered."""
    return [*map(BookieId, sorted({*status.known, *status.writable, *status.read_only}))]


def _lost(bookie_id: BookieId, intent: Intent) -> Refusal:
    away = "is draining, holds ledgers and is not registered" if intent is Intent.DRAINING else "is lost"
    return Refusal(
        "lost",
        f"bookie {bookie_id} {away}",
        f"start it; if it is lost permanently: `bindery bookie recover {bookie_id} --yes --wait`",
        bookie_id,
    )


class _Ledgers:
    """The metadata of all ledgers, for `holdings_of`."""

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager

    def list_ledgers(self) -> AsyncIterator[LedgerId]:
        return self._manager.list()

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        return (await self._manager.read(ledger_id)).value

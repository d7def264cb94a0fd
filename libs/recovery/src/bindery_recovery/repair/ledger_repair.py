"""LedgerRepair: one attempt to heal one ledger, whose lock the caller holds.

    check -> for each segment with bad fragments: look who is there now -> choose targets -> copy -> compare-and-set the
    ensemble -> check the whole ledger again ... until it is whole, or a round changed nothing

| a fragment is | and                                               | so                                        |
|---------------|---------------------------------------------------|-------------------------------------------|
| MISSING       | its bookie is writable                            | it gets back what it lacks; metadata stay |
| MISSING       | that was tried in this attempt, and no bookie can | it is left as it is                       |
|               | give what is left                                 |                                           |
| MISSING       | else, or that was tried in this attempt           | a replacement gets the whole fragment     |
| LOST          | its bookie is here again when copying would begin | it is checked; usually nothing is copied  |
| LOST          | its bookie is away under a maintenance lease      | it is waited for                          |
| LOST, LEAVING | else                                              | a replacement gets the whole fragment     |
| REFILLING     |                                                   | it is waited for                          |
| UNSURE        | UNSURE_ATTEMPTS_MAX attempts in a row saw it so   | a replacement gets the whole fragment     |
| UNSURE        | else                                              | it is asked again later                   |

A bookie that lacks something is asked for all that it should hold, however little is looked at otherwise: that it
denies the first entry of a fragment says nothing of the others, and with the ends back in place nobody would look.

The open last segment is left to its writer, who replaces a lost bookie at its next add. When a member is lost or
leaving still after a grace period in which the ensemble did not change, the ledger is recovered: its writer is fenced
and the ledger closed; then it is healed as any other. Without a spare it is not: closing would help nobody, and the
writer, who goes on with the bookies that are left, would have nothing to begin a new ledger with.
Source: BookKeeper ReplicationWorker; spec section 6.4.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BadVersion, BinderyError, Corrupt, NoSuchLedger, NotEnoughBookies
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.replication_plan import Fragment, closed_fragments, plan_replacement
from bindery_kit.observability.logs import get_logger
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryState

from bindery_recovery.budget import RepairBudget
from bindery_recovery.checks.checker import (
    ALL,
    Depth,
    FragmentCheck,
    FragmentState,
    LedgerCheck,
    OpenTail,
    RandomSource,
    check_fragments,
    check_ledger,
)
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records import sentences
from bindery_recovery.repair.copier import Copier, CopyFailure, CopyResult, Sources, Target

ROUNDS_MAX: Final = 20
"""Checks in one attempt. Each but the last changed something."""
UNSURE_ATTEMPTS_MAX: Final = 3
REFILL_PAUSE_S: Final = 10.0
"""Before a bookie that refills itself is looked at again."""
EXCUSED_PAUSE_MAX_S: Final = 60.0
OPEN_PAUSE_S: Final = 60.0
"""Before an open ledger that only its closing can help is looked at again."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt. HEALED: nothing is missing any more, and the mark may go."""

    state: RecoveryState
    obstacle: Obstacle = Obstacle.NONE
    detail: str = ""
    retry_s: float | None = None
    """When to look again; None: by the usual back-off, or, when UNRECOVERABLE, once something changes."""
    missing_entries: int | None = None
    missing_bytes: int | None = None
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class _Problem:
    obstacle: Obstacle
    detail: str
    is_final: bool = False
    retry_s: float | None = None
    state: RecoveryState = RecoveryState.BLOCKED


_SEVERITY: Final = (
    Obstacle.NO_COPY_LEFT, Obstacle.SOURCE_IN_LIMBO, Obstacle.SOURCE_UNAVAILABLE, Obstacle.NO_SPARE,
    Obstacle.TARGET_REFUSES, Obstacle.RECOVERY_IMPOSSIBLE, Obstacle.METADATA_UNREADABLE, Obstacle.ERROR,
    Obstacle.LEDGER_OPEN, Obstacle.PAUSED, Obstacle.NONE,
)  # fmt: skip
"""Of several obstacles the first of these is told."""
assert set(_SEVERITY) == set(Obstacle)


@dataclass(frozen=True, slots=True)
class _Absence:
    """Of members of an open ledger's last ensemble."""

    marked_ms: int
    """When the ledger was marked for it."""
    segment_first: int
    ensemble: tuple[BookieId, ...]
    missing: frozenset[BookieId]

    def goes_on_in(self, later: "_Absence") -> bool:
        """Whether `later` is the same absence, perhaps of more or fewer of them."""
        place = (self.marked_ms, self.segment_first, self.ensemble)
        return place == (later.marked_ms, later.segment_first, later.ensemble) and bool(self.missing & later.missing)


class Graces:
    """Since when open ledgers lack a member, in seconds of the loop's clock.

    What is another absence begins anew: with a changed ensemble, of another member, or for another mark, for who saw
    the end of an earlier one may have been a worker elsewhere.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: dict[LedgerId, tuple[_Absence, float]] = {}

    def left_s(self, ledger_id: LedgerId, tail: OpenTail, *, missing: Collection[BookieId], marked_ms: int) -> float:
        """What is left of the grace; 0: it has passed."""
        now = asyncio.get_running_loop().time()
        seen = _Absence(marked_ms, tail.segment_first, tail.ensemble, frozenset(missing))
        known = self._since.get(ledger_id)
        since = known[1] if known is not None and known[0].goes_on_in(seen) else now
        self._since[ledger_id] = (seen, since)
        return max(0.0, since + self._grace_s - now)

    def forget(self, ledger_id: LedgerId) -> None:
        self._since.pop(ledger_id, None)


class LedgerRepair:
    """Make one for each attempt."""

    def __init__(
        self,
        ledger_id: LedgerId,
        *,
        client: LedgerClient,
        look: Callable[[], Awaitable[ClusterView]],
        is_enabled: Callable[[], Awaitable[bool]],
        budget: RepairBudget,
        graces: Graces,
        randomness: RandomSource,
        on_check: Callable[[LedgerCheck], None],
        on_begin: Callable[[], Awaitable[None]],
        on_copied: Callable[[int, int], None],
        marked_ms: int = 0,
        unreadable: Collection[int] = (),
        unsure: Mapping[str, int] | None = None,
    ) -> None:
        """`marked_ms`: when the ledger was marked first since it was last whole. `unreadable`, `unsure`: as
        `self.unreadable` and `self.unsure` were after the attempt before. `on_check` hears of each check that found
        something to do, `on_begin` before copies are made, and `on_copied` of each batch of them: entries, bytes."""
        self._ledger_id = ledger_id
        self._client = client
        self._look = look
        self._is_enabled = is_enabled
        self._budget = budget
        self._graces = graces
        self._marked_ms = marked_ms
        self._randomness = randomness
        self._on_check = on_check
        self._on_begin = on_begin
        self._copier = Copier(client, budget, on_copied=on_copied)
        self._problems: list[_Problem] = []
        self._has_changed = False
        """In this round."""
        self._given_back: set[tuple[int, int]] = set()
        """(segment, index) of fragments that were filled up where they are."""
        self.unreadable: set[int] = set(unreadable)
        """Entries that no bookie could give when they were last asked for: before all others in the next attempt."""
        self._sourceless: dict[tuple[int, int], _Problem] = {}
        """(segment, index) of fragments that got back in this attempt all that other bookies could give."""
        self._refused: dict[BookieId, str] = {}
        """Bookies that did not take copies in this attempt."""
        self._doubted: set[BookieId] = set()
        """Bookies that were seen to lack something in this attempt."""
        self.was_fenced = False
        self._unsure_before = dict(unsure or {})
        self.unsure: dict[str, int] = dict(self._unsure_before)
        """Bookies that could not say what they hold, and how many attempts in a row saw it so. Other failures of the
        ledger say nothing of them."""

    async def run(self, *, depth: Depth, marked: Collection[str]) -> Outcome:
        """`marked`: the replicas in the mark.

        Raises MetadataUnavailable, MetadataOutcomeUnknown; all else becomes an Outcome.
        """
        for _ in range(ROUNDS_MAX):
            self._problems = []
            self._has_changed = False
            try:
                metadata = await self._client.metadata(self._ledger_id)
            except NoSuchLedger:
                return self._deleted()
            except (Corrupt, BadVersion) as error:
                detail = sentences.metadata_unreadable(self._ledger_id, str(error))
                return Outcome(RecoveryState.BLOCKED, Obstacle.METADATA_UNREADABLE, detail)
            view = await self._look()
            check = await self._check(metadata, view, depth)
            unsure = {one.fragment.bookie_id for one in check.bad if one.state is FragmentState.UNSURE}
            self.unsure = {bookie_id: self._unsure_attempts(bookie_id) for bookie_id in unsure}
            if check.is_whole:
                return self._whole(check, depth, marked)
            self._on_check(check)
            try:
                for _, group in groupby(check.bad, key=lambda one: one.fragment.segment_first):
                    await self._heal_segment(metadata, list(group), depth=depth)
                if check.tail is not None and not check.tail.is_whole:
                    await self._heal_tail(metadata, check.tail)
            except NoSuchLedger:
                return self._deleted()
            if not self._has_changed:
                return self._outcome(check)
        return self._outcome(check)

    async def _check(self, metadata: LedgerMetadata, view: ClusterView, depth: Depth) -> LedgerCheck:
        """All closed fragments: to `depth`, and those of bookies that lack something entry by entry."""
        check = await check_ledger(
            self._client, self._ledger_id, metadata, bookies=view.bookies, leaving=view.leaving, depth=depth,
            randomness=self._randomness, budget=self._budget,
        )  # fmt: skip
        self._doubted |= {one.fragment.bookie_id for one in check.bad if one.state is FragmentState.MISSING}
        if depth == ALL or not self._doubted:
            return check
        doubtful = [one for one in closed_fragments(metadata) if one.bookie_id in self._doubted]
        closer = {_place(one.fragment): one for one in await self._check_fragments(metadata, doubtful, view, ALL)}
        others = (one for one in check.bad if _place(one.fragment) not in closer)
        bad = (one for one in (*others, *closer.values()) if one.state is not FragmentState.WHOLE)
        return replace(check, bad=tuple(sorted(bad, key=lambda one: _place(one.fragment))))

    async def _check_fragments(
        self, metadata: LedgerMetadata, fragments: Sequence[Fragment], view: ClusterView, depth: Depth
    ) -> list[FragmentCheck]:
        return await check_fragments(
            self._client, self._ledger_id, metadata, fragments, bookies=view.bookies, leaving=view.leaving,
            depth=depth, randomness=self._randomness, budget=self._budget,
        )  # fmt: skip

    def _deleted(self) -> Outcome:
        self._graces.forget(self._ledger_id)
        return Outcome(RecoveryState.HEALED, is_deleted=True)

    def _whole(self, check: LedgerCheck, depth: Depth, marked: Collection[str]) -> Outcome:
        self._graces.forget(self._ledger_id)
        tail = check.tail
        if tail is not None and depth == ALL and (not marked or not set(marked).isdisjoint(tail.ensemble)):
            # its writer went on without a bookie, which has a hole that cannot be seen before the ledger is closed
            detail = sentences.open_with_hole(self._ledger_id, [b for b in tail.ensemble if b in marked])
            return Outcome(RecoveryState.BLOCKED, Obstacle.LEDGER_OPEN, detail, retry_s=OPEN_PAUSE_S)
        return Outcome(RecoveryState.HEALED)

    def _outcome(self, check: LedgerCheck) -> Outcome:
        if not self._problems:
            detail = sentences.unsteady(self._ledger_id)
            return Outcome(RecoveryState.BACKING_OFF, Obstacle.ERROR, detail)
        problem = min(self._problems, key=lambda one: _SEVERITY.index(one.obstacle))
        state = problem.state
        if all(one.is_final for one in self._problems):
            state = RecoveryState.UNRECOVERABLE
        pauses = [one.retry_s for one in self._problems]
        return Outcome(
            state, problem.obstacle, problem.detail,
            retry_s=None if None in pauses else min(pause for pause in pauses if pause is not None),
            missing_entries=check.missing_entries, missing_bytes=check.missing_bytes,
        )  # fmt: skip

    # --- closed segments ------------------------------------------------------------------------------------------

    def _unsure_attempts(self, bookie_id: BookieId) -> int:
        """How many attempts in a row it could not say, this one included."""
        return self._unsure_before.get(bookie_id, 0) + 1

    async def _heal_segment(self, metadata: LedgerMetadata, bad: list[FragmentCheck], *, depth: Depth) -> None:
        if not await self._is_enabled():
            self._paused()
            return
        view = await self._look()
        bad = await self._as_of_now(metadata, bad, view, depth)
        replace: dict[int, FragmentCheck] = {}
        targets: list[Target] = []
        for one in bad:
            bookie_id, place = one.fragment.bookie_id, (one.fragment.segment_first, one.fragment.index)
            if one.state is FragmentState.LOST and view.is_excused(bookie_id):
                self._wait_for_excused(view, bookie_id)
            elif one.state is FragmentState.REFILLING:
                detail = sentences.refilling(bookie_id)
                self._problems.append(
                    _Problem(Obstacle.NONE, detail, retry_s=REFILL_PAUSE_S, state=RecoveryState.WAITING)
                )
            elif one.state is FragmentState.UNSURE and self._unsure_attempts(bookie_id) < UNSURE_ATTEMPTS_MAX:
                self.unsure[bookie_id] = self._unsure_attempts(bookie_id)
                detail = sentences.unsure(bookie_id, one.reason)
                self._problems.append(_Problem(Obstacle.ERROR, detail, state=RecoveryState.BACKING_OFF))
            elif one.state is FragmentState.MISSING and place in self._sourceless:
                self._problems.append(self._sourceless[place])
            elif (
                one.state is FragmentState.MISSING
                and view.bookies.get(bookie_id)
                and place not in self._given_back
                and bookie_id not in self._refused
            ):
                self._given_back.add(place)
                targets.append(Target(one.fragment, bookie_id, frozenset(one.bad_entry_ids)))
            else:
                replace[one.fragment.index] = one
        if replace:
            targets += await self._choose(metadata, replace, view)
        if targets:
            await self._copy(metadata, bad, targets, view)

    async def _as_of_now(
        self, metadata: LedgerMetadata, bad: Sequence[FragmentCheck], view: ClusterView, depth: Depth
    ) -> list[FragmentCheck]:
        """What is still bad: a bookie may have come or gone since the check."""
        moved = [one for one in bad if (one.state is FragmentState.LOST) == (one.fragment.bookie_id in view.bookies)]
        if not moved:
            return list(bad)
        again = await self._check_fragments(metadata, [one.fragment for one in moved], view, depth)
        holes = [one.fragment for one in again if one.state is FragmentState.MISSING]
        if holes and depth != ALL:  # it is back without its entries: which ones it lacks is for the next round to see
            self._doubted |= {fragment.bookie_id for fragment in holes}
            again = [one for one in again if one.state is not FragmentState.MISSING]
            bad = [one for one in bad if one.fragment not in holes]
        self._has_changed = True
        now = {one.fragment.index: one for one in (*bad, *again)}
        return [one for one in now.values() if one.state is not FragmentState.WHOLE]

    async def _choose(
        self, metadata: LedgerMetadata, replace: Mapping[int, FragmentCheck], view: ClusterView
    ) -> list[Target]:
        fragment = next(iter(replace.values())).fragment
        ensemble = next(s.ensemble for s in metadata.segments if s.first_entry_id == fragment.segment_first)
        failed = {index: one.fragment.bookie_id for index, one in replace.items()}
        try:
            chosen = await self._client.choose_replacements(
                ensemble, failed, write_quorum=metadata.write_quorum, exclude={**view.not_for_copies, **self._refused}
            )
        except NotEnoughBookies:
            chosen = {}
        for index, one in replace.items():
            if index not in chosen:
                detail = sentences.no_spare(one.fragment.bookie_id, ensemble, view, refused=self._refused)
                self._problems.append(_Problem(Obstacle.NO_SPARE, detail))
        return [Target(replace[index].fragment, new) for index, new in sorted(chosen.items())]

    async def _copy(
        self, metadata: LedgerMetadata, bad: Sequence[FragmentCheck], targets: Sequence[Target], view: ClusterView
    ) -> None:
        members = {one.fragment.bookie_id for one in bad} | {b for s in metadata.segments for b in s.ensemble}
        sources = Sources(
            bookies=frozenset(view.bookies),
            gone={b for b in members if view.is_gone(b)},
            refilling={one.fragment.bookie_id for one in bad if one.state is FragmentState.REFILLING},
            bad={one.fragment.bookie_id: frozenset(one.bad_entry_ids) for one in bad},
        )
        lost = {target.fragment.bookie_id for target in targets} - set(view.bookies)
        paused = False

        async def is_wanted() -> bool:
            nonlocal paused
            paused = not await self._is_enabled()
            return not paused and (not lost or lost.isdisjoint(await self._client.list_bookies()))

        await self._on_begin()
        result = await self._copier.copy(
            self._ledger_id, metadata, targets, sources=sources, is_wanted=is_wanted, first=self.unreadable
        )
        self._note_unreadable(targets[0].fragment, result)
        if result.is_abandoned:
            if paused:
                self._paused()
            else:  # a bookie came back: what it has need not be copied
                self._has_changed = True
            return
        replacements = {t.index: (t.fragment.bookie_id, t.new) for t in result.done if t.is_replacement}
        if replacements:
            first = targets[0].fragment.segment_first
            await self._client.update_metadata(
                self._ledger_id,
                lambda found: plan_replacement(found, segment_first=first, replacements=replacements),
            )
            log.info(
                "fragments_replaced", ledger_id=self._ledger_id, segment_first=first,
                replaced=dict(replacements.values()), entries=result.entries, bytes=result.bytes,
            )  # fmt: skip
        if result.done:
            self._has_changed = True
        in_place = {target.index for target in targets if not target.is_replacement}
        for index, failure in result.failed.items():
            self._failed(failure)
            if index in in_place and failure.refusing is None:
                self._has_changed = True  # it got the others
                self._sourceless[targets[0].fragment.segment_first, index] = self._problems[-1]

    def _note_unreadable(self, fragment: Fragment, result: CopyResult) -> None:
        """What was asked for in this segment and is not among the unreadable was had, or is not wanted any more."""
        self.unreadable = {one for one in self.unreadable if not fragment.segment_first <= one <= fragment.last}
        self.unreadable.update(result.unreadable)

    def _failed(self, failure: CopyFailure) -> None:
        if failure.refusing is not None and failure.refusing not in self._refused:
            self._refused[failure.refusing] = "did not take copies of this ledger"
            self._has_changed = True  # another bookie may take them
        self._problems.append(_Problem(failure.obstacle, failure.detail, is_final=failure.is_final))

    # --- the open last segment ------------------------------------------------------------------------------------

    async def _heal_tail(self, metadata: LedgerMetadata, tail: OpenTail) -> None:
        if not await self._is_enabled():
            self._paused()
            return
        view = await self._look()
        missing = {}
        for index, bookie_id in enumerate(tail.ensemble):
            if bookie_id not in view.bookies and view.is_excused(bookie_id):
                self._wait_for_excused(view, bookie_id)
            elif bookie_id not in view.bookies or bookie_id in view.leaving:
                missing[index] = bookie_id
        if not missing:
            self._graces.forget(self._ledger_id)
            if not self._problems:
                self._has_changed = True  # the bookies came back
            return
        try:
            chosen = await self._client.choose_replacements(
                tail.ensemble, missing, write_quorum=metadata.write_quorum, exclude=view.not_for_copies
            )
        except NotEnoughBookies:
            chosen = {}
        without = [b for index, b in missing.items() if index not in chosen]
        if without:
            detail = sentences.no_spare(without[0], tail.ensemble, view, is_open=True)
            self._problems.append(_Problem(Obstacle.NO_SPARE, detail))
            return
        left_s = self._graces.left_s(self._ledger_id, tail, missing=missing.values(), marked_ms=self._marked_ms)
        if left_s > 0:
            detail = sentences.grace(self._ledger_id, list(missing.values()), left_s)
            self._problems.append(
                _Problem(Obstacle.LEDGER_OPEN, detail, retry_s=left_s, state=RecoveryState.WAITING)
            )  # fmt: skip
            return
        await self._recover(metadata)

    async def _recover(self, metadata: LedgerMetadata) -> None:
        log.info("open_ledger_recovered", ledger_id=self._ledger_id, ensemble=metadata.last_segment.ensemble)
        try:
            handle = await self._client.open(self._ledger_id, password=metadata.password or b"")
            await handle.release()
        except NoSuchLedger:
            raise
        except BinderyError as error:
            detail = sentences.recovery_impossible(self._ledger_id, str(error))
            self._problems.append(_Problem(Obstacle.RECOVERY_IMPOSSIBLE, detail))
            return
        self._graces.forget(self._ledger_id)
        self.was_fenced = True
        self._has_changed = True

    # --- reasons to wait ------------------------------------------------------------------------------------------

    def _paused(self) -> None:
        self._problems.append(
            _Problem(Obstacle.PAUSED, sentences.paused(), retry_s=0.0, state=RecoveryState.WAITING)
        )  # fmt: skip

    def _wait_for_excused(self, view: ClusterView, bookie_id: BookieId) -> None:
        until_ms = view.excused_until_ms(bookie_id)
        left_s = EXCUSED_PAUSE_MAX_S if until_ms is None else max(1.0, (until_ms - view.now_ms) / 1000)
        detail = sentences.excused(bookie_id, view.now_ms, until_ms)
        pause_s = min(left_s, EXCUSED_PAUSE_MAX_S)
        self._problems.append(_Problem(Obstacle.NONE, detail, retry_s=pause_s, state=RecoveryState.WAITING))


def _place(fragment: Fragment) -> tuple[int, int]:
    """Which fragment it is: the segment's first entry, and the index."""
    return fragment.segment_first, fragment.index

"""One attempt to repair one ledger, whose lock the caller holds.

    check -> for each segment with bad fragments: read the cluster again -> plan -> copy -> compare-and-set the
    ensemble -> check the whole ledger again, until it is whole or a round changed nothing

    with `spread`, if the ledger is whole and closed: for each segment whose write quorums can be on more racks, choose
    a move -> copy -> compare-and-set -> check again, until there is no such move

`repair_plan` contains the decisions; this module carries them out. The cluster is read again before each segment and
while entries are copied, because a lost bookie may return at any time: then usually nothing has to be copied.

If a bookie misses one entry, all entries that it should hold are checked, whatever the depth of the other checks. A
missing first entry proves nothing about the entries between the first and the last, and after both ends are restored a
check of the ends would not find the rest.
Source: BookKeeper ReplicationWorker.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Protocol

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BadVersion, BinderyError, Corrupt, NoSuchLedger, NotEnoughBookies
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.replication_plan import Fragment, closed_fragments, plan_replacement
from bindery_core.sources import RandomFloats
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
    check_fragments,
    check_ledger,
)
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records import sentences
from bindery_recovery.repair import repair_plan
from bindery_recovery.repair.copier import Copier, CopyResult, Sources, Target
from bindery_recovery.repair.graces import Graces
from bindery_recovery.repair.repair_plan import AttemptState, Outcome, Problem, place_of

ROUNDS_MAX: Final = 20
"""Maximum number of rounds in one attempt. A round is repeated only if it changed something."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RepairTools:
    """What all attempts of one worker share."""

    client: LedgerClient
    read_cluster: Callable[[], Awaitable[ClusterView]]
    """Reads the cluster."""
    is_enabled: Callable[[], Awaitable[bool]]
    """Whether automatic recovery is enabled."""
    budget: RepairBudget
    graces: Graces
    randomness: RandomFloats


class Observer(Protocol):
    """Receives the progress of an attempt."""

    def checked(self, check: LedgerCheck) -> None:
        """A check found something to repair."""
        ...

    async def begins(self) -> None:
        """Copying begins."""
        ...

    def copied(self, entries: int, size: int) -> None:
        """A batch was copied: number of entries, bytes."""
        ...


class LedgerRepair:
    """One attempt; create a new object for each attempt."""

    def __init__(
        self,
        ledger_id: LedgerId,
        tools: RepairTools,
        observer: Observer,
        *,
        marked_ms: int = 0,
        unreadable: Collection[int] = (),
        unsure: Mapping[str, int] | None = None,
        spread: bool = False,
    ) -> None:
        """`marked_ms`: time of the first mark since the ledger was last whole. `unreadable`, `unsure`: the attributes
        of these names after the previous attempt. `spread`: also move replicas to other racks."""
        self._ledger_id = ledger_id
        self._client = tools.client
        self._read_cluster = tools.read_cluster
        self._tools = tools
        self._observer = observer
        self._marked_ms = marked_ms
        self._is_spread = spread
        self._copier = Copier(tools.client, tools.budget, on_copied=observer.copied)
        self._attempt = AttemptState(unsure_before=dict(unsure or {}), unreadable=set(unreadable))
        self._problems: list[Problem] = []
        """Problems of this round."""
        self._has_changed = False
        """Whether this round changed something, so that another round may make progress."""
        self.was_fenced = False
        """Whether this attempt closed the ledger, which fenced its writer."""
        self.moves = 0
        """Number of replicas that were moved to other racks."""
        self.unsure: dict[str, int] = dict(unsure or {})
        """Number of consecutive attempts in which a bookie did not report its entries, by bookie."""

    @property
    def unreadable(self) -> set[int]:
        """Entries that no bookie could return when they were last read."""
        return self._attempt.unreadable

    async def run(self, *, depth: Depth, marked: Collection[str]) -> Outcome:
        """Repair the ledger as far as possible. `marked`: bookies named by the mark.

        Raises MetadataUnavailable and MetadataOutcomeUnknown; every other failure becomes an Outcome.
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
            view = await self._read_cluster()
            check = await self._check(metadata, view, depth)
            unsure = {one.fragment.bookie_id for one in check.bad if one.state is FragmentState.UNSURE}
            self.unsure = {bookie_id: self._attempt.unsure_attempts(bookie_id) for bookie_id in unsure}
            if check.is_whole and self._is_spread and check.tail is None and await self._spread(metadata, view):
                continue
            if check.is_whole and self._problems:
                return repair_plan.outcome_of_problems(check, self._problems)
            if check.is_whole:
                self._tools.graces.forget(self._ledger_id)
                return repair_plan.outcome_of_whole(self._ledger_id, check, depth=depth, marked=marked)
            self._observer.checked(check)
            try:
                for _, group in groupby(check.bad, key=lambda one: one.fragment.segment_first):
                    await self._repair_segment(metadata, list(group), depth)
                if check.tail is not None and not check.tail.is_whole:
                    await self._repair_tail(metadata, check.tail)
            except NoSuchLedger:
                return self._deleted()
            if not self._has_changed:
                break
        return repair_plan.outcome_of_problems(check, self._problems)

    def _deleted(self) -> Outcome:
        self._tools.graces.forget(self._ledger_id)
        return Outcome(RecoveryState.HEALED, is_deleted=True)

    # --- checks ---------------------------------------------------------------------------------------------------

    async def _check(self, metadata: LedgerMetadata, view: ClusterView, depth: Depth) -> LedgerCheck:
        """Check all closed fragments to `depth`, and all entries of bookies that miss an entry."""
        check = await check_ledger(
            self._client,
            self._ledger_id,
            metadata,
            bookies=view.bookies,
            leaving=view.leaving,
            depth=depth,
            randomness=self._tools.randomness,
            budget=self._tools.budget,
        )
        incomplete = self._attempt.incomplete
        incomplete |= {one.fragment.bookie_id for one in check.bad if one.state is FragmentState.MISSING}
        if depth == ALL or not incomplete:
            return check
        fragments = [one for one in closed_fragments(metadata) if one.bookie_id in incomplete]
        complete = {place_of(one.fragment): one for one in await self._check_fragments(metadata, fragments, view, ALL)}
        others = (one for one in check.bad if place_of(one.fragment) not in complete)
        bad = (one for one in (*others, *complete.values()) if one.state is not FragmentState.WHOLE)
        return replace(check, bad=tuple(sorted(bad, key=lambda one: place_of(one.fragment))))

    async def _check_fragments(
        self, metadata: LedgerMetadata, fragments: Sequence[Fragment], view: ClusterView, depth: Depth
    ) -> list[FragmentCheck]:
        return await check_fragments(
            self._client,
            self._ledger_id,
            metadata,
            fragments,
            bookies=view.bookies,
            leaving=view.leaving,
            depth=depth,
            randomness=self._tools.randomness,
            budget=self._tools.budget,
        )

    async def _check_moved(
        self, metadata: LedgerMetadata, bad: Sequence[FragmentCheck], view: ClusterView, depth: Depth
    ) -> list[FragmentCheck]:
        """Return the fragments that are still bad after bookies have registered or disappeared."""
        moved = repair_plan.moved_since(bad, view)
        if not moved:
            return list(bad)
        self._has_changed = True
        again = await self._check_fragments(metadata, [one.fragment for one in moved], view, depth)
        if depth != ALL:  # a bookie that returned without its entries: the next round checks all of them
            holes = [one.fragment for one in again if one.state is FragmentState.MISSING]
            self._attempt.incomplete |= {fragment.bookie_id for fragment in holes}
            again = [one for one in again if one.fragment not in holes]
            bad = [one for one in bad if one.fragment not in holes]
        newest = {one.fragment.index: one for one in (*bad, *again)}
        return [one for one in newest.values() if one.state is not FragmentState.WHOLE]

    # --- closed segments ------------------------------------------------------------------------------------------

    async def _repair_segment(self, metadata: LedgerMetadata, bad: list[FragmentCheck], depth: Depth) -> None:
        if not await self._tools.is_enabled():
            self._problems.append(repair_plan.paused())
            return
        view = await self._read_cluster()
        bad = await self._check_moved(metadata, bad, view, depth)
        plan = repair_plan.plan_segment(bad, view, self._attempt)
        self._problems += plan.problems
        self.unsure.update({b: self._attempt.unsure_attempts(b) for b in plan.unsure})
        self._attempt.restored |= {place_of(target.fragment) for target in plan.restore}
        targets = [*plan.restore, *await self._replacements(metadata, plan.replace, view)]
        if targets:
            await self._copy(metadata, bad, targets, view)

    async def _replacements(
        self, metadata: LedgerMetadata, bad: Mapping[int, FragmentCheck], view: ClusterView
    ) -> list[Target]:
        """Choose a new bookie for each bad fragment of one segment, as far as spare bookies exist."""
        if not bad:
            return []
        fragments = {index: one.fragment for index, one in bad.items()}
        segment_first = next(iter(fragments.values())).segment_first
        ensemble = next(s.ensemble for s in metadata.segments if s.first_entry_id == segment_first)
        failed = {index: fragment.bookie_id for index, fragment in fragments.items()}
        chosen = await self._choose(
            ensemble, failed, metadata, exclude={**view.not_for_copies, **self._attempt.refused}
        )
        for index, bookie_id in failed.items():
            if index not in chosen:
                detail = sentences.no_spare(bookie_id, ensemble, view, refused=self._attempt.refused)
                self._problems.append(Problem(Obstacle.NO_SPARE, detail))
        return [Target(fragments[index], new) for index, new in sorted(chosen.items())]

    async def _choose(
        self,
        ensemble: tuple[BookieId, ...],
        failed: Mapping[int, BookieId],
        metadata: LedgerMetadata,
        *,
        exclude: Mapping[BookieId, str],
    ) -> Mapping[int, BookieId]:
        """Return the new bookies by ensemble index; empty if there are not enough bookies."""
        try:
            return await self._client.choose_replacements(
                ensemble, failed, write_quorum=metadata.write_quorum, exclude=exclude
            )
        except NotEnoughBookies:
            return {}

    async def _copy(
        self, metadata: LedgerMetadata, bad: Sequence[FragmentCheck], targets: Sequence[Target], view: ClusterView
    ) -> int:
        """Copy, then change the ensemble. Return the number of targets that have all their entries."""
        members = {one.fragment.bookie_id for one in bad} | {b for s in metadata.segments for b in s.ensemble}
        sources = Sources(
            bookies=frozenset(view.bookies),
            gone={b for b in members if view.is_gone(b)},
            refilling={one.fragment.bookie_id for one in bad if one.state is FragmentState.REFILLING},
            bad={one.fragment.bookie_id: frozenset(one.bad_entry_ids) for one in bad},
        )
        lost = {target.fragment.bookie_id for target in targets} - set(view.bookies)
        is_paused = False

        async def is_wanted() -> bool:
            nonlocal is_paused
            is_paused = not await self._tools.is_enabled()
            return not is_paused and (not lost or lost.isdisjoint(await self._client.list_bookies()))

        await self._observer.begins()
        result = await self._copier.copy(
            self._ledger_id, metadata, targets, sources=sources, is_wanted=is_wanted, first=self.unreadable
        )
        problems, has_changed = self._attempt.copied(targets, result)
        if not result.is_abandoned:
            await self._update_ensemble(targets[0].fragment.segment_first, result)
            self._problems += problems
            self._has_changed |= has_changed
        elif is_paused:
            self._problems.append(repair_plan.paused())
        else:  # a bookie returned: the entries that it has need not be copied
            self._has_changed = True
        return 0 if result.is_abandoned else len(result.done)

    async def _update_ensemble(self, segment_first: int, result: CopyResult) -> None:
        """Write the replacements that have all their copies to the metadata."""
        replacements = {t.index: (t.fragment.bookie_id, t.new) for t in result.done if t.is_replacement}
        if not replacements:
            return
        await self._client.update_metadata(
            self._ledger_id,
            lambda found: plan_replacement(found, segment_first=segment_first, replacements=replacements),
        )
        log.info(
            "fragments_replaced",
            ledger_id=self._ledger_id,
            segment_first=segment_first,
            replaced=dict(replacements.values()),
            entries=result.entries,
            bytes=result.bytes,
        )

    # --- racks ---------------------------------------------------------------------------------------------------

    async def _spread(self, metadata: LedgerMetadata, view: ClusterView) -> bool:
        """Move one replica of each segment to a bookie of another rack, where that puts write quorums on more racks.
        Return whether a replica was moved. Without a bookie for a move, the ledger stays as it is."""
        if not await self._tools.is_enabled():
            self._problems.append(repair_plan.paused())
            return False
        for segment in metadata.segments:
            move = self._client.choose_move(
                segment.ensemble,
                write_quorum=metadata.write_quorum,
                exclude={**view.not_for_copies, **self._attempt.refused},
            )
            if move is None:
                continue
            index, new = move
            fragment = next(
                one
                for one in closed_fragments(metadata)
                if one.segment_first == segment.first_entry_id and one.index == index
            )
            done = await self._copy(metadata, [], [Target(fragment, new)], view)
            self.moves += done
            if self._problems:
                break
        return self._has_changed

    # --- the open last segment ------------------------------------------------------------------------------------

    async def _repair_tail(self, metadata: LedgerMetadata, tail: OpenTail) -> None:
        if not await self._tools.is_enabled():
            self._problems.append(repair_plan.paused())
            return
        view = await self._read_cluster()
        plan = repair_plan.plan_tail(tail, view)
        self._problems += plan.problems
        if not plan.missing:
            self._tools.graces.forget(self._ledger_id)
            if not self._problems:
                self._has_changed = True  # the bookies returned
            return
        chosen = await self._choose(tail.ensemble, plan.missing, metadata, exclude=view.not_for_copies)
        without_spare = [b for index, b in plan.missing.items() if index not in chosen]
        if without_spare:
            detail = sentences.no_spare(without_spare[0], tail.ensemble, view, is_open=True)
            self._problems.append(Problem(Obstacle.NO_SPARE, detail))
            return
        missing = plan.missing.values()
        left_s = self._tools.graces.left_s(self._ledger_id, tail, missing=missing, marked_ms=self._marked_ms)
        if left_s > 0:
            self._problems.append(repair_plan.in_grace(self._ledger_id, missing, left_s))
        else:
            await self._recover(metadata)

    async def _recover(self, metadata: LedgerMetadata) -> None:
        """Fence the writer and close the ledger."""
        log.info("open_ledger_recovered", ledger_id=self._ledger_id, ensemble=metadata.last_segment.ensemble)
        try:
            handle = await self._client.open(self._ledger_id, password=metadata.password or b"")
            await handle.release()
        except NoSuchLedger:
            raise
        except BinderyError as error:
            detail = sentences.recovery_impossible(self._ledger_id, str(error))
            self._problems.append(Problem(Obstacle.RECOVERY_IMPOSSIBLE, detail))
            return
        self._tools.graces.forget(self._ledger_id)
        self.was_fenced = True
        self._has_changed = True

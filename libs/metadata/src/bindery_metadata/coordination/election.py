"""Elect the leading auditor as BookKeeper does, so that its auditors and Bindery's take part in the same election.

Each candidate creates an ephemeral sequential node, its vote. The candidate with the lowest vote leads. Each other
candidate watches only its predecessor, so that the end of a leadership wakes one candidate. A vote's path is never
reused while the election's node exists, so a vote is safe to delete, and its path and version identify one leadership.

    (no vote) --create--> waiting --lowest--> leading --session LOST, vote gone--> (no vote)
                             `--session LOST, vote gone--> (no vote)   `--`lead` ended, resign--> vote deleted

A leader without a connection may not have noticed that its leadership is over. It therefore writes only through
`Leadership.multi`, which puts a check of the vote into the same transaction. If another candidate leads, the vote no
longer exists, so the check fails and nothing is written.

Source: BookKeeper's AuditorElector and ZkLedgerAuditorManager.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from bindery_core.errors import (
    BinderyError,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NotLeader,
    VersionConflict,
)
from bindery_core.formats import replication_formats as formats

from bindery_metadata.layout.layout import VOTE_PREFIX, LedgersLayout
from bindery_metadata.stores.store import Check, MetadataStore, Op, SessionState, Set, Stat

__all__ = ["AuditorElection", "Guard", "Leadership", "NotLeader", "current_auditor"]

RETRY_S: Final = 0.5
"""Delay in seconds before a failed request is repeated, and before a former leader stands for election again."""
RESIGN_TIMEOUT_S: Final = 2.0
"""Maximum time in seconds for the deletion of a vote; otherwise the end of the session deletes it."""
READS_MAX: Final = 10
"""Maximum number of attempts to read the lowest vote, which may be deleted between two reads."""

_log = logging.getLogger(__name__)


class Guard(Protocol):
    """Applies writes only while a condition holds, such as a leadership."""

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        """Like MetadataStore.multi. If the leadership is over, nothing is written and NotLeader is raised."""
        ...


class Leadership:
    """One term of leadership. A term that has ended never starts again; the next term is another object."""

    def __init__(self, store: MetadataStore, *, name: str, vote_path: str, version: int, session_id: int) -> None:
        self.name = name
        self.vote_path = vote_path
        self.version = version
        self.session_id = session_id
        self._store = store
        self._over = False

    @property
    def is_over(self) -> bool:
        """Whether the end of the term is known here; once true, always true."""
        return self._over

    @property
    def is_certain(self) -> bool:
        """Whether the term is not over and the store is connected in the session of the vote."""
        return (
            not self._over
            and self._store.session_state is SessionState.CONNECTED
            and self._store.session_id == self.session_id
        )

    async def verify(self) -> bool:
        """Read whether the vote is unchanged in the store. Raises MetadataUnavailable."""
        if not self._over:
            await self._store.sync(self.vote_path)
            self.see(await self._store.exists(self.vote_path))
        return not self._over

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        """Apply `ops` if the leadership continues; otherwise apply none and raise NotLeader.

        Other errors are those of the operations. After MetadataOutcomeUnknown, `ops` may have been applied, but only
        under this leadership.
        """
        if self._over:
            raise NotLeader("the leadership is over", name=self.name, vote=self.vote_path)
        try:
            [_, *results] = await self._store.multi([Check(self.vote_path, self.version), *ops])
            return results
        except (NoSuchNode, VersionConflict) as error:
            path = error.facts.get("path")
            if path == self.vote_path or (path is None and not await self.verify()):
                self.end()
                raise NotLeader("the leadership is over", name=self.name, vote=self.vote_path) from error
            raise
        except MetadataUnavailable as error:
            if self._store.session_id not in (0, self.session_id):
                self.end()
                raise NotLeader("the session has ended", name=self.name, vote=self.vote_path) from error
            raise

    def see(self, stat: Stat | None) -> None:
        """Process the current state of the vote."""
        if stat is None or stat.ephemeral_owner != self.session_id or stat.version != self.version:
            self.end()

    def end(self) -> None:
        """End the term. Later calls of `multi` raise NotLeader without a request."""
        self._over = True


Lead = Callable[[Leadership], Awaitable[None]]
"""The work of a leader. Cancelled when the term ends."""


class AuditorElection:
    """One candidate. `name`: the bookie id or host that the vote names; unique among candidates.

    Invariant: before a vote is created, every earlier one of this candidate and session is known to be deleted.
    """

    def __init__(self, store: MetadataStore, layout: LedgersLayout, *, name: str) -> None:
        self._store = store
        self._layout = layout
        self._name = name
        self._text = formats.encode_vote(name)
        self._leadership: Leadership | None = None
        self._resigned = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._unsettled: frozenset[str] | None = None
        """Votes that existed before a creation whose response was lost, until its outcome is known."""
        self._leftovers: set[str] = set()
        """Our votes that must be deleted."""

    @property
    def leadership(self) -> Leadership | None:
        """The current term; None: not leading."""
        return self._leadership

    async def run(self, lead: Lead) -> None:
        """Stand for election until `resign`. Lead when elected, and stand for election again afterwards.

        `lead` is cancelled if the session is LOST or the vote is deleted, but not while the session is SUSPENDED; `run`
        waits until it has ended. If `lead` returns or raises a BinderyError, the next candidate becomes the leader.
        Other errors end `run`.
        """
        assert self._ended.is_set(), "run once at a time"
        self._ended.clear()
        self._resigned.clear()
        vote: str | None = None
        try:
            while not self._resigned.is_set():
                try:
                    await self._remove_leftovers()
                    vote = vote or await self._cast()
                    is_lowest = await self._await_turn(vote)
                    self._leftovers.add(vote)
                    elected, vote = vote, None
                    if is_lowest and await self._serve(elected, lead):
                        await self._remove_leftovers()
                        await self._pause()  # let another candidate lead
                except BinderyError as error:
                    _log.warning("auditor_election_waits", extra={"candidate": self._name, "error": str(error)})
                    await self._withdraw()
                    await self._pause()
        finally:
            if vote is not None:
                self._leftovers.add(vote)
            try:
                await self._withdraw()
            finally:
                self._ended.set()

    async def resign(self) -> None:
        """End the candidacy and any leadership: cancel `lead`, delete the vote, and wait until `run` has ended.

        Has no effect unless `run` is running.
        """
        self._resigned.set()
        await self._ended.wait()

    # --- the vote -------------------------------------------------------------------------------------------------

    async def _cast(self) -> str:
        """Make sure that this candidate has a vote, and return its path."""
        election = self._layout.auditor_election
        if self._unsettled is not None:
            found = await self._find_own(self._unsettled)
            self._unsettled = None
            if found:
                return found
        before = frozenset(await self._votes())
        try:
            return await self._store.create(
                f"{election}/{VOTE_PREFIX}", self._text, ephemeral=True, sequential=True, make_parents=True
            )
        except MetadataOutcomeUnknown:
            self._unsettled = before
            raise

    async def _find_own(self, before: frozenset[str]) -> str | None:
        """Return the vote that a creation with a lost response created: it is new and has our session and our text."""
        await self._store.sync(self._layout.auditor_election)
        for name in await self._votes():
            if name in before:
                continue
            path = f"{self._layout.auditor_election}/{name}"
            with contextlib.suppress(NoSuchNode):
                node = await self._store.get(path)
                if node.stat.ephemeral_owner == self._store.session_id and node.data == self._text:
                    return path
        return None

    async def _votes(self) -> list[str]:
        return await _votes(self._store, self._layout)

    async def _remove_leftovers(self) -> None:
        """Delete this candidate's old votes.

        Called before a new vote is created: an old, lower vote would be elected, and no process would lead.
        """
        for vote in list(self._leftovers):
            with contextlib.suppress(NoSuchNode):
                await self._store.delete(vote, version=None)
            self._leftovers.discard(vote)

    async def _withdraw(self) -> None:
        """Delete our votes if the store is available now."""
        try:
            async with asyncio.timeout(RESIGN_TIMEOUT_S):
                await self._remove_leftovers()
        except (BinderyError, TimeoutError) as error:
            _log.warning("auditor_votes_left", extra={"votes": sorted(self._leftovers), "error": str(error)})

    # --- waiting --------------------------------------------------------------------------------------------------

    async def _await_turn(self, vote: str) -> bool:
        """Wait until `vote` is the lowest. Return False if resigned or if the vote is deleted.

        The vote remains if an error is raised.
        """
        name = vote.rsplit("/", 1)[1]
        while not self._resigned.is_set():
            names = await self._votes()
            if name not in names:
                return False
            place = names.index(name)
            if place == 0:
                return True
            changed = asyncio.Event()
            before = f"{self._layout.auditor_election}/{names[place - 1]}"
            if await self._store.exists(before, watch=changed.set) is not None:
                await self._until(changed)
        return False

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for `event`, or for resignation."""
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._resigned.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._resigned.wait()

    # --- leading --------------------------------------------------------------------------------------------------

    async def _serve(self, vote: str, lead: Lead) -> bool:
        """Lead until the term ends. Return True if it ended because `lead` returned."""
        stat = await self._store.exists(vote)
        if stat is None or stat.ephemeral_owner != self._store.session_id:
            return False
        leadership = Leadership(
            self._store, name=self._name, vote_path=vote, version=stat.version, session_id=stat.ephemeral_owner
        )
        over = asyncio.Event()

        def on_session(state: SessionState) -> None:
            if state is SessionState.LOST:
                leadership.end()
                over.set()

        forget = self._store.on_session_change(on_session)
        watcher = asyncio.create_task(self._watch(leadership, over))
        term = asyncio.create_task(self._term(leadership, lead))
        term.add_done_callback(lambda _: over.set())
        self._leadership = leadership
        _log.info("auditor_elected", extra={"candidate": self._name, "vote": vote})
        try:
            await self._until(over)
            gave_up = term.done()
        finally:
            forget()
            self._leadership = None
            was_over = leadership.is_over
            leadership.end()
            watcher.cancel()
            term.cancel()
            await asyncio.wait([watcher, term])
            _log.info("auditor_leadership_ended", extra={"candidate": self._name, "vote": vote, "lost": was_over})
        if not term.cancelled():
            term.result()  # raises its error, if any
        return gave_up

    async def _term(self, leadership: Leadership, lead: Lead) -> None:
        with contextlib.suppress(NoSuchNode, MetadataOutcomeUnknown, MetadataUnavailable):  # only informs operators
            await leadership.multi([Set(self._layout.auditor_election, self._text, None)])
        await lead(leadership)

    async def _watch(self, leadership: Leadership, over: asyncio.Event) -> None:
        """Set `over` when the vote is deleted or changed."""
        while True:
            changed = asyncio.Event()
            try:
                leadership.see(await self._store.exists(leadership.vote_path, watch=changed.set))
            except BinderyError:  # the store is unavailable; the term continues, because its writes are guarded
                await asyncio.sleep(RETRY_S)
                continue
            if leadership.is_over:
                over.set()
                return
            await changed.wait()


async def current_auditor(store: MetadataStore, layout: LedgersLayout) -> str | None:
    """Return the name in the lowest vote. None: no leader, or an unreadable vote. Raises MetadataUnavailable."""
    for _ in range(READS_MAX):
        votes = await _votes(store, layout)
        if not votes:
            return None
        try:
            node = await store.get(f"{layout.auditor_election}/{votes[0]}")
            return formats.decode_vote(node.data) or None
        except NoSuchNode:
            continue  # the vote was deleted after the votes were listed
        except Corrupt as error:
            _log.warning("auditor_vote_unreadable", extra={"vote": votes[0], "error": str(error)})
            return None
    return None


async def _votes(store: MetadataStore, layout: LedgersLayout) -> list[str]:
    """Names of the votes, lowest first."""
    try:
        names = await store.children(layout.auditor_election)
    except NoSuchNode:
        return []
    numbers = {name: name[len(VOTE_PREFIX) :] for name in names if name.startswith(VOTE_PREFIX)}
    return sorted((name for name, digits in numbers.items() if digits.isdecimal()), key=lambda n: int(numbers[n]))

"""Restore metadata into ZooKeeper from a backup (`backup`).

LAYOUT and INSTANCEID are written last, after all other nodes and the counters. Without INSTANCEID, bookies and brokers
refuse to start, so an interrupted restore is never used as a cluster; `merge` completes it.

No ledger id may be assigned twice: bookies may still store entries, keys and fences of ledgers created after the
backup. The id generator therefore starts `id_margin` above the highest known id, which is the highest of the counter in
the backup and all short ledger ids. A counter is advanced by creating and deleting children, some thousands per second.
If more than BURN_MAX are needed, the cluster switches to long ids, which are above all short ones, as BookKeeper does
when the short ids are used up (`idgen-long`). The skipped ids are recorded (`known_ledgers`): a bookie that stores a
ledger of such an id keeps it until an operator accepts the restored metadata.

Existing nodes are never changed, except that counters are raised. In an existing cluster, `merge` does not restore
missing memberships, the recovery switch, marks or their records. These nodes are missing because they were removed
after the backup: restoring them would declare a bookie removed that serves again, or disable recovery. The auditor
marks under-replicated ledgers again.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    NoSuchNode,
)
from bindery_metadata.layout.layout import HOB_PREFIX, SHORT_ID_END, BinderyLayout, LedgersLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.ledgers.id_counters import BURN_MAX, BURN_STEP, HOB_FIRST, burn, read_counters
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, Range
from bindery_metadata.stores.parents import make_path
from bindery_metadata.stores.store import Create, MetadataStore, Op, Set
from bindery_pulsar import znode_layout

from bindery_recovery.backup.backup import BackedUpNode, Backup, Progress, roots_of

ID_MARGIN_DEFAULT: Final = 10_000
"""Default number of ledger ids that are skipped above the highest known one."""
BATCH_NODES_MAX: Final = 200
"""Maximum number of nodes created in one transaction."""
BATCH_SIZE_MAX: Final = 500_000
"""Maximum bytes of paths and data in one transaction, well below ZooKeeper's limit for a packet."""
WRITE_ATTEMPTS_MAX: Final = 5
"""Maximum number of attempts of one write whose outcome is unknown or that conflicts with another client."""


class CannotRestore(Conflict):
    code = "cannot_restore"


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """Counts of one restore, in nodes."""

    created: int
    kept: int
    """Nodes that existed already and were not changed."""
    differing: int
    """Of the kept nodes, those whose data differs from the backup."""
    next_ledger_id: int
    """Lowest id that a new ledger may get."""
    dry_run: bool
    """Whether nothing was written: `created` then counts the nodes that would be created."""
    left_out: int = 0
    """Missing nodes that `merge` did not restore: memberships, the switch, marks and their records."""


async def restore_backup(
    store: MetadataStore,
    layout: LedgersLayout,
    backup: Backup,
    lines: Iterable[bytes],
    *,
    merge: bool = False,
    dry_run: bool = False,
    id_margin: int = ID_MARGIN_DEFAULT,
    progress: Progress = lambda _: None,
) -> RestoreSummary:
    """Create the nodes of the backup. `lines`: the lines from which `backup` was verified.

    Raises CannotRestore, without writing anything, if the target is not empty and `merge` is False, or if the target is
    another cluster. Raises BadRequest if the backup has another ledgers root. Raises MetadataUnavailable if the restore
    was interrupted; `merge` continues it.
    """
    if backup.ledgers_root != layout.root:
        raise BadRequest(
            f"the backup is of the ledgers root {backup.ledgers_root}; pass it with --ledgers-root", root=layout.root
        )
    nodes = backup.nodes(lines)
    if len(nodes) != backup.summary.nodes:
        raise Corrupt("the backup changed while it was read", nodes=len(nodes), expected=backup.summary.nodes)
    exists = await _refuse_other_cluster(store, layout, backup)
    if not merge:
        await _refuse_nonempty(store, layout)
    late = (layout.layout, layout.instance_id)
    intents = [node for node in nodes if _is_intent(layout, node.path)] if exists else []
    left_out = {node.path for node in intents}
    early = [node for node in nodes if node.path not in late and node.path not in left_out]
    last = sorted((node for node in nodes if node.path in late), key=lambda node: late.index(node.path))
    restore = _Restore(store, dry_run=dry_run, progress=progress)
    await restore.make(early)
    await restore.compare(intents)
    known = KnownLedgersStore(store, instance_id=backup.instance_id)
    next_id = await _raise_counters(store, layout, nodes, known=known, id_margin=id_margin, dry_run=dry_run)
    await restore.make(last)
    return RestoreSummary(restore.created, restore.kept, restore.differing, next_id, dry_run, restore.left_out)


def _is_intent(layout: LedgersLayout, path: str) -> bool:
    """Return True if the node is an operator's intent or describes work that was pending, rather than data."""
    ours = BinderyLayout()
    below = (ours.memberships, ours.recovery_ledgers, layout.underreplication_ledgers)
    return path in (layout.replication_disabled, ours.recovery_pause) or any(path.startswith(f"{at}/") for at in below)


async def _refuse_other_cluster(store: MetadataStore, layout: LedgersLayout, backup: Backup) -> bool:
    """Return True if the cluster of the backup exists here; an interrupted restore does not count."""
    try:
        found = (await store.get(layout.instance_id)).data.decode("ascii", "replace")
    except NoSuchNode:
        return False
    if found != backup.instance_id:
        raise CannotRestore(
            f"the target is another cluster: instance id {found}, the backup is of {backup.instance_id}. Restore into "
            "an empty ZooKeeper"
        )
    return True


async def _refuse_nonempty(store: MetadataStore, layout: LedgersLayout) -> None:
    there = []
    for root in roots_of(layout):
        try:
            stat = (await store.get(root)).stat
        except NoSuchNode:
            continue
        if stat.children_count:
            there.append(root)
    if there:
        raise CannotRestore(
            f"the target is not empty: {', '.join(there)}. --merge adds what is missing and leaves the rest as it "
            "is (it also brings back ledgers and topics that were deleted since the backup)"
        )


class _Restore:
    """Creates nodes in order, many per transaction, and counts them."""

    def __init__(self, store: MetadataStore, *, dry_run: bool, progress: Progress) -> None:
        self._store = store
        self._dry_run = dry_run
        self._progress = progress
        self.created = 0
        self.kept = 0
        self.differing = 0
        self.left_out = 0

    async def compare(self, nodes: Sequence[BackedUpNode]) -> None:
        """Count the nodes as kept or left out, without creating any."""
        for batch in _batches(nodes):
            for node, data in zip(batch, await asyncio.gather(*map(self._data, batch)), strict=True):
                if data is None:
                    self.left_out += 1
                else:
                    self._keep(node, data)

    async def make(self, nodes: Sequence[BackedUpNode]) -> None:
        """Create the nodes that are missing. A dry run only counts them."""
        for batch in _batches(nodes):
            await self._make(batch)
            self._progress(self.created + self.kept)

    async def _make(self, batch: Sequence[BackedUpNode]) -> None:
        missing = []
        for node, data in zip(batch, await asyncio.gather(*map(self._data, batch)), strict=True):
            if data is None:
                missing.append(node)
            else:
                self._keep(node, data)
        if self._dry_run:
            self.created += len(missing)
            return
        if not missing:
            return
        # create the parents of a root; below a root, each node comes after its parent
        await make_path(self._store, parent_of(missing[0].path))
        try:
            await self._store.multi([Create(node.path, node.data) for node in missing])
        except (AlreadyExists, NoSuchNode, MetadataOutcomeUnknown):
            for node in missing:  # another client creates nodes too, or the response was lost: create them one by one
                await self._make_one(node)
        else:
            self.created += len(missing)

    async def _make_one(self, node: BackedUpNode) -> None:
        for attempt in range(WRITE_ATTEMPTS_MAX):
            try:
                await self._store.create(node.path, node.data, make_parents=True)
            except AlreadyExists:
                data = await self._data(node)
                if data is None:
                    continue
                self._keep(node, data)
            except MetadataOutcomeUnknown:
                if attempt == WRITE_ATTEMPTS_MAX - 1:
                    raise
                await self._store.sync(node.path)
                continue
            else:
                self.created += 1
            return

    def _keep(self, node: BackedUpNode, data: bytes) -> None:
        self.kept += 1
        self.differing += data != node.data

    async def _data(self, node: BackedUpNode) -> bytes | None:
        try:
            return (await self._store.get(node.path)).data
        except NoSuchNode:
            return None


def _batches(nodes: Sequence[BackedUpNode]) -> Iterator[list[BackedUpNode]]:
    batch: list[BackedUpNode] = []
    size = 0
    for node in nodes:
        cost = len(node.path) + len(node.data) + 64
        if batch and (len(batch) == BATCH_NODES_MAX or size + cost > BATCH_SIZE_MAX):
            yield batch
            batch, size = [], 0
        batch.append(node)
        size += cost
    if batch:
        yield batch


# --- counters ---------------------------------------------------------------------------------------------------------


async def _raise_counters(
    store: MetadataStore,
    layout: LedgersLayout,
    nodes: Sequence[BackedUpNode],
    *,
    known: KnownLedgersStore,
    id_margin: int,
    dry_run: bool,
) -> int:
    """Advance every counter to its position in the backup. Return the lowest id that the next ledger may get."""
    for node in nodes:
        if dry_run or node.path == layout.idgen or parent_of(node.path) == layout.idgen_long:
            continue  # `_raise_ledger_ids` handles these
        if node.creates:
            await burn(store, node.path, up_to=node.creates)
        if node.path == znode_layout.PRODUCER_NAME_COUNTER:
            await _raise_version(store, node.path, up_to=node.version)
    return await _raise_ledger_ids(store, layout, nodes, known=known, id_margin=id_margin, dry_run=dry_run)


async def _raise_ledger_ids(
    store: MetadataStore,
    layout: LedgersLayout,
    nodes: Sequence[BackedUpNode],
    *,
    known: KnownLedgersStore,
    id_margin: int,
    dry_run: bool,
) -> int:
    """Advance the id generator, and record the ids that it skips. Return the lowest id that the next ledger may get."""
    ids = [ledger_id for node in nodes if (ledger_id := layout.ledger_id(node.path)) is not None]
    highs = {high: node.creates or 0 for node in nodes if (high := _high_of(layout, node.path)) is not None}
    short_base = max((int(ledger_id) + 1 for ledger_id in ids if ledger_id < SHORT_ID_END), default=0)
    short_base = max(short_base, next((node.creates or 0 for node in nodes if node.path == layout.idgen), 0))
    short_next = short_base + id_margin
    now = await read_counters(store, layout)
    is_long = any(node.path == layout.idgen_long for node in nodes) or now.short_end == SHORT_ID_END
    if not is_long and short_next < SHORT_ID_END and short_next - now.short_end <= BURN_MAX:
        if not dry_run:
            await _record_skipped(known, (max(short_base, now.short_end), short_next))
            await make_path(store, layout.idgen)
            await burn(store, layout.idgen, up_to=short_next)
        return max(short_next, now.short_end)
    # Long ids: the next upper half has not been used for any id. Ids that clients chose themselves may be
    # there, but cause no conflict: the creator of a ledger tries the next id if one is taken.
    long_base = max([now.long_end, *((high << 32) + creates for high, creates in highs.items())])
    high = max([HOB_FIRST - 1, now.long_end >> 32, *highs]) + 1
    if not dry_run:
        short = (SHORT_ID_END if is_long else max(short_base, now.short_end), SHORT_ID_END)
        await _record_skipped(known, short, (long_base, high << 32))
        await make_path(store, layout.hob(high))
    return high << 32


async def _record_skipped(known: KnownLedgersStore, *ranges: Range) -> None:
    """Record ids that no client generated: bookies may store ledgers of these ids that are newer than the backup, and
    must not delete them as if they had been deleted (`known_ledgers`)."""
    await known.update(lambda before: before.with_skipped(*ranges))


def _high_of(layout: LedgersLayout, path: str) -> int | None:
    digits = path.removeprefix(f"{layout.idgen_long}/{HOB_PREFIX}")
    return int(digits) if digits != path and digits.isdecimal() else None


async def _raise_version(store: MetadataStore, path: str, *, up_to: int) -> None:
    """Write a node until it has version `up_to`, because its version is the counter. Limited by BURN_MAX."""
    node = await store.get(path)
    left = min(up_to - node.stat.version, BURN_MAX)
    while left > 0:
        ops: list[Op] = [Set(path, node.data, None)] * min(left, BURN_STEP)
        try:
            await store.multi(ops)
        except MetadataOutcomeUnknown as error:
            raise MetadataOutcomeUnknown("a counter may be behind; restore again with --merge", path=path) from error
        left -= len(ops)

"""Back up a cluster's metadata to a file: everything that bookies and brokers cannot create again on their own.

JSON, one object per line, UTF-8, keys sorted, no spaces; `data` is base64, absent when empty.

| line    | fields                                                                                              |
|---------|-----------------------------------------------------------------------------------------------------|
| header  | format BACKUP_FORMAT, version 1, instance_id, at_ms, ledgers_root, roots                            |
| node    | path, data, version, ctime_ms, mtime_ms; for counters also creates: number of children ever created |
| gone    | path, gone true: the node was removed during the backup; ignore all earlier lines of this path      |
| trailer | end true, nodes, lines (all before it), ledgers, passes, changed_count, changed, settled, sha256    |

Parents come before their children. A later line of a path replaces an earlier one. sha256: hex, over all bytes before
the trailer. `nodes`: the number of nodes that remain.

ZooKeeper offers no snapshot of all nodes. The tree is therefore read repeatedly until a pass finds no change, at most
PASSES_MAX times. Each pass reads topics before ledgers, so that a topic that rolls over in the meantime refers to no
ledger that the backup lacks. It reads closing records after the ledgers, so that no closed ledger lacks its record. If
the last pass still found changes, the trailer reports them (`settled` false): these nodes are as the last pass read
them, and references among them may be inconsistent. `settled` is also false after a single pass, because only a second
pass detects changes.

Ephemeral nodes are left out: processes create their registrations, locks, votes and ownership again. ACLs are left out
too. The backup contains ledger passwords, as ZooKeeper does.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import BadRequest, BadVersion, Corrupt, NoSuchNode
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.layout.layout import BINDERY_ROOT, LedgersLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores.store import MetadataStore, Node
from bindery_pulsar import znode_layout

BACKUP_FORMAT: Final = "bindery-metadata-backup"
BACKUP_VERSION: Final = 1
READS_IN_FLIGHT: Final = 64
"""Maximum number of nodes read at a time."""
PASSES_MAX: Final = 4
"""Maximum number of passes: the first one, and three that look for changes."""
CHANGED_SHOWN_MAX: Final = 20
"""Maximum number of changed paths in the trailer."""
HISTORY: Final = f"{BINDERY_ROOT}/recovery/history"
"""Parent of the history events, which are numbered sequentially."""

PULSAR_ROOTS: Final = (
    znode_layout.MANAGED_LEDGERS_ROOT,
    "/schemas",
    znode_layout.NAMESPACE_ROOT,
    "/admin",
    "/counters",
    "/bookies",
)
"""Roots of topics, schemas, bundles, tenants and policies, Pulsar's counter for producer names, and Pulsar's racks."""

Progress = Callable[[int], None]
"""Called with the number of nodes read or written so far."""


@dataclass(frozen=True, slots=True)
class BackedUpNode:
    """A node of a backup."""

    path: str
    data: bytes
    version: int
    ctime_ms: int = 0
    mtime_ms: int = 0
    creates: int | None = None
    """For a counter: the number that its next sequential child gets."""


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """The content of the trailer."""

    nodes: int
    lines: int
    ledgers: int
    passes: int
    changed_count: int
    """Number of nodes that were changed, created or removed between the last two passes; 0 after a single pass."""
    changed: tuple[str, ...]
    """Paths of these nodes, at most CHANGED_SHOWN_MAX."""
    sha256: str

    @property
    def settled(self) -> bool:
        """Whether the last pass found no change. False after a single pass, which cannot detect changes."""
        return self.passes > 1 and self.changed_count == 0


def roots_of(layout: LedgersLayout) -> tuple[str, ...]:
    """Return the roots of the trees in a backup, in reading order: references to ledgers come before the ledgers, and
    records written before a ledger is closed (`closing_records`) after them."""
    return (*PULSAR_ROOTS, layout.root, BINDERY_ROOT)


def is_counter(layout: LedgersLayout, path: str) -> bool:
    """Return True if the number of children ever created under `path` must be restored, because ids are derived from
    it."""
    return path in (layout.idgen, HISTORY) or parent_of(path) == layout.idgen_long


async def write_backup(
    store: MetadataStore,
    layout: LedgersLayout,
    write: Callable[[bytes], object],
    *,
    now_ms: int,
    progress: Progress = lambda _: None,
    passes_max: int = PASSES_MAX,
) -> BackupSummary:
    """Write the lines of a backup, each with its line end. The store is not changed.

    Raises NoSuchNode (the cluster was never initialized), MetadataUnavailable; the lines written until then have no
    trailer and are not a valid backup.
    """
    roots = roots_of(layout)
    out = _Lines(write)
    instance_id = await CookieStore(store, layout).instance_id()
    out.add(
        {
            "format": BACKUP_FORMAT,
            "version": BACKUP_VERSION,
            "instance_id": instance_id,
            "at_ms": now_ms,
            "ledgers_root": layout.root,
            "roots": list(roots),
        }
    )
    seen: dict[str, _Mark] = {}
    changed: list[str] = []
    passes = 0
    for passes in range(1, passes_max + 1):
        changed = await _pass(store, layout, roots, out, seen, is_first=passes == 1, progress=progress)
        if passes > 1 and not changed:
            break
    return _finish(out, layout, seen, passes, changed)


_Mark = tuple[int, int, int | None]
"""Version, ctime and counter. A node is unchanged if all three are equal."""


async def _pass(
    store: MetadataStore,
    layout: LedgersLayout,
    roots: tuple[str, ...],
    out: "_Lines",
    seen: dict[str, _Mark],
    *,
    is_first: bool,
    progress: Progress,
) -> list[str]:
    """Read all nodes and write those that changed. Return the paths that differ from the previous pass."""
    changed: list[str] = []
    found: set[str] = set()
    for root in roots:
        async for path, node in walk(store, root):
            found.add(path)
            stat = node.stat
            creates = stat.creates if is_counter(layout, path) else None
            mark = (stat.version, stat.ctime_ms, creates)
            if seen.get(path) != mark:
                seen[path] = mark
                changed.append(path)
                out.add(_line_of(BackedUpNode(path, node.data, stat.version, stat.ctime_ms, stat.mtime_ms, creates)))
            progress(len(found))
    for path in [path for path in seen if path not in found]:
        del seen[path]
        changed.append(path)
        out.add({"path": path, "gone": True})
    return [] if is_first else changed


async def walk(store: MetadataStore, root: str) -> AsyncIterator[tuple[str, Node]]:
    """Yield every persistent node at and below `root`, parents first; none if `root` does not exist.

    A node that is removed in the meantime is left out, with everything below it.
    """
    waiting = [root]
    while waiting:
        batch, waiting = waiting[-READS_IN_FLIGHT:], waiting[:-READS_IN_FLIGHT]
        for path, node, names in await asyncio.gather(*(_read(store, path) for path in batch)):
            if node is None or node.stat.ephemeral_owner:
                continue
            yield path, node
            waiting += [f"{path}/{name}" for name in reversed(names)]


async def _read(store: MetadataStore, path: str) -> tuple[str, Node | None, list[str]]:
    try:
        node = await store.get(path)
        # Children created after the node was read count too, so list them unless the node can have none.
        names = [] if node.stat.ephemeral_owner else await store.children(path)
    except NoSuchNode:
        return path, None, []
    return path, node, names


def _finish(
    out: "_Lines", layout: LedgersLayout, seen: Mapping[str, _Mark], passes: int, changed: list[str]
) -> BackupSummary:
    summary = BackupSummary(
        nodes=len(seen),
        lines=out.count,
        ledgers=sum(layout.ledger_id(path) is not None for path in seen),
        passes=passes,
        changed_count=len(changed),
        changed=tuple(changed[:CHANGED_SHOWN_MAX]),
        sha256=out.sha256(),
    )
    out.add(
        {
            "end": True,
            "nodes": summary.nodes,
            "lines": summary.lines,
            "ledgers": summary.ledgers,
            "passes": passes,
            "changed_count": summary.changed_count,
            "changed": list(summary.changed),
            "settled": summary.settled,
            "sha256": summary.sha256,
        }
    )
    return summary


class _Lines:
    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._digest = hashlib.sha256()
        self.count = 0

    def add(self, facts: Mapping[str, Any]) -> None:
        line = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        self._write(line)
        self._digest.update(line)
        self.count += 1

    def sha256(self) -> str:
        return self._digest.hexdigest()


def _line_of(node: BackedUpNode) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": node.path,
        "version": node.version,
        "ctime_ms": node.ctime_ms,
        "mtime_ms": node.mtime_ms,
    }
    if node.data:
        facts["data"] = base64.b64encode(node.data).decode("ascii")
    if node.creates is not None:
        facts["creates"] = node.creates
    return facts


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup that was read completely and is valid. `nodes` returns its nodes."""

    instance_id: str
    at_ms: int
    ledgers_root: str
    roots: tuple[str, ...]
    summary: BackupSummary
    last_line_of: Mapping[str, int] = field(default_factory=dict)
    """Paths that occur in several lines, with the number of the line that counts."""

    def nodes(self, lines: Iterable[bytes]) -> list[BackedUpNode]:
        """Return the nodes, parents before children. `lines`: the same lines that were verified."""
        found: dict[str, BackedUpNode] = {}
        for number, line in enumerate(lines, 1):
            facts = json.loads(line)
            path = facts.get("path")
            if path is None or "gone" in facts or self.last_line_of.get(path, number) != number:
                continue
            found[path] = _node_of(facts)
        # A node of a later pass may come after its children; sorting puts parents first.
        return sorted(found.values(), key=lambda node: node.path)


def verify_backup(lines: Iterable[bytes]) -> Backup:
    """Read a backup once and verify all of it. Raises Corrupt (damaged, truncated), BadVersion, BadRequest (not a
    backup)."""
    digest = hashlib.sha256()
    header: dict[str, Any] | None = None
    trailer: dict[str, Any] | None = None
    last_line_of: dict[str, int] = {}
    state: dict[str, bool] = {}
    number = 0
    for number, line in enumerate(lines, 1):
        if trailer is not None:
            raise Corrupt("the backup contains lines after its trailer", line=number)
        facts = _parsed(line, number)
        if header is None:
            header = _checked_header(facts)
        elif "end" in facts:
            trailer = facts
            continue  # not part of its own digest
        else:
            path = facts.get("path")
            if not isinstance(path, str) or not path.startswith("/"):
                raise Corrupt("a line of the backup contains no valid path", line=number)
            if path in state:
                last_line_of[path] = number
            state[path] = "gone" not in facts
        digest.update(line)
    if header is None:
        raise BadRequest("the file is empty: not a backup")
    if trailer is None:
        raise Corrupt("the backup has no end: it was cut off, or is still being written", lines=number)
    summary = _checked_trailer(trailer, digest.hexdigest(), lines=number - 1, nodes=sum(state.values()))
    return Backup(
        header["instance_id"], header["at_ms"], header["ledgers_root"], tuple(header["roots"]), summary, last_line_of
    )


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    try:
        facts = json.loads(line)
    except ValueError as error:
        if number == 1:
            raise BadRequest("not a backup of a cluster's metadata") from error
        raise Corrupt("a line of the backup cannot be read", line=number) from error
    if not isinstance(facts, dict):
        raise Corrupt("a line of the backup cannot be read", line=number)
    return facts


def _checked_header(facts: dict[str, Any]) -> dict[str, Any]:
    if facts.get("format") != BACKUP_FORMAT:
        raise BadRequest("not a backup of a cluster's metadata")
    if facts.get("version") != BACKUP_VERSION:
        raise BadVersion(
            "the backup has an unknown format version; use a newer version of this command",
            version=facts.get("version"),
            known=BACKUP_VERSION,
        )
    wanted = {"instance_id": str, "at_ms": int, "ledgers_root": str, "roots": list}
    if any(not isinstance(facts.get(name), kind) for name, kind in wanted.items()):
        raise Corrupt("the backup's header is incomplete or invalid")
    return facts


def _checked_trailer(facts: dict[str, Any], sha256: str, *, lines: int, nodes: int) -> BackupSummary:
    if facts.get("sha256") != sha256 or facts.get("lines") != lines or facts.get("nodes") != nodes:
        raise Corrupt(
            "the backup is damaged: its checksum or its number of lines does not agree",
            lines=lines,
            lines_expected=facts.get("lines"),
            sha256=sha256,
            sha256_expected=facts.get("sha256"),
        )
    return BackupSummary(
        nodes=nodes,
        lines=lines,
        ledgers=facts["ledgers"],
        passes=facts["passes"],
        changed_count=facts["changed_count"],
        changed=tuple(facts["changed"]),
        sha256=sha256,
    )


def _node_of(facts: Mapping[str, Any]) -> BackedUpNode:
    return BackedUpNode(
        facts["path"],
        base64.b64decode(facts.get("data", "")),
        facts["version"],
        facts["ctime_ms"],
        facts["mtime_ms"],
        facts.get("creates"),
    )

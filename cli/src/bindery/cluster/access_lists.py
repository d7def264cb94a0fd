"""Implement `bindery cluster acls`: show the access lists of a cluster's nodes in ZooKeeper, and replace them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bindery_core.errors import BadRequest, Conflict, NoSuchNode
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.access_lists import Credential, Kind, NewNodes
from bindery_metadata.stores.zookeeper_access import variable_of
from bindery_recovery.access_lists import UNREADABLE, Applied, Survey, apply, survey

from bindery.common import exit_codes
from bindery.common.operator import connected_store
from bindery.common.output import emit
from bindery.common.progress import Progress
from bindery.common.tables import table

if TYPE_CHECKING:
    from bindery_metadata.stores.zookeeper import ZooKeeperStore

KINDS = (*Kind, UNREADABLE)


async def run_show(zookeeper: str, ledgers_root: str, *, rate: float, as_json: bool) -> int:
    """Print the counts and return the exit code. Raises NoSuchNode if there is no cluster."""
    async with connected_store(zookeeper) as store:
        layout = LedgersLayout(ledgers_root)
        found = await _survey(store, layout, rate=rate, is_quiet=as_json)
    emit(_facts(found), _lines(found), as_json=as_json)
    return exit_codes.OK


async def run_apply(
    zookeeper: str,
    ledgers_root: str,
    new_nodes: NewNodes,
    *,
    rate: float,
    dry_run: bool,
    yes: bool,
    allow_open_sessions: bool,
    as_json: bool,
) -> int:
    """Replace the lists if `yes` and not `dry_run`; print what changed or would change; return the exit code.

    Raises BadRequest without credentials, Conflict if processes are connected that may have none.
    """
    async with connected_store(zookeeper) as store:
        layout = LedgersLayout(ledgers_root)
        credentials = store.access.presented.credentials
        if not credentials:
            raise BadRequest(
                "access lists cannot be changed without credentials for ZooKeeper: set "
                f"{variable_of('credentials_file')} to a file with user:password"
            )
        found = await _survey(store, layout, rate=rate, is_quiet=as_json)
        if new_nodes is not NewNodes.OPEN and found.open_sessions_count and not allow_open_sessions and not dry_run:
            raise Conflict(
                "nothing was changed: processes are connected that create open nodes. They lose access if they have no "
                "credentials. Set credentials_file and new_nodes on them, or pass --allow-open-sessions if they have "
                "credentials",
                open_nodes=found.open_sessions_count,
                for_example=", ".join(found.open_sessions[:3]),
            )
        pending = found.nodes - found.count(new_nodes.value) - found.count(Kind.OTHER) - found.count(UNREADABLE)
        if dry_run or not yes:
            lines = [*_lines(found), f"would replace {pending} lists; nothing was changed"]
            if not dry_run:
                lines.append("to change them, repeat the command with --yes")
            emit({"applied": False, "pending": pending, **_facts(found)}, lines, as_json=as_json)
            return exit_codes.OK if dry_run else exit_codes.FAILURE
        done = await _apply(store, layout, credentials, new_nodes, found.nodes, rate=rate, is_quiet=as_json)
    return _print_applied(done, new_nodes, as_json=as_json)


def _print_applied(done: Applied, new_nodes: NewNodes, *, as_json: bool) -> int:
    left = done.survey.nodes - done.survey.count(new_nodes.value)
    facts = {"applied": True, "replaced": done.replaced, "passes": done.passes, "settled": done.is_settled}
    lines = [
        f"replaced {done.replaced} access lists by `{new_nodes.value}` in {done.passes} passes",
        *_lines(done.survey),
    ]
    if not done.is_settled:
        lines.append("other processes still create nodes with other lists: set new_nodes on them, and run this again")
    elif left:
        lines.append(
            f"{left} nodes were left as they are: their lists name identities that are not in the credentials file, or "
            "do not allow these credentials to replace them"
        )
    emit({**facts, **_facts(done.survey)}, lines, as_json=as_json)
    return exit_codes.OK if done.is_settled and not left else exit_codes.FAILURE


async def _survey(store: "ZooKeeperStore", layout: LedgersLayout, *, rate: float, is_quiet: bool) -> Survey:
    progress = Progress(is_quiet=is_quiet)
    try:
        found = await survey(
            store,
            layout,
            store.access.presented.credentials,
            rate=rate,
            progress=lambda nodes: progress.show(f"read {nodes} access lists"),
        )
    finally:
        progress.clear()
    if not found.nodes:
        raise NoSuchNode(f"no cluster is initialized at {layout.root}: run `bindery cluster init`")
    return found


async def _apply(
    store: "ZooKeeperStore",
    layout: LedgersLayout,
    credentials: Sequence[Credential],
    new_nodes: NewNodes,
    nodes: int,
    *,
    rate: float,
    is_quiet: bool,
) -> Applied:
    progress = Progress(nodes, "nodes", is_quiet=is_quiet)
    try:
        return await apply(
            store, layout, credentials, new_nodes, rate=rate, progress=lambda done: progress.update(min(done, nodes))
        )
    finally:
        progress.clear()


def _facts(found: Survey) -> dict[str, Any]:
    return {
        "nodes": found.nodes,
        "totals": {str(kind): found.count(kind) for kind in KINDS},
        "roots": {root: {str(kind): counts[kind] for kind in KINDS} for root, counts in found.counts.items()},
        "open_session_nodes": found.open_sessions_count,
        "open_sessions": found.open_sessions,
        "examples": {str(kind): paths for kind, paths in found.examples.items()},
    }


def _lines(found: Survey) -> list[str]:
    rows = [
        {"root": root, "nodes": counts.total(), **{str(kind): counts[kind] for kind in KINDS}}
        for root, counts in found.counts.items()
    ]
    rows.append({"root": "total", "nodes": found.nodes, **{str(kind): found.count(kind) for kind in KINDS}})
    lines = table(rows, columns=("root", "nodes", *map(str, KINDS)))
    if 0 < found.count(Kind.OPEN) < found.nodes:
        lines.append(f"open, for example: {', '.join(found.examples[Kind.OPEN][:3])}")
    if found.open_sessions_count and found.count(Kind.OPEN) < found.nodes:
        lines.append(
            f"{found.open_sessions_count} open nodes belong to connected processes, for example "
            f"{', '.join(found.open_sessions[:3])}"
        )
    lines += [
        f"{kind}, for example: {', '.join(found.examples[kind][:3])}"
        for kind in (Kind.OTHER, UNREADABLE)
        if found.count(kind)
    ]
    return lines

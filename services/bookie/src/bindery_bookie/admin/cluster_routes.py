"""Routes about the cluster.

| path                            | parameters               | response                                   |
|---------------------------------|--------------------------|--------------------------------------------|
| /api/v1/bookie/list_bookies     | type=rw (default) or ro; | `{bookie id: null or hostname}`            |
|                                 | print_hostnames          |                                            |
| /api/v1/bookie/list_bookie_info |                          | `{bookie id: text, "ClusterInfo: ": text}` |
| /api/v1/bookie/cluster_info     |                          | BookKeeper's eight members                 |

list_bookie_info queries every writable bookie. Bookies that do not answer are left out, as in BookKeeper.
Source: BookKeeper's ListBookiesService, ListBookieInfoService, ClusterInfoService.
"""

import asyncio
import math
from typing import Any, Final

from bindery_core.errors import BadRequest, Corrupt, NoSuchNode, NotThere
from bindery_core.formats import bookie_service_info
from bindery_core.ids import validate_bookie_id
from bindery_kit.admin.http import Answer, Request, Route, json_answer
from bindery_metadata.cluster import cluster_status
from bindery_metadata.coordination.election import current_auditor
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.underreplication import has_marks
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.admin.context import AdminContext


async def _list_bookies(context: AdminContext, request: Request) -> Answer:
    kind = request.query.get("type", "rw")
    if kind not in ("rw", "ro"):
        raise BadRequest("type must be rw or ro", found=kind[:100])
    store, layout = context.metadata_store(), context.layout
    status = await cluster_status(store, layout)
    bookies = status.read_only if kind == "ro" else status.writable
    if not request.flag("print_hostnames"):
        return json_answer(dict.fromkeys(sorted(bookies)))
    hosts = await asyncio.gather(*(_host(store, layout, name, read_only=kind == "ro") for name in sorted(bookies)))
    return json_answer(dict(zip(sorted(bookies), hosts, strict=True)))


async def _host(store: MetadataStore, layout: LedgersLayout, name: str, *, read_only: bool) -> str | None:
    try:
        bookie_id = validate_bookie_id(name)
        node = await store.get(layout.bookie(bookie_id, read_only=read_only))
        address = bookie_service_info.decode(node.data, bookie_id=bookie_id).rpc_address()
    except (NoSuchNode, Corrupt):  # the other bookies are still listed
        return None
    return address[0] if address else None


async def _list_bookie_info(context: AdminContext, request: Request) -> Answer:
    client = await context.client()
    spaces = await client.disk_spaces()
    if not spaces:
        raise NotThere("no bookie reported its free space")
    answer = {
        str(bookie_id): f": {{Free: {_bytes(free)}, Total: {_bytes(total)}}},"
        for bookie_id, (total, free) in sorted(spaces.items())
    }
    all_total, all_free = (sum(space[at] for space in spaces.values()) for at in (0, 1))
    answer["ClusterInfo: "] = f"{{Free: {_bytes(all_free)}, Total: {_bytes(all_total)}}}"
    return json_answer(answer)


def _bytes(number: int) -> str:
    """Return a size as BookKeeper formats it, `1536(1.536KB)`: units of 1000, three decimals, rounded down."""
    shown, unit = float(number), ""
    for larger in ("KB", "MB", "GB", "TB"):
        if shown < 1000:
            break
        shown, unit = shown / 1000, larger
    return f"{number}({math.floor(shown * 1000) / 1000:.12g}{unit})" if unit else str(number)


async def _cluster_info(context: AdminContext, request: Request) -> Answer:
    store, layout = context.metadata_store(), context.layout
    status = await cluster_status(store, layout)
    auditor = await current_auditor(store, layout) or ""
    answer: dict[str, Any] = {
        "auditorElected": bool(auditor),
        "auditorId": auditor,
        "clusterUnderReplicated": await has_marks(store, layout),
        "ledgerReplicationEnabled": await store.exists(layout.replication_disabled) is None,
        "totalBookiesCount": len(status.known),
        "writableBookiesCount": len(status.writable),
        "readonlyBookiesCount": len(status.read_only),
        "unavailableBookiesCount": len(status.known) - len(status.writable) - len(status.read_only),
    }
    return json_answer(answer)


ROUTES: Final = (
    Route("GET", "/api/v1/bookie/list_bookies", _list_bookies),
    Route("GET", "/api/v1/bookie/list_bookie_info", _list_bookie_info, is_heavy=True),
    Route("GET", "/api/v1/bookie/cluster_info", _cluster_info, is_heavy=True),
)

"""Routes about the journal, entry logs, index and garbage collection of this bookie, under BookKeeper's paths.

| path                                  | method | parameters, body                        | response                |
|---------------------------------------|--------|-----------------------------------------|-------------------------|
| /api/v1/bookie/last_log_mark          | GET    |                                         | one member per journal  |
| /api/v1/bookie/list_disk_file         | GET    | file_type=journal, entrylog, index      | names, a tab after each |
| /api/v1/bookie/expand_storage         | PUT    |                                         | 501                     |
| /api/v1/bookie/gc                     | GET    |                                         | `{"is_in_force_gc"}`    |
|                                       | PUT    | empty or `{"forceMajor", "forceMinor"}` | JSON text               |
| /api/v1/bookie/gc_details             | GET    |                                         | one object per shard    |
| /api/v1/bookie/gc/suspend_compaction  | GET    |                                         | two members, as text    |
|                                       | PUT    | `{"suspendMajor", "suspendMinor"}`      | JSON text               |
| /api/v1/bookie/gc/resume_compaction   | PUT    | `{"resumeMajor", "resumeMinor"}`        | JSON text               |
| /api/v1/bookie/entry_location_compact | GET    |                                         | `{index path: running}` |
|                                       | PUT    | `{"entryLocationRocksDBCompact": true}` | JSON text               |

A second member `entryLocations` names the indexes to compact by their paths, joined by commas; without it all are
compacted. The index is LevelDB, although the names contain RocksDB. File names of several directories are in one list,
as in BookKeeper. "In force GC": a requested run is in progress or about to begin.
Source: BookKeeper's GetLastLogMarkService, ListDiskFilesService, TriggerGCService, GCDetailsService,
SuspendCompactionService, ResumeCompactionService, TriggerLocationCompactService.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bindery_core.errors import BadRequest, NotThere
from bindery_kit.admin.http import Answer, Request, Route, boolean, json_answer, problem

from bindery_bookie.admin.context import AdminContext, Shard
from bindery_bookie.storage.collection.collection_interface import CollectionKind, GarbageCollection
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.mark import read_mark

T = TypeVar("T")

FILE_TYPES: Final = ("journal", "entrylog", "index")
"""Values of the parameter `file_type`; any other value lists all of them."""


class NoGarbageCollection(NotThere):
    """Garbage collection does not run, for example because the storage is not open yet."""

    code = "no_garbage_collection"


async def _last_log_mark(context: AdminContext, request: Request) -> Answer:
    shards = context.shards()
    marks = await _in_thread(lambda: [read_mark(context.disk, shard.ledger_path) for shard in shards])
    answer: dict[str, str] = {}
    for at, mark in enumerate(marks):
        if mark is not None:
            name = f"LastLogMark: Journal Id - {mark.journal.journal_id}({mark.journal.journal_id:x}.txn)"
            answer[f"{name} of shard {at}" if name in answer else name] = f"Pos - {mark.journal.offset}"
    return json_answer(answer)


async def _list_disk_file(context: AdminContext, request: Request) -> Answer:
    kind = request.query.get("file_type", "")
    kinds = (kind,) if kind in FILE_TYPES else FILE_TYPES
    shards = context.shards()

    def list_all() -> dict[str, str]:
        places = {
            "journal": ([shard.journal_path for shard in shards], journal_format.FILE_SUFFIX),
            "entrylog": ([shard.ledger_path for shard in shards], entry_log_format.FILE_SUFFIX),
            "index": ([shard.index_path for shard in shards], ""),
        }
        return {f"{kind} files": "".join(f"{name}\t" for name in _names(context.disk, *places[kind])) for kind in kinds}

    return json_answer(await _in_thread(list_all))


def _names(disk: Disk, directories: Sequence[str], suffix: str) -> list[str]:
    return sorted(name for path in directories for name in disk.list_names(path) if name.endswith(suffix))


async def _expand_storage(context: AdminContext, request: Request) -> Answer:
    return problem(
        501,
        "not_supported",
        "directories cannot be added to a bookie: the id of a ledger and the number of directories determine its "
        "directory. Start another bookie on the new disk, and retire this one if it is to be replaced",
    )


# --- garbage collection ------------------------------------------------------------------------------------------


def collectors(context: AdminContext) -> list[GarbageCollection]:
    """Return the collector of each shard. Raises NoGarbageCollection."""
    found = [shard.collector for shard in context.shards()]
    if not found or any(one is None for one in found):
        raise NoGarbageCollection("garbage collection does not run in this bookie")
    return [one for one in found if one is not None]


async def _gc(context: AdminContext, request: Request) -> Answer:
    collectors(context)
    return json_answer({"is_in_force_gc": _text(any(shard.is_gc_forced for shard in context.shards()))})


async def _force_gc(context: AdminContext, request: Request) -> Answer:
    major, minor = _switches(request.json_object(may_be_empty=True), "forceMajor", "forceMinor")
    for collector, shard in zip(collectors(context), context.shards(), strict=True):
        state = collector.state()
        shard.force_gc(
            minor=not state.minor_suspended if minor is None else minor,
            major=not state.major_suspended if major is None else major,
        )
    return json_answer(f"Triggered GC on BookieServer: {context.bookie_id}")


async def _gc_details(context: AdminContext, request: Request) -> Answer:
    return json_answer([_details(shard) for shard in context.shards()])


def _details(shard: Shard) -> dict[str, Any]:
    if shard.collector is None:
        raise NoGarbageCollection("garbage collection does not run in this bookie")
    state = shard.collector.state()
    return {
        "forceCompacting": shard.is_gc_forced,
        "majorCompacting": state.running is CollectionKind.MAJOR,
        "minorCompacting": state.running is CollectionKind.MINOR,
        "lastMajorCompactionTime": state.last_major_ms,
        "lastMinorCompactionTime": state.last_minor_ms,
        "lastEntryLocationCompactionTime": shard.last_index_compaction_ms,
        "majorCompactionCounter": shard.stats.compactions_major,
        "minorCompactionCounter": shard.stats.compactions_minor,
        "entryLocationCompactionCounter": shard.stats.index_compactions,
    }


async def _suspended(context: AdminContext, request: Request) -> Answer:
    states = [one.state() for one in collectors(context)]
    return json_answer(
        {
            "isMajorGcSuspended": _text(all(state.major_suspended for state in states)),
            "isMinorGcSuspended": _text(all(state.minor_suspended for state in states)),
        }
    )


async def _suspend(context: AdminContext, request: Request) -> Answer:
    return _switch(context, request, "suspend", lambda one: one.suspend)


async def _resume(context: AdminContext, request: Request) -> Answer:
    return _switch(context, request, "resume", lambda one: one.resume)


def _switch(
    context: AdminContext, request: Request, verb: str, method: Callable[[GarbageCollection], Callable[..., None]]
) -> Answer:
    major, minor = _switches(request.json_object(), f"{verb}Major", f"{verb}Minor")
    if major is None and minor is None:
        raise BadRequest(f"No {verb}Major or {verb}Minor params found")
    for collector in collectors(context):
        method(collector)(minor=bool(minor), major=bool(major))
    done = [
        f"{verb.capitalize()} {kind}GC on BookieServer: {context.bookie_id}"
        for kind, wanted in (("major", major), ("minor", minor))
        if wanted
    ]
    return json_answer(", ".join(done))


def _switches(body: Mapping[str, Any], *known: str) -> list[bool | None]:
    """Return the value of each of `known`; None: absent or null.

    Raises BadRequest, also for an unknown member. BookKeeper ignores unknown members, so that a misspelled
    `"forceMajor": false` requests a major compaction.
    """
    for name, value in body.items():
        wrong = {"member": name[:100], "known": ", ".join(known)}
        if name not in known:
            raise BadRequest("there is no such member", **wrong)
        if value is not None and not isinstance(value, bool):
            raise BadRequest("a member must be true or false", **wrong)
    return [body.get(name) for name in known]


# --- the index ---------------------------------------------------------------------------------------------------


async def _index_compactions(context: AdminContext, request: Request) -> Answer:
    return json_answer({shard.index_path: shard.is_index_compacting for shard in context.shards()})


async def _compact_index(context: AdminContext, request: Request) -> Answer:
    body = request.json_object()
    if not boolean(body, "entryLocationRocksDBCompact", default=False):
        return json_answer("Not trigger Entry Location RocksDB compact.")
    text = body.get("entryLocations", "")
    if not isinstance(text, str):
        raise BadRequest("entryLocations must be text: paths joined by commas", member="entryLocations")
    shards = {shard.index_path: shard for shard in context.shards()}
    wanted = {path.strip() for path in text.split(",") if path.strip()} or set(shards)
    if not wanted <= set(shards):
        raise BadRequest(
            f"Specified trigger compact entryLocations: {text[:1000]} is invalid. "
            f"Bookie entry location RocksDB path: {','.join(sorted(shards))}."
        )
    for path in sorted(wanted):
        shards[path].compact_index()
    named = ",".join(sorted(wanted))
    return json_answer(f"Triggered entry Location RocksDB: {named} compact on bookie:{context.bookie_id}.")


def _text(value: bool) -> str:
    return "true" if value else "false"


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work`, which reads files, in a thread, because a disk may be slow."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


ROUTES: Final = (
    Route("GET", "/api/v1/bookie/last_log_mark", _last_log_mark),
    Route("GET", "/api/v1/bookie/list_disk_file", _list_disk_file),
    Route("PUT", "/api/v1/bookie/expand_storage", _expand_storage, during_start=True),
    Route("GET", "/api/v1/bookie/gc", _gc),
    Route("PUT", "/api/v1/bookie/gc", _force_gc),
    Route("GET", "/api/v1/bookie/gc_details", _gc_details),
    Route("GET", "/api/v1/bookie/gc/suspend_compaction", _suspended),
    Route("PUT", "/api/v1/bookie/gc/suspend_compaction", _suspend),
    Route("PUT", "/api/v1/bookie/gc/resume_compaction", _resume),
    Route("GET", "/api/v1/bookie/entry_location_compact", _index_compactions),
    Route("PUT", "/api/v1/bookie/entry_location_compact", _compact_index),
)

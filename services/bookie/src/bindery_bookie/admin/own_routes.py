"""Routes that BookKeeper does not have: disks, entry logs, limbo, damage, scrub, fault injection.

| path                      | method           | response                                                              |
|---------------------------|------------------|-----------------------------------------------------------------------|
| /api/v1/bookie/disks      | GET              | state of each directory with the cause; readOnly and its reasons      |
| /api/v1/bookie/gc/state   | GET              | current and past work of garbage collection, by shard                 |
| /api/v1/bookie/gc/logs    | GET              | each entry log and its live part at the last scan; `look=true`: now   |
| /api/v1/bookie/gc/explain | GET              | what garbage collection will do with the `log`, and why, in sentences |
| /api/v1/bookie/ledgers    | GET              | runs `[first, last]` of ids of ledgers of which something is stored   |
| /api/v1/bookie/limbo      | GET              | whether storage was lost, ledgers left to repair, why one is stuck    |
| /api/v1/bookie/damage     | GET              | up to `limit` damaged places                                          |
| /api/v1/bookie/scrub      | GET, PUT         | what was verified; PUT `{"shard", "rate"}` begins a round now         |
| /api/v1/bookie/drill      | GET, PUT, DELETE | fault injection; PUT `{"rules": [...]}` replaces rules; 404 if off    |

`shard` restricts a response to one shard; a `log` is a decimal or 0x number or the name of a file.
The members of a response are the fields of the bookie's dataclasses in camelCase (`plain`). `...Ms` are milliseconds
since 1970; 0: never.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from bindery_core.errors import BadRequest, NotThere
from bindery_kit.admin.http import Answer, Request, Route, json_answer

from bindery_bookie.admin.context import DRILLS_SETTING, AdminContext, Shard
from bindery_bookie.admin.plain import plain
from bindery_bookie.admin.storage_routes import NoGarbageCollection
from bindery_bookie.storage.collection.collection_interface import GarbageCollection, NoSuchEntryLog
from bindery_bookie.storage.entry_log.entry_log_format import FILE_SUFFIX
from bindery_bookie.storage.io.fault_injection import DrillControl

DAMAGE_SHOWN_MAX: Final = 10_000
"""Maximum of the parameter `limit` of /api/v1/bookie/damage."""
SCRUB_RATE_MAX: Final = 100 * 2**30
"""Maximum of `rate` in bytes per second."""


class NoDrills(NotThere):
    """This bookie was started without fault injection."""

    code = "no_drills"


class NoScrub(NotThere):
    """The scrub does not run, for example because the storage is not open yet."""

    code = "no_scrub"


async def _disks(context: AdminContext, request: Request) -> Answer:
    directories = [{**plain(one), "isWritable": one.is_writable} for one in context.directories()]
    return json_answer(
        {"directories": directories, "readOnly": context.state.read_only, "reasons": context.state.reasons}
    )


# --- entry logs ---------------------------------------------------------------------------------------------------


def _chosen(context: AdminContext, request: Request) -> list[tuple[int, Shard]]:
    """Return (number, shard) of the shard that the parameter `shard` selects, or of all shards."""
    shards = list(enumerate(context.shards()))
    if "shard" not in request.query:
        return shards
    number = request.number("shard", high=max(len(shards) - 1, 0))
    return [shards[number]]


def _collector(shard: Shard) -> GarbageCollection:
    if shard.collector is None:
        raise NoGarbageCollection("garbage collection does not run in this bookie")
    return shard.collector


async def _gc_state(context: AdminContext, request: Request) -> Answer:
    return json_answer(
        {"shards": [{"shard": at, **plain(_collector(shard).state())} for at, shard in _chosen(context, request)]}
    )


async def _gc_logs(context: AdminContext, request: Request) -> Answer:
    look = request.flag("look")
    logs: list[Any] = []
    for at, shard in _chosen(context, request):
        collector = _collector(shard)
        found = await collector.refresh() if look else collector.logs()
        logs += [{"shard": at, **plain(one)} for one in found]
    return json_answer({"logs": logs})


async def _gc_explain(context: AdminContext, request: Request) -> Answer:
    log_id = _log_id(request)
    name = f"{log_id:x}{FILE_SUFFIX}"
    found = []
    for at, shard in _chosen(context, request):
        try:
            found.append((at, plain(await _collector(shard).explain(log_id))))
        except NoSuchEntryLog:
            continue
    if not found:
        raise NoSuchEntryLog("no such entry log", log=name, log_id=log_id)
    if len(found) > 1:
        shards = ",".join(str(at) for at, _ in found)
        raise BadRequest(
            "several shards have an entry log of that id: pass the parameter shard", log=name, shards=shards
        )
    [(at, answer)] = found
    return json_answer({"shard": at, **answer.pop("log"), **answer})


def _log_id(request: Request) -> int:
    """Return the log id in the parameter `log`: a number, or a file name, which is in hex."""
    text = request.query.get("log", "")
    if text.endswith(FILE_SUFFIX):
        try:
            return int(text.removesuffix(FILE_SUFFIX), 16)
        except ValueError:
            raise BadRequest(
                f"the name of an entry log is <hex>{FILE_SUFFIX}", parameter="log", found=text[:100]
            ) from None
    return request.number("log")


# --- ledgers, limbo, damage, scrub --------------------------------------------------------------------------------


async def _ledgers(context: AdminContext, request: Request) -> Answer:
    listed = await context.store.list_ledger_ids()
    return await asyncio.get_running_loop().run_in_executor(None, lambda: json_answer({"ledgers": _runs(listed)}))


def _runs(ledger_ids: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for ledger_id in ledger_ids:
        if runs and runs[-1][1] == ledger_id - 1:
            runs[-1][1] = ledger_id
        else:
            runs.append([ledger_id, ledger_id])
    return runs


async def _limbo(context: AdminContext, request: Request) -> Answer:
    shards = [
        {"shard": at, "inLimbo": shard.limbo is not None, **_limbo_of(shard)} for at, shard in _chosen(context, request)
    ]
    return json_answer(
        {
            "inLimbo": any(shard["inLimbo"] for shard in shards),
            "shards": shards,
            "repair": _repair(context),
        }
    )


def _repair(context: AdminContext) -> dict[str, Any] | None:
    state = context.repair()
    if state is None:
        return None
    problems = [
        {"ledgerId": ledger_id, "entryId": entry_id, "reason": why}
        for (ledger_id, entry_id), why in sorted(state.problems.items())
    ]
    return {**plain(replace(state, problems={})), "problems": problems}


def _limbo_of(shard: Shard) -> dict[str, Any]:
    state = shard.limbo
    if state is None:
        return {}
    return {
        "reason": state.reason,
        "phase": state.phase.value,
        "sinceMs": state.since_ms,
        "ledgersLeft": state.left,
        "ledgersListed": state.listed,
        "problems": [{"ledgerId": ledger_id, "reason": why} for ledger_id, why in sorted(state.problems.items())],
    }


async def _damage(context: AdminContext, request: Request) -> Answer:
    limit = request.number("limit", 1000, low=0, high=DAMAGE_SHOWN_MAX)
    register = context.damage
    items = list(register.items()) if register is not None else []
    return json_answer(
        {
            "count": len(items),
            "found": register.found_count if register is not None else 0,
            "healed": register.healed_count if register is not None else 0,
            "notKept": register.overflow_count if register is not None else 0,
            "damage": plain(items[:limit]),
        }
    )


async def _scrub(context: AdminContext, request: Request) -> Answer:
    shards = []
    for at, shard in _chosen(context, request):
        if shard.scrubber is None:
            raise NoScrub("scrub does not run in this bookie")
        state = plain(shard.scrubber.state())
        shards.append({"shard": at, **state, "quarantined": plain(shard.scrubber.regions())})
    return json_answer({"shards": shards})


async def _begin_scrub(context: AdminContext, request: Request) -> Answer:
    body = request.json_object(may_be_empty=True, only=("shard", "rate"))
    shards = context.shards()
    number, rate = body.get("shard"), body.get("rate")
    if number is not None and (type(number) is not int or not 0 <= number < len(shards)):
        raise BadRequest(f"shard must be in 0..{len(shards) - 1}", member="shard")
    if rate is not None and (type(rate) is not int or not 0 < rate <= SCRUB_RATE_MAX):
        raise BadRequest(f"rate must be bytes per second in 1..{SCRUB_RATE_MAX}", member="rate")
    for at, shard in enumerate(shards):
        if shard.scrubber is None:
            raise NoScrub("scrub does not run in this bookie")
        if number is None or number == at:
            shard.scrubber.request(rate=rate)
    return await _scrub(context, request)


# --- fault injection ----------------------------------------------------------------------------------------------


def _control(context: AdminContext) -> DrillControl:
    if context.drills is None:
        raise NoDrills(f"fault injection is disabled: start the bookie with {DRILLS_SETTING}")
    return context.drills


async def _drills(context: AdminContext, request: Request) -> Answer:
    return json_answer({"drills": plain(_control(context).states())})


async def _set_drills(context: AdminContext, request: Request) -> Answer:
    control = _control(context)
    rules = request.json_object(only=("rules",)).get("rules")
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise BadRequest('the body must be {"rules": ["datasync *.txn delay 0.2", ...]}')
    control.set_rules(rules)
    return await _drills(context, request)


async def _clear_drills(context: AdminContext, request: Request) -> Answer:
    _control(context).clear()
    return await _drills(context, request)


ROUTES: Final = (
    Route("GET", "/api/v1/bookie/disks", _disks, during_start=True),
    Route("GET", "/api/v1/bookie/gc/state", _gc_state),
    Route("GET", "/api/v1/bookie/gc/logs", _gc_logs, is_heavy=True),
    Route("GET", "/api/v1/bookie/gc/explain", _gc_explain, is_heavy=True),
    Route("GET", "/api/v1/bookie/ledgers", _ledgers, is_heavy=True),
    Route("GET", "/api/v1/bookie/limbo", _limbo, during_start=True),
    Route("GET", "/api/v1/bookie/damage", _damage, during_start=True),
    Route("GET", "/api/v1/bookie/scrub", _scrub),
    Route("PUT", "/api/v1/bookie/scrub", _begin_scrub),
    Route("GET", "/api/v1/bookie/drill", _drills, during_start=True),
    Route("PUT", "/api/v1/bookie/drill", _set_drills, during_start=True),
    Route("DELETE", "/api/v1/bookie/drill", _clear_drills, during_start=True),
)

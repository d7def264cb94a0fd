"""Routes about the bookie itself: liveness, settings, state, and a check that it works.

| path                          | method   | response                                                                  |
|-------------------------------|----------|---------------------------------------------------------------------------|
| /heartbeat                    | GET      | text `OK`                                                                 |
| /api/v1/config/server_config  | GET      | every setting as text, secrets masked                                     |
| /api/v1/bookie/info           | GET      | `{"freeSpace", "totalSpace"}`, bytes                                      |
| /api/v1/bookie/state          | GET      | running, readOnly, shuttingDown, availableForHighPriorityWrites, and      |
|                               |          | membership (*): intent, sinceMs, untilMs, reason, by                      |
| /api/v1/bookie/state/readonly | GET, PUT | `{"readOnly"}`, reasons (*); PUT sets or clears the operator's reason     |
| /api/v1/bookie/is_ready       | GET      | text `OK`, or 503 with the reasons                                        |
| /api/v1/bookie/sanity         | GET      | `{"passed", "readOnly"}`, reason (*) of a failure; guarded                |

(*) BookKeeper does not have these members. Settings are read once, at the start, so a PUT to them is answered with 405.
Source: BookKeeper's ConfigurationService, BookieInfoService, BookieStateService, BookieSanityService and related ones.
"""

from typing import Any, Final

from bindery_core.errors import BadRequest, BinderyError
from bindery_kit.admin.http import Answer, Request, Route, boolean, json_answer, text_answer

from bindery_bookie.admin.context import AdminContext
from bindery_bookie.admin.sanity import check_sanity
from bindery_bookie.state import READ_ONLY_ADMIN


async def _heartbeat(context: AdminContext, request: Request) -> Answer:
    return text_answer("OK\n")


async def _server_config(context: AdminContext, request: Request) -> Answer:
    return json_answer(dict(context.settings()))


async def _info(context: AdminContext, request: Request) -> Answer:
    total, free = context.store.disk_usage()
    return json_answer({"freeSpace": free, "totalSpace": total})


async def _state(context: AdminContext, request: Request) -> Answer:
    state = context.state
    return json_answer(
        {
            "running": state.running,
            "readOnly": state.read_only,
            "shuttingDown": state.shutting_down,
            "availableForHighPriorityWrites": state.accepts_add(priority=1),
            "membership": dict(state.membership),
        }
    )


async def _read_only(context: AdminContext, request: Request) -> Answer:
    return json_answer({"readOnly": context.state.read_only, "reasons": context.state.reasons})


async def _set_read_only(context: AdminContext, request: Request) -> Answer:
    wanted = boolean(request.json_object(), "readOnly")
    if wanted is None:
        raise BadRequest('the body must be {"readOnly": true} or {"readOnly": false}')
    context.state.set_read_only(READ_ONLY_ADMIN, "set by an operator" if wanted else None)
    return await _read_only(context, request)


async def _is_ready(context: AdminContext, request: Request) -> Answer:
    health = context.health
    return text_answer("OK") if health.is_ready else json_answer({"reasons": health.reasons}, 503)


async def _sanity(context: AdminContext, request: Request) -> Answer:
    answer: dict[str, Any] = {"passed": False, "readOnly": context.state.read_only}
    if context.state.read_only:
        answer["reason"] = "read-only: " + "; ".join(context.state.reasons.values())
        return json_answer(answer)
    try:
        await check_sanity(context)
        answer["passed"] = True
    except (BinderyError, OSError) as error:
        answer["reason"] = str(error)
    return json_answer(answer)


ROUTES: Final = (
    Route("GET", "/heartbeat", _heartbeat, during_start=True),
    Route("GET", "/api/v1/config/server_config", _server_config, during_start=True),
    Route("GET", "/api/v1/bookie/info", _info),
    Route("GET", "/api/v1/bookie/state", _state, during_start=True),
    Route("GET", "/api/v1/bookie/state/readonly", _read_only, during_start=True),
    Route("PUT", "/api/v1/bookie/state/readonly", _set_read_only, during_start=True),
    Route("GET", "/api/v1/bookie/is_ready", _is_ready, during_start=True),
    Route("GET", "/api/v1/bookie/sanity", _sanity, is_guarded=True, is_heavy=True, get_changes=True),
)

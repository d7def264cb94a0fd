"""Routes about a suspected rollback of the metadata (`maintenance.rollback_guard`).

| path                       | method | response                                                                       |
|----------------------------|--------|--------------------------------------------------------------------------------|
| /api/v1/bookie/gc/rollback | GET    | `ok` or `metadata_rollback_suspected` at the last check, and all reports       |
|                            | PUT    | `{"accept": true, "version": N}` accepts the metadata as it is, on all bookies |

`version` is the one in the response of GET. If the reports have changed since, the response is 409: nothing was
accepted. After the acceptance, all bookies delete the ledgers that the metadata does not contain: `missing` of each
report, as far as it was counted. `...Ms` are milliseconds since 1970; 0: never.
"""

from typing import Any, Final

from bindery_core.errors import BadRequest, Conflict, MetadataUnavailable
from bindery_kit.admin.http import Answer, Request, Route, json_answer

from bindery_bookie.admin.context import AdminContext
from bindery_bookie.admin.plain import plain
from bindery_bookie.maintenance.rollback_guard import RollbackState


def _facts(state: RollbackState) -> dict[str, Any]:
    return {
        "state": state.name,
        "sinceMs": state.since_ms,
        "checkedMs": state.checked_ms,
        "version": state.version,
        "reports": plain(state.reports),
    }


async def _state(context: AdminContext, request: Request) -> Answer:
    guard = context.guard()
    return json_answer(_facts(RollbackState() if guard is None else guard.state))


async def _accept(context: AdminContext, request: Request) -> Answer:
    body = request.json_object(only=("accept", "version"))
    version = body.get("version")
    if body.get("accept") is not True or type(version) is not int:
        raise BadRequest('the body must be {"accept": true, "version": N} with the version that GET returns')
    guard = context.guard()
    if guard is None:
        raise MetadataUnavailable("the bookie has not joined its cluster yet")
    try:
        before = await guard.accept(version=version, by=f"HTTP API of bookie {context.bookie_id}")
    except Conflict:
        guard.request()  # so that GET returns the present reports
        raise
    return json_answer({"accepted": plain(before.reports), "state": guard.state.name})


ROUTES: Final = (
    Route("GET", "/api/v1/bookie/gc/rollback", _state, during_start=True),
    Route("PUT", "/api/v1/bookie/gc/rollback", _accept, is_cluster_wide=True),
)

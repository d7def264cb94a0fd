"""BookKeeper's routes `/api/v1/autorecovery/...`, for the admin port of an auditor or, as in BookKeeper, of a bookie.

| path                         | method | parameters, body         | answer                          |
|------------------------------|--------|--------------------------|---------------------------------|
| status                       | GET    |                          | `{"enabled": bool}`             |
|                              | PUT    | enabled=true or false    | the same, after the change      |
| list_under_replicated_ledger | GET    | missingreplica,          | ledger ids; 404: none;          |
|                              |        | excludingmissingreplica, | `{id: [replica]}` with          |
|                              |        | printmissingreplica      | printmissingreplica             |
| who_is_auditor               | GET    |                          | text `Auditor: <id>`; 404: none |
| trigger_audit                | PUT    |                          | text                            |
| lost_bookie_recovery_delay   | GET    |                          | text; 404: no auditor led yet   |
|                              | PUT    | `{"delay_seconds": int}` | text                            |
| bookie                       | PUT    | `{"bookie_src": [id],`   | text; continues in background   |
|                              |        | `"delete_cookie": bool}` |                                 |
| decommission                 | PUT    | `{"bookie_src": id,`     | the same                        |
|                              |        | `"delete_cookie": bool}` |                                 |

BookKeeper answers any error with 404 and a text; these routes answer with the status of the error and a problem.
`bookie` and `decommission` are equivalent: they declare an absent bookie permanently lost and have its ledgers copied.
The bookie is then refused if it returns, until `bindery bookie drain ID --cancel`. Both are refused while the bookie is
registered; BookKeeper's `bookie` also empties a running bookie, which is a drain here. Source: BookKeeper's HttpRouter,
AutoRecoveryStatusService, ListUnderReplicatedLedgerService, WhoIsAuditorService, TriggerAuditService,
LostBookieRecoveryDelayService, RecoveryBookieService, DecommissionService.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from bindery_core.errors import BadRequest
from bindery_core.ids import validate_bookie_id
from bindery_kit.admin.http import Answer, Request, Route, boolean, json_answer, problem, text_answer

if TYPE_CHECKING:
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

ROOT: Final = "/api/v1/autorecovery"


class HasRecoveryAdmin(Protocol):
    """The part of a service's context that these routes use."""

    async def recovery_admin(self) -> "RecoveryAdmin":
        """Raises MetadataUnavailable until the metadata store is connected."""
        ...


async def _status(context: HasRecoveryAdmin, request: Request) -> Answer:
    return json_answer({"enabled": await (await context.recovery_admin()).is_enabled()})


async def _set_status(context: HasRecoveryAdmin, request: Request) -> Answer:
    if "enabled" not in request.query:
        raise BadRequest("the parameter enabled is missing", parameter="enabled")
    admin = await context.recovery_admin()
    if request.flag("enabled"):
        await admin.resume()
    else:
        await admin.pause("requested over HTTP")
    return await _status(context, request)


async def _marked(context: HasRecoveryAdmin, request: Request) -> Answer:
    missing, without = request.query.get("missingreplica"), request.query.get("excludingmissingreplica")
    found = {
        mark.ledger_id: mark.replicas
        async for mark in (await context.recovery_admin()).marks.list()
        if (not missing or missing in mark.replicas) and not (without and without in mark.replicas)
    }
    if not found:
        return text_answer("No under replicated ledgers found", 404)
    if request.flag("printmissingreplica"):
        return json_answer({str(ledger_id): list(replicas) for ledger_id, replicas in found.items()})
    return Answer(200, "application/json", json.dumps([int(ledger_id) for ledger_id in found]).encode() + b"\n")


async def _auditor(context: HasRecoveryAdmin, request: Request) -> Answer:
    name = await (await context.recovery_admin()).auditor()
    return text_answer(f"Auditor: {name}") if name else text_answer("No auditor elected", 404)


async def _trigger_audit(context: HasRecoveryAdmin, request: Request) -> Answer:
    await (await context.recovery_admin()).trigger_audit()
    return text_answer("Success trigger audit.")


async def _delay(context: HasRecoveryAdmin, request: Request) -> Answer:
    seconds = await (await context.recovery_admin()).marks.lost_bookie_delay_s()
    if seconds is None:
        return problem(404, "no_auditor", "no delay is set: the first auditor that becomes leader sets it")
    return text_answer(f"lostBookieRecoveryDelay value: {seconds}")


async def _set_delay(context: HasRecoveryAdmin, request: Request) -> Answer:
    seconds = request.json_object().get("delay_seconds")
    if type(seconds) is not int:
        raise BadRequest('the body must be {"delay_seconds": <whole number>}')
    await (await context.recovery_admin()).marks.set_lost_bookie_delay_s(seconds)
    return text_answer(f"Success set lostBookieRecoveryDelay to {seconds}")


async def _recover(context: HasRecoveryAdmin, request: Request) -> Answer:
    body = request.json_object()
    sources = body.get("bookie_src")
    if not isinstance(sources, list) or not sources:
        raise BadRequest('the body must be {"bookie_src": [<bookie id>], "delete_cookie": <true or false>}')
    await _replace(context, sources[0], body)
    return text_answer("Success send recovery request command.")


async def _decommission(context: HasRecoveryAdmin, request: Request) -> Answer:
    body = request.json_object()
    source = body.get("bookie_src")
    if not isinstance(source, str):
        raise BadRequest('the body must be {"bookie_src": <bookie id>}')
    await _replace(context, source, body)
    return text_answer(f"Success send decommission Bookie command {source}")


async def _replace(context: HasRecoveryAdmin, source: object, body: Mapping[str, Any]) -> None:
    if not isinstance(source, str):
        raise BadRequest("a bookie id must be a string", member="bookie_src")
    delete_cookie = bool(boolean(body, "delete_cookie", default=False))
    await (await context.recovery_admin()).replace(validate_bookie_id(source), delete_cookie=delete_cookie)


_HANDLERS: Final[tuple[tuple[str, str, Callable[[Any, Request], Awaitable[Answer]]], ...]] = (
    ("GET", "status", _status),
    ("PUT", "status", _set_status),
    ("GET", "list_under_replicated_ledger", _marked),
    ("GET", "who_is_auditor", _auditor),
    ("PUT", "trigger_audit", _trigger_audit),
    ("GET", "lost_bookie_recovery_delay", _delay),
    ("PUT", "lost_bookie_recovery_delay", _set_delay),
    ("PUT", "bookie", _recover),
    ("PUT", "decommission", _decommission),
)


ROUTES: Final[tuple[Route[Any], ...]] = tuple(
    Route(
        method,
        f"{ROOT}/{name}",
        handler,
        is_heavy=name == "list_under_replicated_ledger",
        is_cluster_wide=method != "GET",
    )
    for method, name, handler in _HANDLERS
)
"""Routes for an application whose context has a `recovery_admin`."""

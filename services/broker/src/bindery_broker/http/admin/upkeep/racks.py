"""Calls on the racks of bookies: the record in `/bookies` that brokers of both kinds and bookies share.

A bookie with a rack in its own settings writes that again at its next start. Source: Pulsar's Bookies of `/admin/v2`,
BookiesRackConfiguration, BookieInfo.
"""

from typing import Any, Final

from bindery_core.errors import BadRequest
from bindery_core.ids import validate_bookie_id
from bindery_metadata.bookies.racks import RackStore, parse_rack
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ROOT, Refused, answer, call, done, param
from bindery_broker.http.exchange import Exchange

router: Final = APIRouter()
NAME_SIZE_MAX: Final = 255
"""Maximum number of characters of a group and of a host name."""


@call(router, "GET", ROOT + "/bookies/racks-info", "adminRacks")
async def racks(exchange: Exchange) -> Response:
    """Group -> bookie -> rack and host name."""
    record = await RackStore(exchange.broker.store).get()
    return answer(
        {group: {name: _info(info) for name, info in named.items()} for group, named in record.groups.items()}
    )


@call(router, "GET", ROOT + "/bookies/racks-info/{bookie:form}", "adminRack")
async def rack(exchange: Exchange) -> Response:
    name = param(exchange, "bookie")
    info = (await RackStore(exchange.broker.store).get()).info(name)
    if info is None:
        raise _missing(name)
    return answer(_info(info))


@call(router, "POST", ROOT + "/bookies/racks-info/{bookie:form}", "adminSetRack")
async def set_rack(exchange: Exchange) -> Response:
    """Set rack, host name and group (`group` in the query) of a bookie, which need not be registered."""
    group = exchange.query_params.get("group")
    if not group:
        raise Refused(412, "Bookie 'group' parameters is missing")
    given = await calls.body(exchange, dict[str, Any])
    rack, hostname = given.get("rack"), given.get("hostname")
    if not isinstance(rack, str) or not isinstance(hostname, str | None):
        raise Refused(400, 'the body has the texts `rack` and `hostname`: {"rack": "/zone-a", "hostname": "bookie-0"}')
    if max(len(group), len(hostname or "")) > NAME_SIZE_MAX:
        raise Refused(400, f"group and hostname have at most {NAME_SIZE_MAX} characters")
    try:
        bookie, rack = validate_bookie_id(param(exchange, "bookie")), parse_rack(rack)
    except BadRequest as error:
        raise Refused(412, str(error)) from error
    await RackStore(exchange.broker.store).set_rack(bookie, rack, hostname=hostname, group=group)
    return done()


@call(router, "DELETE", ROOT + "/bookies/racks-info/{bookie:form}", "adminRemoveRack")
async def remove_rack(exchange: Exchange) -> Response:
    name = param(exchange, "bookie")
    try:
        was_there = await RackStore(exchange.broker.store).unset_rack(validate_bookie_id(name))
    except BadRequest:
        was_there = False
    if not was_there:
        raise _missing(name)
    return done()


def _info(info: Any) -> dict[str, Any]:
    return {"rack": info.get("rack"), "hostname": info.get("hostname")}


def _missing(name: str) -> Refused:
    return Refused(404, f"Bookie rack placement configuration not found: {name[:NAME_SIZE_MAX]}")

"""Calls on the schema of a topic: show, upload, compare and delete its versions.

Any broker answers, and the topic need not exist, as over `/v1`. A deletion takes a version number, and `force` also
deletes the stored definitions; Pulsar begins again at 0 then. Source: Pulsar SchemasResourceBase.
"""

from typing import Any, Final

import msgspec
from bindery_core.errors import BinderyError
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import IncompatibleSchema, InvalidSchema, NoSuchSchema
from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ROOT, Refused, answer, call, flag, named, number, param
from bindery_broker.http.exchange import Exchange, Reply, json_reply
from bindery_broker.schemas.codec import IndexEntry, Schema, SchemaType, StoredSchema

router: Final = APIRouter()
SCHEMAS: Final = ROOT + "/schemas/{tenant:form}/{namespace:form}/{local:form}"
VERSION_MAX: Final = 2**63 - 1
NO_VERSION: Final = -1
"""What Pulsar answers as a version that does not exist."""


class _Payload(msgspec.Struct):
    type: str
    schema: str
    properties: dict[str, str] | None = None


@call(router, "GET", SCHEMAS + "/schema", "adminSchema")
async def newest(exchange: Exchange) -> Response:
    try:
        return answer(_shown(await exchange.broker.schemas.newest(named(exchange))))
    except NoSuchSchema as error:
        raise Refused(404, "Schema not found") from error


@call(router, "GET", SCHEMAS + "/schema/{version:form}", "adminSchemaVersion")
async def version(exchange: Exchange) -> Response:
    wanted = number(param(exchange, "version"), "the version", least=0, most=VERSION_MAX)
    try:
        return answer(_shown(await exchange.broker.schemas.get(named(exchange), wanted)))
    except NoSuchSchema as error:
        raise Refused(404, "Schema not found") from error


@call(router, "GET", SCHEMAS + "/schemas", "adminSchemaVersions")
async def versions(exchange: Exchange) -> Response:
    """All versions with their definitions, as far as they were not deleted."""
    name, schemas = named(exchange), exchange.broker.schemas
    return answer(
        {"getSchemaResponses": [_shown(await schemas.get(name, one)) for one in await schemas.versions(name)]}
    )


@call(router, "GET", SCHEMAS + "/metadata", "adminSchemaMetadata")
async def metadata(exchange: Exchange) -> Response:
    """The ledgers of all versions, also of deleted ones. Empty if the topic never had a schema."""
    locator = await exchange.broker.schemas.locator(named(exchange))
    if locator is None:
        return Reply(200, b"")
    return answer({"info": _stored(locator.newest), "index": [_stored(entry) for entry in locator.index]})


@call(router, "POST", SCHEMAS + "/schema", "adminUploadSchema")
async def upload(exchange: Exchange) -> Response:
    name, schema = await _given(exchange)
    await calls.check_namespace(exchange, reason="Namespace does not exist")
    try:
        strategy = await exchange.broker.schema_strategy(name)
        done = await exchange.broker.schemas.register(name, schema, strategy=strategy)
    except InvalidSchema as error:
        raise _invalid(error) from error
    return answer({"version": {"version": done.version}})


@call(router, "POST", SCHEMAS + "/compatibility", "adminCompareSchema")
async def compare(exchange: Exchange) -> Response:
    name, schema = await _given(exchange)
    await calls.check_namespace(exchange, reason="Namespace does not exist")
    try:
        strategy = await exchange.broker.schema_strategy(name)
        found = await exchange.broker.schemas.compare(name, schema, strategy=strategy)
    except InvalidSchema as error:
        raise _invalid(error) from error
    if found.problem is not None:
        raise IncompatibleSchema(f"the schema is not compatible: {found.problem}", strategy=strategy.value)
    return json_reply({"compatibility": True, "schemaCompatibilityStrategy": strategy.value}, status=202)


@call(router, "POST", SCHEMAS + "/version", "adminFindSchema")
async def find(exchange: Exchange) -> Response:
    """The version that is this schema; -1: none is."""
    name, schema = await _given(exchange)
    await calls.check_namespace(exchange, reason="Namespace does not exist")
    try:
        strategy = await exchange.broker.schema_strategy(name)
        found = await exchange.broker.schemas.compare(name, schema, strategy=strategy)
    except InvalidSchema as error:
        raise _invalid(error) from error
    return answer({"version": NO_VERSION if found.version is None else found.version})


@call(router, "DELETE", SCHEMAS + "/schema", "adminDeleteSchema")
async def delete(exchange: Exchange) -> Response:
    name, force = named(exchange), flag(exchange, "force")
    try:
        return answer({"version": await exchange.broker.schemas.delete(name, force=force)})
    except NoSuchSchema:
        return answer({"version": NO_VERSION})


async def _given(exchange: Exchange) -> tuple[TopicName, Schema]:
    name = named(exchange)
    payload: _Payload = await calls.body(exchange, _Payload)
    try:
        kind = SchemaType[payload.type]
    except KeyError:
        raise Refused(422, f"no such type of schema: {payload.type[:40]}") from None
    try:
        return name, Schema(kind, payload.schema.encode(), payload.properties or {})
    except UnicodeEncodeError as error:
        raise Refused(400, "the schema contains an incomplete character") from error


def _shown(stored: StoredSchema) -> dict[str, Any]:
    """Return GetSchemaResponse."""
    return {
        "version": stored.version,
        "type": stored.schema.type.name,
        "timestamp": stored.created_ms,
        "data": stored.schema.definition.decode(errors="replace"),
        "properties": dict(stored.schema.properties),
    }


def _stored(entry: IndexEntry) -> dict[str, int]:
    return {"ledgerId": entry.position.ledger_id, "entryId": entry.position.entry_id, "version": entry.version}


def _invalid(error: BinderyError) -> Refused:
    return Refused(422, str(error))

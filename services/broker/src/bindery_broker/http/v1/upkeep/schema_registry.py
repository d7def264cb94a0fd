"""The schema of a topic: show, upload, compare and delete its versions.

Any broker answers: schemas do not belong to the owner of the topic, which need not exist. Its namespace must.
"""

import json
from typing import Annotated, Any, Literal

from bindery_core.errors import BadRequest
from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models, paths
from bindery_broker.schemas.codec import Schema, SchemaType, StoredSchema

SCHEMA = paths.TOPIC + "/schema"
PROPERTIES_MAX = 100
TYPES = Literal[
    "STRING", "JSON", "PROTOBUF", "AVRO", "BOOLEAN", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "DATE",
    "TIME", "TIMESTAMP", "KEY_VALUE", "INSTANT", "LOCAL_DATE", "LOCAL_TIME", "LOCAL_DATE_TIME", "PROTOBUF_NATIVE",
]  # fmt: skip
_ERRORS = (404, 413, 504)

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["schemas"])


class NoQuery(models.Query):
    """No parameters."""


class DeleteSchemaQuery(models.Query):
    force: bool = False
    """Also delete the stored definitions. Version numbers are not used again in either case."""


class SchemaBody(models.Body):
    type: TYPES
    definition: str | dict[str, Any] | list[Any] = ""
    """An Avro schema for AVRO, JSON and PROTOBUF, as text or as JSON; empty for primitive types."""
    properties: Annotated[dict[models.Text, models.Text], Field(max_length=PROPERTIES_MAX, default_factory=dict)]

    def schema_of(self) -> Schema:
        text = self.definition if isinstance(self.definition, str) else json.dumps(self.definition)
        try:
            return Schema(SchemaType[self.type], text.encode(), self.properties)
        except UnicodeEncodeError as error:
            raise BadRequest("the definition contains an incomplete character") from error


class SchemaAnswer(models.Answer):
    version: int
    """Counts from 0. Messages name it in 8 bytes, big-endian."""
    type: str
    definition: str
    """Bytes that are not UTF-8 are replaced, as in a definition of the type KEY_VALUE."""
    properties: dict[str, str]
    created_at: int
    """Time of the upload in milliseconds since 1970."""


class SchemaVersions(models.Answer):
    versions: list[int]
    """Ascending."""


class SchemaUploaded(models.Answer):
    version: int
    created: bool
    """Whether the request added the version; if not, the topic had this schema before."""


class SchemaCompared(models.Answer):
    compatible: bool
    version: int | None = None
    """The version of the topic that is this schema, if there is one."""
    strategy: str
    """The strategy in force, a policy of the topic's namespace."""
    reason: str | None = None
    """Why the schema is not compatible."""


class SchemaDeleted(models.Answer):
    version: int
    """The number that the deletion has taken; the next schema gets a higher one."""


Version = Annotated[int, Path(ge=0, le=2**63 - 1, description="A version, from 0.")]
Unrouted = Annotated[NoQuery, Query()]


@router.get(
    SCHEMA,
    operation_id="getSchema",
    summary="Show the newest schema of a topic",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*_ERRORS),
)
async def get_schema(exchange: Exchange, name: paths.Topic, _query: Unrouted) -> SchemaAnswer:
    return _shown(await exchange.broker.schemas.newest(name))


@router.get(
    SCHEMA + "/versions",
    operation_id="listSchemaVersions",
    summary="List the schema versions of a topic; none if it has no schema",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*_ERRORS),
)
async def list_versions(exchange: Exchange, name: paths.Topic, _query: Unrouted) -> SchemaVersions:
    return SchemaVersions(versions=await exchange.broker.schemas.versions(name))


@router.get(
    SCHEMA + "/versions/{version:segment}",
    operation_id="getSchemaVersion",
    summary="Show one schema version of a topic",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*_ERRORS),
)
async def get_version(exchange: Exchange, name: paths.Topic, version: Version, _query: Unrouted) -> SchemaAnswer:
    return _shown(await exchange.broker.schemas.get(name, version))


@router.post(
    SCHEMA,
    operation_id="uploadSchema",
    summary="Add a schema version, if it is compatible; idempotent",
    response_description=openapi.TITLES[200],
    responses={
        201: {"model": SchemaUploaded, "description": openapi.TITLES[201]},
        **openapi.problems(*_ERRORS, *openapi.BODY_ERRORS, 409),
    },
)
async def upload_schema(
    exchange: Exchange, name: paths.Topic, _query: Unrouted, body: SchemaBody, status: Response
) -> SchemaUploaded:
    broker = exchange.broker
    strategy = await broker.schema_strategy(name)
    done = await broker.schemas.register(name, body.schema_of(), strategy=strategy)
    status.status_code = 201 if done.created else 200
    return SchemaUploaded(version=done.version, created=done.created)


@router.post(
    SCHEMA + "/compatibility",
    operation_id="compareSchema",
    summary="Check whether a schema could be added, and change nothing",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
)
async def compare_schema(exchange: Exchange, name: paths.Topic, _query: Unrouted, body: SchemaBody) -> SchemaCompared:
    broker = exchange.broker
    strategy = await broker.schema_strategy(name)
    found = await broker.schemas.compare(name, body.schema_of(), strategy=strategy)
    return SchemaCompared(
        compatible=found.problem is None, version=found.version, strategy=strategy.value, reason=found.problem
    )


@router.delete(
    SCHEMA,
    operation_id="deleteSchema",
    summary="Delete all schema versions of a topic; also those that cannot be read",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*_ERRORS),
)
async def delete_schema(
    exchange: Exchange, name: paths.Topic, query: Annotated[DeleteSchemaQuery, Query()]
) -> SchemaDeleted:
    return SchemaDeleted(version=await exchange.broker.schemas.delete(name, force=query.force))


def _shown(stored: StoredSchema) -> SchemaAnswer:
    return SchemaAnswer(
        version=stored.version,
        type=stored.schema.type.name,
        definition=stored.schema.definition.decode(errors="replace"),
        properties=dict(stored.schema.properties),
        created_at=stored.created_ms,
    )

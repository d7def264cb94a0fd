"""Decide whether a new schema may follow the versions that a topic has. Pure.

| strategy                                | the new schema must be able to   | compared with        |
|-----------------------------------------|----------------------------------|----------------------|
| BACKWARD, BACKWARD_TRANSITIVE           | read data of the other one       | the newest, all      |
| FORWARD, FORWARD_TRANSITIVE             | be read with the other one       | the newest, all      |
| FULL, FULL_TRANSITIVE                   | both                             | the newest, all      |
| ALWAYS_COMPATIBLE                       | nothing                          | none                 |
| ALWAYS_INCOMPATIBLE                     | be the same                      | the newest           |

A schema of another type is incompatible, except with ALWAYS_COMPATIBLE. Definitions of AVRO, JSON and PROTOBUF are Avro
schemas, and Avro's rules apply. A JSON definition from before Pulsar 2.1 is a JSON schema: any Avro record may follow
it. Definitions of other types must be the same.
Source: Pulsar SchemaRegistryServiceImpl, AvroSchemaBasedCompatibilityCheck, JsonSchemaCompatibilityCheck.
"""

from collections.abc import Iterable
from typing import Final

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from bindery_broker.errors import InvalidSchema
from bindery_broker.namespaces.policies import SchemaCompatibility
from bindery_broker.schemas import definitions
from bindery_broker.schemas.codec import Schema, SchemaType

AVRO_TYPES: Final = frozenset((SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF))
"""Types whose definition is an Avro schema."""
WITH_DEFINITION: Final = frozenset((*AVRO_TYPES, SchemaType.KEY_VALUE, SchemaType.PROTOBUF_NATIVE))
REASONS_SHOWN_MAX: Final = 5


def is_transitive(strategy: SchemaCompatibility) -> bool:
    """Return whether a new schema is compared with all versions, not only with the newest."""
    return strategy.value.endswith("_TRANSITIVE")


def check_valid(schema: Schema) -> None:
    """Raise InvalidSchema if the definition does not fit the type."""
    kind = schema.type
    if kind is SchemaType.NONE:
        raise InvalidSchema("NONE is the type of a topic without a schema; delete the schema instead")
    if kind in AVRO_TYPES:
        try:
            definitions.parse(schema.definition)
        except InvalidSchema as error:
            hint = "; the definition of the type JSON is an Avro schema, too" if kind is SchemaType.JSON else ""
            raise InvalidSchema(error.message + hint, type=kind.name, **error.facts) from error
    elif kind is SchemaType.PROTOBUF_NATIVE:
        content = definitions.load(schema.definition)
        if not isinstance(content, dict) or not {"fileDescriptorSet", "rootMessageTypeName"} <= content.keys():
            raise InvalidSchema("the definition must have fileDescriptorSet and rootMessageTypeName", type=kind.name)
    elif kind not in WITH_DEFINITION and schema.definition:
        raise InvalidSchema("a primitive type has no definition", type=kind.name)


def is_same(one: Schema, other: Schema) -> bool:
    """Return whether the two are one version."""
    if one.type != other.type:
        return False
    if one.type in AVRO_TYPES:
        return definitions.is_same(one.definition, other.definition)
    return one.definition == other.definition


def incompatibility(new: Schema, older: Schema, strategy: SchemaCompatibility) -> str | None:
    """Return why `new` may not follow `older`; None: it may. `new` must be valid. Takes up to about a second."""
    if strategy is SchemaCompatibility.ALWAYS_COMPATIBLE:
        return None
    if new.type != older.type:
        return f"the type is {new.type.name}, and that of the topic is {older.type.name}"
    if is_same(new, older):
        return None
    if strategy is SchemaCompatibility.ALWAYS_INCOMPATIBLE:
        return "the strategy ALWAYS_INCOMPATIBLE allows no change"
    if new.type not in AVRO_TYPES:
        return f"definitions of the type {new.type.name} can only be compared for equality, and they differ"
    try:
        before = definitions.parse(older.definition)
    except InvalidSchema as error:
        if new.type is SchemaType.JSON:
            return None
        return f"the older definition cannot be read: {error}"
    now = definitions.parse(new.definition)
    problems = []
    if strategy.value.startswith(("BACKWARD", "FULL")) and (why := _why_unreadable(reader=now, writer=before)):
        problems.append(f"it cannot read older data: {why}")
    if strategy.value.startswith(("FORWARD", "FULL")) and (why := _why_unreadable(reader=before, writer=now)):
        problems.append(f"its data cannot be read with the older schema: {why}")
    return "; ".join(problems) or None


def _why_unreadable(*, reader: avro.schema.Schema, writer: avro.schema.Schema) -> str | None:
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    result = checker.get_compatibility(reader, writer)
    if result.compatibility is SchemaCompatibilityType.compatible:
        return None
    kinds = dict.fromkeys(kind.value.replace("_", " ") for kind in result.incompatibilities)
    places = _listed(sorted(result.locations - {"/"}) or ["/"])
    return f"{_listed(kinds)} at {places} ({_listed(sorted(result.messages))})"


def _listed(items: Iterable[str]) -> str:
    found = list(items)
    return ", ".join(found[:REASONS_SHOWN_MAX])[:500] + (", ..." if len(found) > REASONS_SHOWN_MAX else "")

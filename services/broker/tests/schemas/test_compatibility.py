"""The strategies of Pulsar, with Avro's rules."""

import json

import pytest
from bindery_broker.errors import InvalidSchema
from bindery_broker.namespaces.policies import SchemaCompatibility as Strategy
from bindery_broker.schemas.codec import Schema, SchemaType
from bindery_broker.schemas.compatibility import AVRO_TYPES, check_valid, incompatibility, is_same

INT, LONG = {"name": "n", "type": "int"}, {"name": "n", "type": "long"}
ADDED = {"name": "m", "type": "string"}
OPTIONAL = {"name": "m", "type": ["null", "string"], "default": None}


def schema(*fields: object, kind: SchemaType = SchemaType.AVRO, name: str = "A") -> Schema:
    return Schema(kind, json.dumps({"type": "record", "name": name, "fields": fields}).encode())


CASES = {
    # (older, newer): (the newer one reads older data, the older one reads newer data)
    "same": (schema(INT), schema(INT), True, True),
    "optional field added": (schema(INT), schema(INT, OPTIONAL), True, True),
    "required field added": (schema(INT), schema(INT, ADDED), False, True),
    "required field removed": (schema(INT, ADDED), schema(INT), True, False),
    "int becomes long": (schema(INT), schema(LONG), True, False),
    "long becomes int": (schema(LONG), schema(INT), False, True),
    "another name": (schema(INT), schema(INT, name="B"), False, False),
}


@pytest.mark.parametrize("kind", sorted(AVRO_TYPES))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", Strategy)
def test_a_strategy_allows_what_its_name_says(case, strategy, kind):
    older, newer, reads_older, is_read_by_older = CASES[case]
    older, newer = Schema(kind, older.definition), Schema(kind, newer.definition)
    expected = {
        Strategy.ALWAYS_COMPATIBLE: True,
        Strategy.ALWAYS_INCOMPATIBLE: case == "same",
        Strategy.BACKWARD: reads_older,
        Strategy.BACKWARD_TRANSITIVE: reads_older,
        Strategy.FORWARD: is_read_by_older,
        Strategy.FORWARD_TRANSITIVE: is_read_by_older,
        Strategy.FULL: reads_older and is_read_by_older,
        Strategy.FULL_TRANSITIVE: reads_older and is_read_by_older,
    }[strategy]
    assert (incompatibility(newer, older, strategy) is None) == expected


def test_the_reason_names_the_field_and_the_direction():
    reason = incompatibility(schema(INT, ADDED), schema(INT), Strategy.FULL)
    assert reason == "it cannot read older data: reader field missing default value at /fields/1 (m)"
    reason = incompatibility(schema(LONG), schema(INT), Strategy.FULL)
    assert reason is not None
    assert reason.startswith("its data cannot be read with the older schema: type mismatch at /fields/0/type")


def test_another_type_is_compatible_only_if_everything_is():
    text = Schema(SchemaType.STRING)
    for strategy in Strategy:
        reason = incompatibility(schema(INT), text, strategy)
        assert (reason is None) == (strategy is Strategy.ALWAYS_COMPATIBLE)
    assert "AVRO" in (incompatibility(schema(INT), text, Strategy.FULL) or "")
    assert incompatibility(schema(INT, kind=SchemaType.JSON), schema(INT), Strategy.FULL) is not None


def test_old_json_definitions_may_be_followed_by_avro_records():
    old = Schema(SchemaType.JSON, b'{"type": "object", "id": "urn:x"}')
    assert incompatibility(schema(INT, kind=SchemaType.JSON), old, Strategy.FULL) is None
    reason = incompatibility(schema(INT), Schema(SchemaType.AVRO, old.definition), Strategy.FULL)
    assert reason is not None
    assert "cannot be read" in reason


def test_definitions_of_protobuf_native_must_be_equal():
    one = Schema(SchemaType.PROTOBUF_NATIVE, b'{"fileDescriptorSet":"AA==","rootMessageTypeName":"A"}')
    other = Schema(SchemaType.PROTOBUF_NATIVE, b'{"fileDescriptorSet":"AQ==","rootMessageTypeName":"A"}')
    assert incompatibility(one, one, Strategy.FULL) is None
    assert "only be compared for equality" in (incompatibility(other, one, Strategy.BACKWARD) or "")
    assert incompatibility(other, one, Strategy.ALWAYS_COMPATIBLE) is None


def test_equal_definitions_of_different_types_are_different_schemas():
    assert is_same(schema(INT), schema(INT))
    assert not is_same(schema(INT), schema(INT, kind=SchemaType.JSON))
    assert not is_same(Schema(SchemaType.INT8), Schema(SchemaType.INT16))
    assert is_same(Schema(SchemaType.INT8), Schema(SchemaType.INT8))


@pytest.mark.parametrize(
    ("kind", "definition", "message"),
    [
        (SchemaType.NONE, b"", "without a schema"),
        (SchemaType.STRING, b"x", "no definition"),
        (SchemaType.INT64, b"{}", "no definition"),
        (SchemaType.AVRO, b"", "not JSON"),
        (SchemaType.JSON, b'{"type": "object"}', "JSON is an Avro schema, too"),
        (SchemaType.PROTOBUF_NATIVE, b"{}", "fileDescriptorSet"),
        (SchemaType.PROTOBUF_NATIVE, b"[]", "fileDescriptorSet"),
    ],
)
def test_a_definition_must_fit_its_type(kind, definition, message):
    with pytest.raises(InvalidSchema, match=message):
        check_valid(Schema(kind, definition))
    check_valid(Schema(SchemaType.STRING))
    check_valid(schema(INT, kind=SchemaType.JSON))

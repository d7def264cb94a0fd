"""Definitions from clients are parsed within limits."""

import json
import time

import pytest
from bindery_broker.errors import InvalidSchema
from bindery_broker.namespaces.policies import SchemaCompatibility as Strategy
from bindery_broker.schemas import definitions
from bindery_broker.schemas.codec import Schema, SchemaType
from bindery_broker.schemas.compatibility import incompatibility


def text(content: object) -> bytes:
    return json.dumps(content).encode()


def record(fields: list[object], name: str = "A") -> dict[str, object]:
    return {"type": "record", "name": name, "fields": fields}


def test_names_of_nested_java_classes_and_unknown_logical_types_are_accepted():
    content = record([{"name": "a", "type": {"type": "int", "logicalType": "odd"}}], name="Outer$Inner")
    assert definitions.parse(text(content)).type == "record"


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "not an Avro schema"),
        (b"7", "not an Avro schema"),
        (b'{"type": "record", "name": 5, "fields": []}', "not an Avro schema"),
        (b'{"type": "record", "name": "A", "fields": 5}', "not an Avro schema"),
        (b'{"type": "record", "name": "A", "fields": [5]}', "not an Avro schema"),
        (b'{"type": "array"}', "not an Avro schema"),
        (b'{"type": "array", "items": "Missing"}', "not an Avro schema"),
        (b'{"type": {"type": []}}', "not an Avro schema"),
        (b'{"type":' * 65 + b'"int"' + b"}" * 65, "nested too deeply"),
        (text(record([{"name": f"f{i}", "type": "int"} for i in range(4_000)])), "too many types and fields"),
        (text([{"type": "fixed", "name": f"f{i}", "size": 1} for i in range(65)]), "too many branches"),
        (text({"type": "array", "items": [{"type": "fixed", "name": f"f{i}", "size": 1} for i in range(65)]}), "many"),
    ],
)
def test_what_is_no_avro_schema_or_too_large_is_refused(definition, message):
    with pytest.raises(InvalidSchema, match=message):
        definitions.parse(definition)


def test_enumerations_may_have_many_symbols():
    assert definitions.parse(text({"type": "enum", "name": "E", "symbols": [f"s{i}" for i in range(2_000)]}))


def test_the_most_expensive_definitions_within_the_limits_are_compared_in_seconds():
    def many(prefix: str) -> bytes:
        branches = [
            record(
                [{"name": f"{prefix}{field}", "type": "int", "default": 0} for field in range(30)], name=f"R{branch}"
            )
            for branch in range(64)
        ]
        fields = [{"name": "u", "type": branches}]
        names = [f"R{branch}" for branch in range(64)]
        fields += [{"name": f"v{i}", "type": names} for i in range(20)]
        return text(record(fields))

    began = time.process_time()
    incompatibility(Schema(SchemaType.AVRO, many("a")), Schema(SchemaType.AVRO, many("b")), Strategy.FULL)
    assert time.process_time() - began < 20  # some 0.5 s on a fast machine


def test_white_space_and_the_order_of_fields_of_objects_make_no_other_definition():
    assert definitions.is_same(b'{"type": "int", "doc": "x"}', b'{"doc":"x","type":"int"}')
    assert not definitions.is_same(b'{"type": "int"}', b'{"type": "long"}')
    assert not definitions.is_same(b"{", b"}")
    assert definitions.is_same(b"{", b"{")

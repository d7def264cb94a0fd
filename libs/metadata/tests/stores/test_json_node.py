"""Records in znodes as JSON."""

import enum
from dataclasses import dataclass

import pytest
from bindery_core.errors import Corrupt
from bindery_metadata.stores.json_node import SIZE_MAX, decode, encode, with_version


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Record:
    name: str
    colour: Colour = Colour.RED
    count: int | None = None
    version: int = -1


def test_members_are_sorted_and_those_to_leave_out_are_absent() -> None:
    assert encode(Record("ü")) == '{"colour":"red","count":null,"name":"ü","version":-1}'.encode()
    assert encode(Record("a", count=3), leave_out=("version", "name")) == b'{"colour":"red","count":3}'
    assert encode({"b": 1, "a": [2]}) == b'{"a":[2],"b":1}'


def test_a_record_is_decoded_with_defaults_and_without_unknown_members() -> None:
    assert decode(b'{"name":"a","later":{"x":1}}', Record, path="/x") == Record("a")
    assert decode(b'{"name":"a","colour":"red","count":3}', Record, path="/x") == Record("a", Colour.RED, 3)


def test_known_members_override_those_of_the_node() -> None:
    assert decode(b'{"name":"a","version":1}', Record, path="/x", version=7) == Record("a", version=7)
    assert decode(b"{}", Record, path="/x", name="b") == Record("b")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"\xff",
        b'{"name":"\xff"}',
        b"{}",
        b'{"name":1}',
        b'{"name":"a","colour":"blue"}',
        b"[" * 50_000,
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_another_content_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="the node cannot be read") as caught:
        decode(data, Record, path="/x")
    assert caught.value.facts["path"] == "/x"
    assert len(caught.value.facts["reason"]) <= 200


def test_a_node_of_the_maximum_size_is_decoded_and_no_larger_one() -> None:
    assert SIZE_MAX == 262_144
    record = b'{"name":"a"}'
    assert decode(record + b" " * (SIZE_MAX - len(record)), Record, path="/x") == Record("a")
    with pytest.raises(Corrupt, match="the node is too large") as caught:
        decode(record + b" " * (SIZE_MAX - len(record) + 1), Record, path="/x")
    assert caught.value.facts == {"path": "/x", "size": 262_145, "size_max": 262_144}


def test_a_record_gets_another_version() -> None:
    assert with_version(Record("a", count=3), 8) == Record("a", count=3, version=8)

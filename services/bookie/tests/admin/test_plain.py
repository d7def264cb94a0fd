"""Values of the bookie's parts become values of JSON."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

import pytest
from bindery_bookie.admin.plain import camel_case, plain


class Kind(Enum):
    MINOR = "minor"
    MAJOR = 2


class Phase(StrEnum):
    LISTING = "listing"


@dataclass
class Inner:
    live_bytes: int
    is_x: bool = True


@dataclass
class Outer:
    one_inner: Inner
    all: list[Inner] = field(default_factory=list)
    log_kind: Kind | None = None


@pytest.mark.parametrize("value", [None, True, False, 0, 7, 1.5, "text", ""])
def test_values_of_json_are_kept(value: object) -> None:
    assert plain(value) is value


def test_an_enumeration_becomes_its_value() -> None:
    assert plain([Kind.MINOR, Kind.MAJOR]) == ["minor", 2]
    assert type(plain(Phase.LISTING)) is str


def test_a_dataclass_becomes_an_object_with_names_in_camel_case() -> None:
    assert plain(Outer(Inner(5), [Inner(6, False)], Kind.MAJOR)) == {
        "oneInner": {"liveBytes": 5, "isX": True},
        "all": [{"liveBytes": 6, "isX": False}],
        "logKind": 2,
    }


def test_the_names_of_a_mapping_become_text_and_are_kept() -> None:
    assert plain({1: Inner(2), "a_b": (3, None)}) == {"1": {"liveBytes": 2, "isX": True}, "a_b": [3, None]}


def test_sequences_and_sets_become_lists() -> None:
    assert plain((1, range(2), frozenset({9}))) == [1, [0, 1], [9]]


@pytest.mark.parametrize("value", [b"bytes", bytearray(b"x"), object(), Inner], ids=lambda one: type(one).__name__)
def test_other_values_have_no_form(value: object) -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        plain(value)


def test_names_are_written_in_camel_case() -> None:
    assert [camel_case(name) for name in ("live_bytes", "log", "is_a_b")] == ["liveBytes", "log", "isAB"]

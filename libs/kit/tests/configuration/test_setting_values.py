"""The types and bounds of settings, for texts and for values."""

import math
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import pytest
from bindery_kit.configuration.bounds import Ge, Gt, Le, Lt
from bindery_kit.configuration.setting_values import SecretStr, ValueType


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Plain(Enum):
    ONE = "one"


@pytest.mark.parametrize(
    ("annotation", "given", "value"),
    [
        (int, "7", 7),
        (int, " 1_000 ", 1000),
        (int, "-3", -3),
        (int, "1.048576e+06", 1048576),
        (int, "9007199254740993", 9007199254740993),
        (int, 7, 7),
        (int, 7.0, 7),
        (float, "0.5", 0.5),
        (float, "inf", math.inf),
        (float, 3, 3.0),
        (bool, "TRUE", True),
        (bool, "off", False),
        (bool, "1", True),
        (bool, False, False),
        (str, "", ""),
        (Path, "a/b", Path("a/b")),
        (Path, Path("a"), Path("a")),
        (SecretStr, "x", SecretStr("x")),
        (Color, "red", Color.RED),
        (Color, Color.BLUE, Color.BLUE),
        (Level, "2", Level.HIGH),
        (Plain, "one", Plain.ONE),
        (int | None, None, None),
        (int | None, "7", 7),
        (Optional[int], "7", 7),  # noqa: UP045
        (Union[None, Annotated[int, Ge(7)]], "7", 7),  # noqa: UP007
        (Annotated[int | None, Ge(7)], None, None),
        (Annotated[int, Ge(0), Le(9)], "0", 0),
        (Annotated[int, Ge(0), Le(9)], "9", 9),
    ],
)
def test_valid_values_are_converted(annotation: Any, given: Any, value: Any) -> None:
    found = ValueType.of(annotation).read(given)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "given", "allowed"),
    [
        (int, "7.5", "a whole number"),
        (int, "", "a whole number"),
        (int, "inf", "a whole number"),
        (int, True, "a whole number"),
        (int, 7.5, "a whole number"),
        (int, math.inf, "a whole number"),
        (int, None, "a whole number"),
        (int, "9" * 5000, "a whole number"),
        (float, "nan", "a number"),
        (float, math.nan, "a number"),
        (float, True, "a number"),
        (float, 10**400, "a number"),
        (bool, "2", "true or false"),
        (bool, 1, "true or false"),
        (str, 7, "text"),
        (str, b"x", "text"),
        (Path, 7, "a path"),
        (SecretStr, 7, "text"),
        (Color, "green", "red or blue"),
        (Color, "RED", "red or blue"),
        (Level, 3, "1 or 2"),
        (int | None, "", "a whole number"),
        (Annotated[int, Ge(0), Le(9)], -1, "a whole number, at least 0, at most 9"),
        (Annotated[int, Ge(0), Le(9)], "10", "a whole number, at least 0, at most 9"),
        (Annotated[float, Gt(0), Lt(1)], "0", "a number, more than 0, less than 1"),
        (Annotated[float, Gt(0), Lt(1)], 1, "a number, more than 0, less than 1"),
        (Annotated[float, Gt(0)], "nan", "a number, more than 0"),
        (Annotated[int, Ge(2)] | None, 1, "a whole number, at least 2"),
    ],
)
def test_an_error_contains_the_allowed_values(annotation: Any, given: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as wrong:
        ValueType.of(annotation).read(given)
    assert str(wrong.value) == f"must be {allowed}"


@pytest.mark.parametrize("annotation", [list[int], bytes, int | str, int | str | None, Any, object])
def test_unsupported_types_are_rejected_at_their_declaration(annotation: Any) -> None:
    with pytest.raises(TypeError, match="unsupported type of a setting"):
        ValueType.of(annotation)


def test_a_secret_is_masked_except_in_get_secret_value() -> None:
    secret = SecretStr("told")
    assert "told" not in f"{secret} {secret!r} {[secret]}"
    assert secret.get_secret_value() == "told"
    assert secret != SecretStr("other")
    assert len({secret, SecretStr("told")}) == 1

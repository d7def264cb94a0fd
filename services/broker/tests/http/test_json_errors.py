"""Errors of JSON bodies: the reason, and the line and column of a syntax error."""

from typing import Any

import msgspec
import pytest
from bindery_broker.http.json_errors import JSON_ERRORS, JsonError, describe


def refused(body: bytes, kind: Any = object) -> JsonError:
    """Decode a body that is invalid. Returns the description of the error."""
    with pytest.raises(JSON_ERRORS) as caught:
        msgspec.json.decode(body, type=kind)
    return describe(caught.value, body)


@pytest.mark.parametrize(
    ("body", "line", "column", "reason"),
    [
        (b"x", 1, 1, "invalid character"),
        (b"\n]", 2, 1, "invalid character"),
        (b'{"a" 1}', 1, 6, "expected ':'"),
        (b"[\n1,\n 2 3]", 3, 4, "expected ',' or ']'"),
        (b'{\n"\xc3\xa9" 1}', 2, 6, "expected ':'"),
    ],
)
def test_a_syntax_error_has_a_line_and_a_column_in_bytes(body: bytes, line: int, column: int, reason: str) -> None:
    assert refused(body) == JsonError(reason, line, column)


@pytest.mark.parametrize(
    ("body", "line", "column"), [(b"[1] x", 1, 5), (b"[1]\n\nxy", 3, 1), (b"1 2", 1, 3), (b"{}\n ]", 2, 2)]
)
def test_the_first_of_the_trailing_characters_is_named(body: bytes, line: int, column: int) -> None:
    assert refused(body) == JsonError("trailing characters", line, column)


@pytest.mark.parametrize(("body", "line", "column"), [(b"", 1, 1), (b"[1,", 1, 4), (b"[1,\n2", 2, 2), (b'{"a', 1, 4)])
def test_a_truncated_body_is_wrong_after_its_end(body: bytes, line: int, column: int) -> None:
    assert refused(body) == JsonError("the input is truncated", line, column)


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b'"x"', int, "Expected `int`, got `str`"),
        (b'{"a": "\xff"}', object, "not UTF-8"),
        (b"[" * 100_000, object, "nested too deeply"),
    ],
)
def test_other_errors_have_no_place(body: bytes, kind: Any, reason: str) -> None:
    assert refused(body, kind) == JsonError(reason, None, 0)


def test_facts_are_the_place_of_a_syntax_error() -> None:
    assert refused(b"[\n1 2]").facts == {"line": 2, "column": 3}
    assert refused(b'"x"', int).facts == {}


def test_the_text_names_the_place_if_there_is_one() -> None:
    assert str(JsonError("expected ':'", 2, 7)) == "malformed JSON at line 2, column 7: expected ':'"
    assert str(JsonError("not UTF-8", None, 0)) == "not UTF-8"

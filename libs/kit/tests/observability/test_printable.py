"""Escapes of text that others chose."""

import json

import pytest
from bindery_kit.observability.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ('Zoë \\ "x" 漢 \U0001f600', 'Zoë \\ "x" 漢 \U0001f600'),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[2J\x00\x7f\x9b", "\\u001b[2J\\u0000\\u007f\\u009b"),
        ("\u2028\u202e\ufeff", "\\u2028\\u202e\\ufeff"),
        ("\U000e0001", "\\udb40\\udc01"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_json_stays_the_same() -> None:
    value = {"a\n\x9b": "\U000e0001\x7f\u2028"}
    shown = printable(json.dumps(value, ensure_ascii=False))
    assert shown.isprintable()
    assert json.loads(shown) == value

"""JSON as text: fields, tables, times and sizes."""

from typing import Any

import pytest
from bindery.common.tables import COLUMNS_MAX, lines_of, size_text, table, words


def test_plain_fields_are_aligned_and_come_before_nested_ones() -> None:
    value = {"disks": [{"path": "/a", "freeSize": 512}], "a": 1, "longName": "x", "more": {"b": None}}
    assert list(lines_of(value)) == [
        "a          1",
        "long name  x",
        "disks:",
        "  path  free size",
        "  /a    512 B",
        "more:",
        "  b  -",
    ]


def test_other_values_are_one_line() -> None:
    assert list(lines_of("text", indent="  ")) == ["  text"]
    assert list(lines_of(["a", 1])) == ["a, 1"]
    assert list(lines_of({})) == []


def test_rows_that_do_not_fit_a_table_are_blocks() -> None:
    wide = {f"f{number}": number for number in range(COLUMNS_MAX + 1)}
    assert list(lines_of({"rows": [wide]}, indent=" ")) == [
        " rows:",
        *(f"   f{number}  {number}" for number in range(9)),
        "",
    ]
    assert list(lines_of({"rows": [{"a": {"b": 1}}]})) == ["rows:", "  a:", "    b  1", ""]
    assert list(lines_of({"rows": [{"a": 1}, 2]})) == ["rows:", "  a  1", "", "  2", ""]
    narrow = dict(list(wide.items())[:COLUMNS_MAX])
    assert list(lines_of({"rows": [narrow]}))[1] == "  f0  f1  f2  f3  f4  f5  f6  f7"


def test_a_table_has_all_columns_in_the_order_of_the_rows() -> None:
    assert table([{"a": 1}, {"a": 22, "bC": "x"}]) == ["a   b c", "1   -", "22  x"]
    assert table([{"a": 1, "b": 2}], columns=["b"], indent="> ") == ["> b", "> 2"]
    assert table([], columns=["x"]) == ["x"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lastVerifiedMs", "last verified"),
        ("freeSize", "free size"),
        ("ms", "ms"),
        ("p99Ms", "p99"),
        ("state", "state"),
        ("HTTPPort", "httpport"),
        ("a1B", "a1 b"),
        ("", ""),
        (" ", " "),
    ],
)
def test_names_are_split_into_words(name: str, text: str) -> None:
    assert words(name) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2, "1.0 MiB"),
        (1024**3 * 2.25, "2.2 GiB"),
        (1024**4, "1.0 TiB"),
        (1024**5, "1024.0 TiB"),
    ],
)
def test_sizes_have_units(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("x", None, "-"),
        ("x", True, "yes"),
        ("bytes", False, "no"),
        ("x", 2048, "2048"),
        ("total", 2048, "2.0 KiB"),
        ("free", 2048.0, "2.0 KiB"),
        ("entrySize", 2048, "2.0 KiB"),
        ("bytes", 2048, "2.0 KiB"),
        ("diskSpace", 2048, "2.0 KiB"),
        ("bytesHeld", 2048, "2.0 KiB"),
        ("hitRatio", 0.123, "12.3 %"),
        ("usage", 1.0, "100.0 %"),
        ("x", 0.5, "0.5"),
        ("x", 1234567.0, "1.23457e+06"),
        ("endedMs", 1_700_000_000_999, "2023-11-14 22:13:20Z"),
        ("endedMs", 0, "never"),
        ("endedMs", -5, "never"),
        ("endedMs", 1, "1970-01-01 00:00:00Z"),
        ("endedMs", 10**18, "1000000000000000000"),
        ("delayMs", 1.5, "1.5"),
        ("x", [], ""),
        ("x", [1, "b"], "1, b"),
        ("x", "a" * 120, "a" * 120),
        ("x", "a" * 121, "a" * 116 + " ..."),
    ],
)
def test_values_are_readable(name: str, value: Any, text: str) -> None:
    assert list(lines_of({name: value})) == [f"{words(name)}  {text}"]


def test_names_and_values_are_printable_and_short() -> None:
    hostile = "\x1b[31m\x9b" + "x" * 1_000
    shown = "\\u001b[31m\\u009b" + "x" * 100 + " ..."
    assert list(lines_of({hostile: hostile})) == [f"{shown}  {shown}"]
    assert list(lines_of({"rows": [{"a": hostile}]})) == ["rows:", "  a", f"  {shown}"]
    assert table([{"key": "a\nb", "size": 1}, {"key": "\x9b2J", "size": 2}]) == [
        "key       size",
        "a\\nb      1 B",
        "\\u009b2J  2 B",
    ]

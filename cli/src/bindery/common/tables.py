"""Format JSON responses as text: one line per field, lists as tables, readable times and sizes.

Names and values are cut at CELL_SIZE_MAX, and characters that are not printable are escaped, because clients choose
some of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bindery_kit.observability.printable import printable

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SIZES: Final = frozenset({"total", "free"})
CELL_SIZE_MAX: Final = 120
"""Maximum number of characters of a cell or a field; longer texts are cut."""
COLUMNS_MAX: Final = 8
"""Maximum number of columns of a table. Rows with more fields would not fit a terminal and are printed as lines."""


def lines_of(value: Any, *, indent: str = "") -> Iterator[str]:
    """Yield any JSON value as lines: plain fields first, then lists and objects."""
    if not isinstance(value, Mapping):
        yield indent + _cell("", value)
        return
    plain = {name: item for name, item in value.items() if not _is_nested(item)}
    width = max((len(_label(name)) for name in plain), default=0)
    for name, item in plain.items():
        yield f"{indent}{_label(name):<{width}}  {_cell(name, item)}"
    for name, item in value.items():
        if not _is_nested(item):
            continue
        yield f"{indent}{_label(name)}:"
        if isinstance(item, Mapping):
            yield from lines_of(item, indent=indent + "  ")
        elif all(isinstance(row, Mapping) and _fits_a_table(row) for row in item):
            yield from table(item, indent=indent + "  ")
        else:
            for row in item:
                yield from lines_of(row, indent=indent + "  ")
                yield ""


def table(rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] | None = None, indent: str = "") -> list[str]:
    """Return rows under headings. `columns`: the fields to show, in order; None: all, in the order of the rows."""
    names = list(columns or dict.fromkeys(name for row in rows for name in row))
    cells = [[_label(name) for name in names], *([_cell(name, row.get(name)) for name in names] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(names))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def words(name: str) -> str:
    """Return a JSON name as words: `lastVerifiedMs` as `last verified`, `freeSize` as `free size`."""
    parts = _HUMP.sub(" ", name).lower().split()
    return " ".join(parts[:-1] if len(parts) > 1 and parts[-1] == "ms" else parts) or name


def size_text(size: float) -> str:
    """Return a size in bytes as text, such as `512 B` or `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _fits_a_table(row: Mapping[str, Any]) -> bool:
    return len(row) <= COLUMNS_MAX and not any(map(_is_nested, row.values()))


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(row, Mapping) for row in value))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("Ms"):
        return _time_text(value)
    if isinstance(value, int | float) and (name in _SIZES or name.lower().endswith(("size", "bytes", "space", "held"))):
        return size_text(value)
    if isinstance(value, float):
        return f"{100 * value:.1f} %" if name.lower().endswith(("ratio", "usage")) else f"{value:g}"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return _shown(text)


def _label(name: str) -> str:
    return _shown(words(name))


def _shown(text: str) -> str:
    """Return text that is printable and not too long."""
    text = printable(text[: CELL_SIZE_MAX + 1])
    return text if len(text) <= CELL_SIZE_MAX else text[: CELL_SIZE_MAX - 4] + " ..."


def _time_text(ms: int) -> str:
    if ms <= 0:
        return "never"
    try:
        return (_EPOCH + timedelta(milliseconds=ms)).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + "Z"
    except OverflowError:
        return str(ms)

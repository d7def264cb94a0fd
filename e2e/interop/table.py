"""Build the compatibility tables of a run, and compare them with docs/compatibility.md."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
_BEGIN: Final = "<!-- {name}: written by `make interop ARGS=--write` -->"
_END: Final = "<!-- end of {name} -->"
ABSENT: Final = ""
FAILED: Final = "FAILED"


@dataclass
class Table:
    """A table with rows and columns in the order of the first outcome. A cell without a run is empty."""

    name: str
    corner: str
    columns: tuple[str, ...]
    cells: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, column: str, said: str) -> None:
        assert column in self.columns, column
        self.cells.setdefault(row, {})[column] = said

    def render(self) -> str:
        lines = [
            "| " + " | ".join((self.corner, *self.columns)) + " |",
            "|" + "|".join("---" for _ in range(len(self.columns) + 1)) + "|",
        ]
        for row, cells in self.cells.items():
            lines.append("| " + " | ".join((row, *(cells.get(column, ABSENT) for column in self.columns))) + " |")
        return "\n".join(lines)

    def differences(self, text: str) -> list[str]:
        """Differences between the outcomes and the table in `text`. Cells without a run are not compared."""
        shown = {
            cells[0]: dict(zip(self.columns, cells[1:], strict=True))
            for cells in (_cells(line) for line in _between(text, self.name).splitlines()[2:])
            if len(cells) == len(self.columns) + 1
        }
        return [
            f"{row} / {column}: seen {said!r}, shown {shown.get(row, {}).get(column, ABSENT)!r}"
            for row, cells in self.cells.items()
            for column, said in cells.items()
            if shown.get(row, {}).get(column, ABSENT) != said
        ]

    def replaced(self, text: str) -> str:
        """`text` with its table replaced by this one."""
        begin, end = _markers(self.name)
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        assert pattern.search(text), f"{DOCUMENT} has no markers for {self.name}"
        return pattern.sub(lambda _: f"{begin}\n{self.render()}\n{end}", text)


def _markers(name: str) -> tuple[str, str]:
    return _BEGIN.format(name=name), _END.format(name=name)


def _between(text: str, name: str) -> str:
    begin, end = _markers(name)
    return text.partition(begin + "\n")[2].partition(end)[0]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]

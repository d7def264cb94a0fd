"""Frames of rows in memory for functions that need few operations of Spark: no session, no JVM.

`PlainFrame` has the methods of DataFrame, and `functions` the functions of `pyspark.sql.functions`, that the tested
modules call. As in SQL, the result of a comparison or an arithmetic operation with null is null.
"""

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

Values = dict[str, Any]


class Cell:
    """A value that is computed from a row. The counterpart of Column."""

    def __init__(self, of: Callable[[Values], Any], name: str = "", *, explodes: bool = False) -> None:
        self.of = of
        self.name = name
        self.explodes = explodes

    def _with(self, other: Any, combine: Callable[[Any, Any], Any]) -> "Cell":
        def value(row: Values) -> Any:
            left, right = self.of(row), lit(other).of(row)
            return None if left is None or right is None else combine(left, right)

        return Cell(value)

    def __eq__(self, other: object) -> "Cell":  # type: ignore[override]
        return self._with(other, operator.eq)

    def __ne__(self, other: object) -> "Cell":  # type: ignore[override]
        return self._with(other, operator.ne)

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> "Cell":
        return self._with(other, operator.or_)

    def __add__(self, other: Any) -> "Cell":
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> "Cell":
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> "Cell":
        return self._with(other, operator.mul)

    def __truediv__(self, other: Any) -> "Cell":
        return self._with(other, operator.truediv)

    def between(self, low: int, high: int) -> "Cell":
        return self._with((low, high), lambda value, limits: limits[0] <= value <= limits[1])

    def cast(self, kind: str) -> "Cell":
        assert kind == "int"
        return Cell(lambda row: int(self.of(row)), self.name)

    def alias(self, name: str) -> "Cell":
        return Cell(self.of, name, explodes=self.explodes)


def lit(value: Any) -> Cell:
    return value if isinstance(value, Cell) else Cell(lambda _: value)


def col(name: str) -> Cell:
    """`name` may be a path: `run.at`."""

    def value(row: Values) -> Any:
        found: Any = row
        for part in name.split("."):
            found = found[part]
        return found

    return Cell(value, name)


def _named(value: "Cell | str") -> Cell:
    return col(value) if isinstance(value, str) else value


def concat(*values: "Cell | str") -> Cell:
    cells = [_named(each) for each in values]
    return Cell(lambda row: None if None in (parts := [each.of(row) for each in cells]) else "".join(parts))


def udf(function: Callable[..., Any], kind: Any, *, useArrow: bool) -> Callable[..., Cell]:
    """`kind`: an array of structs; the function returns tuples."""
    assert not useArrow, "Arrow requires pandas"
    names = kind.elementType.names

    def call(*arguments: Cell) -> Cell:
        return Cell(
            lambda row: [
                dict(zip(names, each, strict=True)) for each in function(*(argument.of(row) for argument in arguments))
            ]
        )

    return call


class Grouped:
    def __init__(self, rows: list[Values], key: str) -> None:
        self._rows, self._key = rows, key

    def agg(self, total: Cell) -> "PlainFrame":
        """`total`: a sum."""
        found: dict[Any, int] = {}
        for row in self._rows:
            found[row[self._key]] = found.get(row[self._key], 0) + total.of(row)
        return PlainFrame([{self._key: key, total.name: value} for key, value in found.items()])


class PlainFrame:
    """Rows as dicts. `columns` are needed only for frames without rows."""

    def __init__(self, rows: Sequence[Values], columns: Sequence[str] = ()) -> None:
        self.rows = [dict(row) for row in rows]
        self.columns = list(self.rows[0]) if self.rows else list(columns)

    def ids(self) -> list[Any]:
        """The ledger ids of all rows."""
        return [row["ledger_id"] for row in self.rows]

    def where(self, condition: "Cell | str") -> "PlainFrame":
        """`condition` may be the name of a column, or `name = number`."""
        if isinstance(condition, str):
            name, _, number = condition.partition(" = ")
            condition = col(name) == int(number) if number else col(name)
        return PlainFrame([row for row in self.rows if condition.of(row)], self.columns)

    def select(self, *values: "Cell | str") -> "PlainFrame":
        cells = [_named(value) for value in values]
        found: list[Values] = []
        for row in self.rows:
            made = {each.name: each.of(row) for each in cells}
            exploded = [each.name for each in cells if each.explodes]
            if exploded:
                found += [{**made, exploded[0]: item} for item in made[exploded[0]]]
            else:
                found.append(made)
        return PlainFrame(found, [each.name for each in cells])

    def withColumn(self, name: str, value: Cell) -> "PlainFrame":
        return self.withColumns({name: value})

    def withColumns(self, values: dict[str, Cell]) -> "PlainFrame":
        changed = [{**row, **{name: value.of(row) for name, value in values.items()}} for row in self.rows]
        return PlainFrame(changed, [*self.columns, *(name for name in values if name not in self.columns)])

    def join(self, other: "PlainFrame", on: str | Sequence[str], how: str) -> "PlainFrame":
        keys = [on] if isinstance(on, str) else list(on)
        known = {tuple(row[key] for key in keys) for row in other.rows}
        wanted = {"left_semi": True, "left_anti": False}[how]
        found = [row for row in self.rows if (tuple(row[key] for key in keys) in known) is wanted]
        return PlainFrame(found, self.columns)

    def unionByName(self, other: "PlainFrame") -> "PlainFrame":
        if self.columns and other.columns:
            assert set(self.columns) == set(other.columns)
        return PlainFrame([*self.rows, *other.rows], self.columns or other.columns)

    union = unionByName

    def groupBy(self, key: str) -> Grouped:
        return Grouped(self.rows, key)

    def isEmpty(self) -> bool:
        return not self.rows


def joined_frames(frames: Sequence[PlainFrame]) -> PlainFrame:
    """The counterpart of `finding_rows.together`."""
    first, *others = frames
    for each in others:
        first = first.unionByName(each)
    return first


def create_frame(rows: Sequence[Sequence[Any]], schema: Any) -> PlainFrame:
    """The counterpart of `createDataFrame`. `schema`: a StructType, or `name type, name type`."""
    names = [part.split()[0] for part in schema.split(", ")] if isinstance(schema, str) else schema.names
    return PlainFrame([dict(zip(names, row, strict=True)) for row in rows], names)


functions = SimpleNamespace(
    array_contains=lambda cell, value: Cell(lambda row: value in cell.of(row)),
    broadcast=lambda frame: frame,
    col=col,
    concat=concat,
    explode=lambda cell: Cell(cell.of, cell.name, explodes=True),
    flatten=lambda cell: Cell(lambda row: [item for items in cell.of(row) for item in items]),
    lit=lit,
    sum=col,
    transform=lambda name, change: Cell(lambda row: [change(item) for item in row[name]]),
    udf=udf,
)
"""In place of `pyspark.sql.functions`. `sum` names the column that `Grouped.agg` adds up."""

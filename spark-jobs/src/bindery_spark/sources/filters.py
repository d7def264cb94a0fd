"""Apply Spark's filters to a data source: ranges of ledgers, selected bookies and states. Pure.

`take` returns the filters that the source does not apply completely; Spark applies them itself. If the filters exclude
every row, `is_empty` is set.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bindery_core.ids import ID_MAX
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from bindery_spark.schemas import NO_LEDGER


@dataclass(slots=True)
class Wanted:
    """The rows to read. `one_of`: allowed values by text column; other columns are unrestricted."""

    first_ledger: int = 0
    last_ledger: int = ID_MAX
    one_of: dict[str, frozenset[str]] | None = None
    is_empty: bool = False
    has_ledgerless: bool = False
    """Whether rows with NO_LEDGER are possible. Spark then also applies filters on ledger_id itself."""

    @classmethod
    def with_ledgerless(cls) -> "Wanted":
        """Create an instance whose range of ids includes NO_LEDGER."""
        return cls(first_ledger=NO_LEDGER, has_ledgerless=True)

    def has(self, ledger_id: int) -> bool:
        return not self.is_empty and self.first_ledger <= ledger_id <= self.last_ledger

    def allows(self, column: str, value: str) -> bool:
        return not self.is_empty and (self.one_of is None or value in self.one_of.get(column, (value,)))

    def take(self, filters: Iterable[Filter], *, columns: tuple[str, ...]) -> Iterable[Filter]:
        """Apply `filters` and return those left to Spark. `columns`: text columns that this source filters by."""
        return [each for each in filters if not self._take(each, columns)]

    def _take(self, wanted: Filter, columns: tuple[str, ...]) -> bool:
        path: tuple[str, ...] = getattr(wanted, "attribute", ())
        if len(path) != 1:
            return False
        column = path[0]
        if column == "ledger_id":
            return self._take_ledger(wanted) and not self.has_ledgerless
        if column in columns:
            return self._take_text(wanted, column)
        return False

    def _take_ledger(self, wanted: Filter) -> bool:
        if isinstance(wanted, IsNotNull):
            return True
        value: Any = getattr(wanted, "value", None)
        if isinstance(wanted, In):
            # The source reads the range from the lowest to the highest value, and Spark filters it.
            numbers = [number for number in value if type(number) is int]
            self._narrow(min(numbers, default=1), max(numbers, default=0))
            return False
        if type(value) is not int:
            return False
        match wanted:
            case EqualTo() | EqualNullSafe():
                self._narrow(value, value)
            case GreaterThan():
                self._narrow(value + 1, ID_MAX)
            case GreaterThanOrEqual():
                self._narrow(value, ID_MAX)
            case LessThan():
                self._narrow(NO_LEDGER, value - 1)
            case LessThanOrEqual():
                self._narrow(NO_LEDGER, value)
            case _:
                return False
        return True

    def _narrow(self, first: int, last: int) -> None:
        self.first_ledger = max(self.first_ledger, first)
        self.last_ledger = min(self.last_ledger, last)
        self.is_empty = self.is_empty or self.first_ledger > self.last_ledger

    def _take_text(self, wanted: Filter, column: str) -> bool:
        match wanted:
            case IsNotNull():
                return True
            case EqualTo(value=str(value)) | EqualNullSafe(value=str(value)):
                values = frozenset([value])
            case In(value=value):
                values = frozenset(each for each in value if isinstance(each, str))
            case _:
                return False
        narrowed = dict(self.one_of or {})
        narrowed[column] = narrowed.get(column, values) & values
        self.one_of = narrowed
        self.is_empty = self.is_empty or not narrowed[column]
        return True

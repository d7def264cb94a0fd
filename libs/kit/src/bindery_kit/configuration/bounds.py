"""Bounds of settings, for example `Annotated[int, Ge(0), Le(9)]`."""

import operator
from collections.abc import Callable
from typing import Any, ClassVar


class Bound:
    """A limit of the values of a setting."""

    words: ClassVar[str]
    _holds: ClassVar[Callable[[Any, Any], bool]]

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def admits(self, value: float) -> bool:
        return type(self)._holds(value, self.limit)

    def __str__(self) -> str:
        return f"{self.words} {self.limit}"


class Ge(Bound):
    words = "at least"
    _holds = operator.ge


class Gt(Bound):
    words = "more than"
    _holds = operator.gt


class Le(Bound):
    words = "at most"
    _holds = operator.le


class Lt(Bound):
    words = "less than"
    _holds = operator.lt

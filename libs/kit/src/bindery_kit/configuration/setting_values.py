"""ValueType: convert and check the values of settings, given as text or as Python values.

| type        | as text                                                                        | as a value           |
|-------------|--------------------------------------------------------------------------------|----------------------|
| `bool`      | `true`, `yes`, `on`, `1`, `t`, `y` or their opposites, in any case             | `bool`               |
| `int`       | as in Python; also `5.0` and `1.5e+6`, which is how templates write numbers    | `int`, whole `float` |
| `float`     | as in Python, but not `nan`                                                    | `float`, `int`       |
| `str`       | unchanged                                                                      | `str`                |
| `Path`      | unchanged                                                                      | `Path`               |
| `SecretStr` | unchanged                                                                      | `SecretStr`          |
| an `Enum`   | the value of a member                                                          | a member             |
| `X` or None | as X                                                                           | as X, `None`         |

Numbers may have `bounds`. Services read their settings before anything else, so this module uses no library, whose
import would delay every start.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from bindery_kit.configuration.bounds import Bound

_TRUE: Final = frozenset(("true", "yes", "on", "1", "t", "y"))
_FALSE: Final = frozenset(("false", "no", "off", "0", "f", "n"))

_NAMES: Final[dict[type, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


class SecretStr:
    """Text that is masked in output; `get_secret_value` returns it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def get_secret_value(self) -> str:
        return self._secret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and self._secret == other._secret

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return "********"


@dataclass(frozen=True)
class ValueType:
    """The parts of a setting's type. `base`: the type inside Optional and Annotated."""

    base: Any
    optional: bool = False
    bounds: tuple[Bound, ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> "ValueType":
        """Return the parts of an annotation. Raises TypeError for an unsupported type."""
        optional, bounds = False, list[Bound]()
        if get_origin(annotation) is Annotated:
            annotation, *bounds = get_args(annotation)
        if get_origin(annotation) in (Union, type(int | None)):
            inner = [argument for argument in get_args(annotation) if argument is not NoneType]
            optional, annotation = True, inner[0]
            if len(inner) != 1:
                raise TypeError(f"unsupported type of a setting: {annotation}")
            if get_origin(annotation) is Annotated:
                annotation, *bounds = get_args(annotation)
        is_known = annotation in _NAMES or annotation is SecretStr
        if not is_known and not (isinstance(annotation, type) and issubclass(annotation, Enum)):
            raise TypeError(f"unsupported type of a setting: {annotation}")
        return cls(annotation, optional, tuple(bounds))

    def read(self, given: Any) -> Any:
        """Return `given` as a value of this type. Raises ValueError with the allowed values."""
        if given is None and self.optional:
            return None
        try:
            value = self._converted(given)
        except (ValueError, OverflowError):
            raise ValueError(f"must be {self.allowed}") from None
        if value != value:  # not a number
            raise ValueError(f"must be {self.allowed}")
        if not all(bound.admits(value) for bound in self.bounds):
            raise ValueError(f"must be {self.allowed}")
        return value

    @property
    def allowed(self) -> str:
        """Return a text such as `a whole number, at least 0, at most 9`."""
        if isinstance(self.base, type) and issubclass(self.base, Enum):
            name = " or ".join(str(member.value) for member in self.base)
        else:
            name = "text" if self.base is SecretStr else _NAMES[self.base]
        return ", ".join((name, *map(str, self.bounds)))

    def _converted(self, given: Any) -> Any:
        base = self.base
        if isinstance(given, str):
            return _from_text(base, given)
        if isinstance(given, base) and (base is bool or not isinstance(given, bool)):
            return given
        if base is float and type(given) is int:
            return float(given)
        if base is int and isinstance(given, float) and given.is_integer():
            return int(given)
        raise ValueError


def _from_text(base: Any, text: str) -> Any:
    """Return the value that `text` stands for. Raises ValueError."""
    if base is str or base is SecretStr or base is Path:
        return base(text)
    if base is float:
        return float(text)
    if base is int:
        try:
            return int(text)
        except ValueError:
            if not (number := float(text)).is_integer():
                raise
            return int(number)
    if base is bool:
        word = text.strip().lower()
        if word not in _TRUE and word not in _FALSE:
            raise ValueError
        return word in _TRUE
    members = {str(member.value): member for member in base}
    if text not in members:
        raise ValueError
    return members[text]

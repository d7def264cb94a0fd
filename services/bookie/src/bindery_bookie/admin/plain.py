"""Values of the bookie's parts as JSON: names in camelCase, enumerations by their value."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Return `value` in the types of `json`; a dataclass becomes an object with its fields."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {camel_case(field.name): plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray):
        return [plain(one) for one in value]
    raise TypeError(f"no JSON form: {type(value).__name__}")


def camel_case(name: str) -> str:
    """Return the name in camelCase: `liveBytes` for `live_bytes`."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)

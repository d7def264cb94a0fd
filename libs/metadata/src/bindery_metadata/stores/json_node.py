"""Records in znodes as JSON: UTF-8, keys sorted, typed when read. Members that are not known are passed over."""

import dataclasses
from typing import Any, Final, TypeVar

import msgspec
from bindery_core.errors import Corrupt

SIZE_MAX: Final = 256 * 1024
"""Bytes that are still parsed."""

T = TypeVar("T")


def encode(record: Any, *, leave_out: tuple[str, ...] = ()) -> bytes:
    """A dataclass, or a mapping, without the members that the node's path and version say already."""
    members = msgspec.to_builtins(record)
    return msgspec.json.encode(
        {name: value for name, value in members.items() if name not in leave_out}, order="deterministic"
    )


def decode(data: bytes, kind: type[T], *, path: str, **known: Any) -> T:
    """`known`: members that are not in the JSON, or are not to be taken from there. Raises Corrupt naming `path`."""
    try:
        if len(data) > SIZE_MAX:
            raise Corrupt("the node is too large", path=path, size=len(data), size_max=SIZE_MAX)
        members = msgspec.json.decode(data, type=dict[str, Any])
        return msgspec.convert({**members, **known}, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt("the node cannot be read", path=path, reason=str(error)[:200]) from error


def with_version(record: T, version: int) -> T:
    """The same record as it stands in the node now."""
    changed: T = dataclasses.replace(record, version=version)  # type: ignore[type-var]
    return changed

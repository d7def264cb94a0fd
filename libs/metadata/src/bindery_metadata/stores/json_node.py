"""Encode and decode records in znodes as JSON in UTF-8 with sorted keys. Unknown members are ignored."""

import dataclasses
from typing import Any, Final, TypeVar

import msgspec
from bindery_core.errors import Corrupt

SIZE_MAX: Final = 256 * 1024
"""Maximum number of bytes of a node that is decoded."""

T = TypeVar("T")


def encode(record: Any, *, leave_out: tuple[str, ...] = ()) -> bytes:
    """Encode a dataclass or a mapping. `leave_out`: members that the node's path or version already contains."""
    members = msgspec.to_builtins(record)
    return msgspec.json.encode(
        {name: value for name, value in members.items() if name not in leave_out}, order="deterministic"
    )


def decode(data: bytes, kind: type[T], *, path: str, **known: Any) -> T:
    """Decode a record of type `kind`. `known`: members that are not in the JSON or override it. Raises Corrupt."""
    try:
        if len(data) > SIZE_MAX:
            raise Corrupt("the node is too large", path=path, size=len(data), size_max=SIZE_MAX)
        members = msgspec.json.decode(data, type=dict[str, Any])
        return msgspec.convert({**members, **known}, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt("the node cannot be read", path=path, reason=str(error)[:200]) from error


def with_version(record: T, version: int) -> T:
    """Return `record` with another version."""
    changed: T = dataclasses.replace(record, version=version)  # type: ignore[type-var]
    return changed

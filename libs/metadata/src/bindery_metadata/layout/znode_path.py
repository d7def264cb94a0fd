"""Rules for znode paths, checked before a request is sent.

ZooKeeper responds to an invalid path with an error or closes the connection, depending on the defect.
Source: ZooKeeper's PathUtils and jute.maxbuffer.
"""

import re
from collections.abc import Iterator
from typing import Final

from bindery_core.errors import BadRequest, TooLarge

DATA_SIZE_MAX: Final = 1_000_000
"""Maximum number of data bytes in one request.

jute.maxbuffer (1,048,575 by default) limits the whole packet, and a server closes the connection if a packet is longer:
without this check, an oversized write would look like an outage.
"""

PATH_SIZE_MAX: Final = 4_096
"""Maximum number of characters of a path."""
_INVALID: Final = re.compile("[\0-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff]")


def validate_path(path: str) -> str:
    """Return `path`. Raises BadRequest if it is relative or too long, or contains a part or character that is invalid.

    Invalid parts are empty, `.` and `..`. Invalid characters are control characters, surrogates and private-use
    characters up to U+F8FF, and those from U+FFF0.
    """
    if path == "/":
        return path
    if not path.startswith("/") or path.endswith("/") or len(path) > PATH_SIZE_MAX:
        raise BadRequest("not a znode path", path=path[:200])
    if any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise BadRequest("not a znode path", path=path)
    if _INVALID.search(path):
        raise BadRequest("a character that znode paths cannot hold", path=ascii(path))
    return path


def validate_size(size: int, path: str) -> None:
    """Raises TooLarge for a request of more than DATA_SIZE_MAX bytes."""
    if size > DATA_SIZE_MAX:
        raise TooLarge("too much data for a znode", path=path, size=size, size_max=DATA_SIZE_MAX)


def parent_of(path: str) -> str:
    """Return the path of the parent. The parent of `/` is `/`."""
    return path.rsplit("/", 1)[0] or "/"


def name_of(path: str) -> str:
    """Return the last part of `path`."""
    return path.rsplit("/", 1)[1]


def ancestors(path: str) -> Iterator[str]:
    """Yield every node above `path` from the top down, without the root `/`."""
    parts = path[1:].split("/")[:-1]
    for count in range(1, len(parts) + 1):
        yield "/" + "/".join(parts[:count])

"""Ids of requests, for the header `X-Request-Id`: the client's if it is valid, else a serial number."""

import itertools
import re
from typing import Final

from bindery_kit.observability.health import Scope

HEADER: Final = b"x-request-id"
_VALID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """`prefix`: begins serial numbers, so that those of several applications of a port differ."""

    def __init__(self, *, prefix: str = "") -> None:
        self._prefix = prefix
        self._serials = itertools.count(1)

    def of(self, scope: Scope) -> str:
        """Return the id that the client has sent, or a new one."""
        for name, value in scope["headers"]:
            if name == HEADER and _VALID.fullmatch(value):
                return str(value.decode("ascii"))
        return f"{self._prefix}{next(self._serials)}"

"""Describe why a JSON body cannot be decoded, with the line and column of a syntax error."""

import re
from typing import Final, NamedTuple

import msgspec

JSON_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding raises for invalid input."""
_MALFORMED: Final = re.compile(r"JSON is malformed: (.*) \(byte (\d+)\)")
_TRUNCATED: Final = "Input data was truncated"


class JsonError(NamedTuple):
    reason: str
    line: int | None
    """Line of a syntax error, from 1; None: the error has no position, such as a wrong type or invalid UTF-8."""
    column: int
    """Column of a syntax error in bytes, from 1; 0 if there is no line."""

    def __str__(self) -> str:
        if self.line is None:
            return self.reason
        return f"malformed JSON at line {self.line}, column {self.column}: {self.reason}"

    @property
    def facts(self) -> dict[str, int]:
        return {} if self.line is None else {"line": self.line, "column": self.column}


def describe(error: Exception, body: bytes) -> JsonError:
    """Return what is wrong with `body`. `error`: one of JSON_ERRORS."""
    if isinstance(error, RecursionError):
        return JsonError("nested too deeply", None, 0)
    if isinstance(error, UnicodeDecodeError):
        return JsonError("not UTF-8", None, 0)
    text = str(error)
    found = _MALFORMED.fullmatch(text)
    if found is not None:
        reason, offset = found[1], int(found[2])
        if reason == "trailing characters":  # msgspec names the byte after the first of them
            offset -= 1
    elif text == _TRUNCATED:
        reason, offset = "the input is truncated", len(body)
    else:
        return JsonError(text, None, 0)
    return JsonError(reason, 1 + body.count(b"\n", 0, offset), offset - body.rfind(b"\n", 0, offset))

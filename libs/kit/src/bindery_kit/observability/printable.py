"""Escape text that others chose, before a log line or a terminal shows it."""

import json


def printable(text: str) -> str:
    """Return `text` with the escapes of JSON for all characters that are not printable.

    Not printable are control characters, line and paragraph separators, invisible and bidirectional ones. Text that is
    escaped already stays as it is, and JSON stays the same JSON.
    """
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() else json.dumps(char)[1:-1] for char in text])

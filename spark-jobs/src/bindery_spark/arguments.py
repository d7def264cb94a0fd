"""Parse values of the command line (durations, sizes, ranges of ledgers); define the exit code of Ctrl-C. Pure."""

import re
from typing import Final

from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX
from bindery_metadata.ledgers.verified_records import LEVELS

EXIT_INTERRUPTED: Final = 130
"""Exit code after an interruption: 128 + SIGINT."""

_UNITS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(?:\d+[dhms])+")
_SIZES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE: Final = re.compile(r"(\d+)(B|KiB|MiB|GiB)?")
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+)?)?")


def duration_ms(text: str) -> int:
    """Convert `90s`, `1h30m` or `7d` to ms. Raises BadRequest."""
    if not _DURATION.fullmatch(text):
        raise BadRequest("not a duration; write 90s, 10m, 1h30m or 7d", given=text)
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))


def bytes_of(text: str) -> int | None:
    """Convert `512MiB` to bytes; an empty text to None. Raises BadRequest."""
    if not text:
        return None
    match = _SIZE.fullmatch(text)
    if match is None or not int(match[1]):
        raise BadRequest("not a size; write 100000, 64MiB or 2GiB", given=text)
    return int(match[1]) * _SIZES[match[2] or "B"]


def ledger_range(text: str) -> tuple[int, int]:
    """Convert `7`, `7-20` or `7-` to first and last ledger id. Raises BadRequest."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise BadRequest("not a range of ledger ids; write 7, 7-20 or 7-", given=text)
    first = int(match.group(1))
    last = int(match.group(2)) if match.group(2) else ID_MAX if "-" in text else first
    if not first <= last <= ID_MAX:
        raise BadRequest("the range is empty: its end is before its beginning", given=text)
    return first, last


def level_of(text: str) -> str:
    """Return `text` if it is an audit level. Raises BadRequest."""
    if text not in LEVELS:
        raise BadRequest(f"no such level; there are {', '.join(LEVELS)}", given=text)
    return text

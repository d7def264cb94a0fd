"""Select the entries of a topic, divide them into tasks, and compute the offsets of a stream. Pure.

The offset of a stream is JSON with the last entry read of each topic: `{"public/default/t": {"ledger": 7, "entry":
41}}`. A partitioned topic has one position for each partition. Ledger -1 is before all ledgers; entry -1 is before the
first entry of a ledger.

Invariants: the entries between two offsets are always the same, so a micro-batch that is read again has the same rows.
An offset is therefore never beyond the last confirmed entry of the first ledger that is not closed. Unless a stream
begins at a position, its first micro-batch is empty and ends where the stream begins, because Spark does not store the
beginning of a stream and requests it again after a restart.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from bindery_core.errors import BadRequest, NoSuchEntry
from bindery_core.ids import ID_MAX
from bindery_pulsar.managed_ledger_records import Position
from bindery_pulsar.message_id import EARLIEST, LATEST

CLOCK_SLACK_MS: Final = 10 * 60_000
"""Maximum time in ms between the close of a ledger and a later publish time in it, because clocks differ."""
LATENESS_MAX_MS: Final = 24 * 3_600_000
"""Maximum time in ms between a publish time and the later creation of the message's ledger. Producers queue messages
that they cannot send, and copies from other topics keep their publish times."""
TIME_MS_MAX: Final = 253_402_300_800_000
"""First ms of the year 10000, beyond all representable dates. As the end of bounds: no end."""
ENTRY_SIZE_UNKNOWN: Final = 1024
"""Assumed payload bytes of an entry in a ledger that is open."""
SLICE_COST: Final = 64 * 1024
"""Cost of opening a ledger, expressed in bytes."""

_POSITION: Final = re.compile(r"(\d{1,19}):(-1|\d{1,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The requested range of positions and publish times."""

    after: Position = EARLIEST
    """Position before the first entry (exclusive)."""
    upto: Position = LATEST
    """Last position (inclusive)."""
    from_ms: int = 0
    """First publish time (inclusive)."""
    to_ms: int = TIME_MS_MAX
    """End of publish times (exclusive). TIME_MS_MAX: no end, so times beyond representable dates are in the range."""

    @property
    def has_positions(self) -> bool:
        return self.after not in (EARLIEST, LATEST) or self.upto != LATEST

    def has_time(self, publish_time_ms: int) -> bool:
        return self.from_ms <= publish_time_ms and (publish_time_ms < self.to_ms or self.to_ms == TIME_MS_MAX)

    def from_time(self, time_ms: int) -> "Bounds":
        return replace(self, from_ms=max(self.from_ms, time_ms))

    def to_time(self, time_ms: int) -> "Bounds":
        return replace(self, to_ms=min(self.to_ms, time_ms))


ALL: Final = Bounds()
"""Bounds that include every message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The confirmed entries of one ledger of a topic."""

    ledger_id: int
    last_entry: int
    """Last confirmed entry; -1: none."""
    is_closed: bool
    size: int = 0
    """Payload size in bytes; 0: unknown."""
    created_ms: int = 0
    """Time of creation; 0: unknown."""
    closed_ms: int = 0
    """Time of closing; 0: unknown or not closed."""

    @property
    def entry_size(self) -> int:
        """Average payload size of an entry in bytes; ENTRY_SIZE_UNKNOWN if it is unknown."""
        return self.size // (self.last_entry + 1) if self.size and self.last_entry >= 0 else ENTRY_SIZE_UNKNOWN


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive entries of one ledger, at least one."""

    topic: str
    ledger_id: int
    first: int
    last: int
    entry_size: int = ENTRY_SIZE_UNKNOWN

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def cost(self) -> int:
        return SLICE_COST + self.count * self.entry_size


def parse_bounds(start: str, end: str) -> Bounds:
    """Parse `start`: earliest, latest, LEDGER:ENTRY (inclusive) or a time, and `end`: latest, LEDGER:ENTRY (inclusive)
    or a time (exclusive). Times are publish times in ISO 8601, in UTC unless they have a zone.

    Raises BadRequest.
    """
    bounds = ALL
    if start == "latest":
        bounds = replace(bounds, after=LATEST)
    elif match := _POSITION.fullmatch(start):
        bounds = replace(bounds, after=Position(_id(match[1]), _id(match[2]) - 1))
    elif start != "earliest":
        bounds = bounds.from_time(_time_ms(start, "start"))
    if match := _POSITION.fullmatch(end):
        bounds = replace(bounds, upto=Position(_id(match[1]), _id(match[2])))
    elif end != "latest":
        bounds = bounds.to_time(_time_ms(end, "end"))
    if bounds.from_ms >= bounds.to_ms or (bounds.after >= bounds.upto and bounds.after != LATEST):
        raise BadRequest("the range is empty: its end is before its beginning", start=start, end=end)
    return bounds


def _id(text: str) -> int:
    if int(text) > ID_MAX:
        raise BadRequest("ledger and entry id must be 0 to 2^63 - 1", given=text)
    return max(0, int(text))


def _time_ms(text: str, name: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(
            f"option {name} must be a time like 2026-03-01T12:00:00Z, a position like 7:0, or "
            f"{'earliest' if name == 'start' else 'latest'}",
            value=text,
        ) from None
    # Round up to ms: `start` then excludes all earlier messages, and `end` excludes none of them.
    return to_ms(time) + (time.microsecond % 1_000 > 0)


def to_ms(time: datetime) -> int:
    """Return ms since 1970, rounded down. A time without a zone is in UTC."""
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000 + since.microseconds // 1_000


# --- entries ----------------------------------------------------------------------------------------------------------


def slices_of(topic: str, extents: Iterable[Extent], bounds: Bounds) -> list[Slice]:
    """Return the entries within `bounds`. Its times only exclude ledgers that cannot contain a message of these
    times."""
    slices = []
    for extent in extents:
        first, last = 0, extent.last_entry
        if extent.ledger_id == bounds.after.ledger_id:
            first = bounds.after.entry_id + 1
        if extent.ledger_id == bounds.upto.ledger_id:
            last = min(last, bounds.upto.entry_id)
        is_inside = bounds.after.ledger_id <= extent.ledger_id <= bounds.upto.ledger_id
        if is_inside and first <= last and _may_hold(extent, bounds):
            slices.append(Slice(topic, extent.ledger_id, first, last, extent.entry_size))
    return slices


def _may_hold(extent: Extent, bounds: Bounds) -> bool:
    """Whether the ledger may contain messages of these times, by CLOCK_SLACK_MS and LATENESS_MAX_MS."""
    is_too_old = extent.closed_ms and extent.closed_ms + CLOCK_SLACK_MS < bounds.from_ms
    is_too_new = extent.created_ms and extent.created_ms - LATENESS_MAX_MS >= bounds.to_ms
    return not (is_too_old or is_too_new)


def tasks_of(slices: Iterable[Slice], *, entries_max: int, bytes_max: int) -> list[tuple[Slice, ...]]:
    """Split and combine slices, in order, into tasks of at most `entries_max` entries and `bytes_max` bytes, estimated
    from the averages of their ledgers. A task has at least one entry."""
    tasks: list[tuple[Slice, ...]] = []
    task: list[Slice] = []
    entries = size = 0
    for each in slices:
        first = each.first
        while first <= each.last:
            room = min(entries_max - entries, (bytes_max - size - SLICE_COST) // max(1, each.entry_size))
            if room < 1 and task:
                tasks.append(tuple(task))
                task, entries, size = [], 0, 0
                continue
            part = replace(each, first=first, last=min(each.last, first + max(1, room) - 1))
            task.append(part)
            entries, size, first = entries + part.count, size + part.cost, part.last + 1
    return [*tasks, tuple(task)] if task else tasks


# --- streams ----------------------------------------------------------------------------------------------------------


def to_offset(positions: Mapping[str, Position]) -> dict[str, Any]:
    """Return the offset of a stream with these positions by topic."""
    return {topic: {"ledger": at.ledger_id, "entry": at.entry_id} for topic, at in positions.items()}


def from_offset(offset: Mapping[str, Any]) -> dict[str, Position]:
    """Inverse of `to_offset`. Raises BadRequest if the form is wrong."""
    try:
        return {topic: Position(int(at["ledger"]), int(at["entry"])) for topic, at in offset.items()}
    except (TypeError, KeyError, ValueError) as error:
        raise BadRequest(
            "not an offset of this source; the checkpoint may belong to another query", offset=offset
        ) from error


def settled(extents: Sequence[Extent]) -> list[Extent]:
    """Return the ledgers up to and including the first one that is not closed, because it may still get entries."""
    ends = [index for index, extent in enumerate(extents) if not extent.is_closed]
    return list(extents[: ends[0] + 1] if ends else extents)


def initial(extents: Sequence[Extent], bounds: Bounds) -> Position:
    """Return the position before the first entry of a stream. It is EARLIEST only if the topic has no ledgers,
    so that `check_not_trimmed` detects the deletion of the first ledger."""
    if bounds.after == LATEST:
        return advance(settled(extents), EARLIEST, None)
    if bounds.after != EARLIEST:
        return bounds.after
    young = (extent for extent in extents if not extent.is_closed or _may_hold(extent, bounds))
    first = next(young, None)
    return advance(extents, EARLIEST, None) if first is None else Position(first.ledger_id, -1)


def advance(extents: Sequence[Extent], start: Position, count: int | None) -> Position:
    """Return the position `count` entries after `start`, or the last one if there are fewer or `count` is None.

    At the end of a closed ledger with a successor, this is the position before the successor's first entry, so that
    the closed ledger may be trimmed.
    """
    at, left = start, count
    for index, extent in enumerate(extents):
        if extent.ledger_id < at.ledger_id:
            continue
        if extent.ledger_id > at.ledger_id:
            at = Position(extent.ledger_id, -1)
        step = max(0, extent.last_entry - at.entry_id)
        if left is not None:
            step = min(step, left)
            left -= step
        at = Position(at.ledger_id, at.entry_id + step)
        if at.entry_id < extent.last_entry or not extent.is_closed or index + 1 == len(extents):
            break
    return at


def check_not_trimmed(topic: str, extents: Sequence[Extent], start: Position) -> None:
    """Raise NoSuchEntry if the topic no longer has the ledger of `start`: entries after `start` may have been
    deleted."""
    if start.ledger_id >= 0 and all(extent.ledger_id != start.ledger_id for extent in extents):
        raise NoSuchEntry(
            "the topic no longer has the ledger of the query's position: entries after this position may have been "
            "deleted by retention; option fail_on_data_loss=false (--skip-lost) continues with the remaining entries",
            topic=topic,
            position=start,
        )

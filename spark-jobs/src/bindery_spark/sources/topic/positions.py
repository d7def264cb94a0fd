"""Which entries of a topic are wanted, how they are cut into tasks, and what a stream remembers. Pure.

A stream's offset is JSON, by topic the last entry that was read: `{"public/default/t": {"ledger": 7, "entry": 41}}`; a
partitioned topic has one for each partition. Ledger -1 stands before everything, entry -1 before a ledger's first.

Invariants: the entries after one offset up to another are the same ones whenever they are asked for, so that a batch
that is read again has the same rows. An offset therefore never passes a ledger that is not closed, and in one it does
not pass the last confirmed entry. And unless a stream begins at a position, its first micro-batch reads nothing: the
batch's end says where the stream begins, for Spark does not keep a beginning and asks again after a restart.
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
"""How long after its ledger was closed a message may say that it was published: clocks differ."""
LATENESS_MAX_MS: Final = 24 * 3_600_000
"""How long before its ledger was made a message may have been published: producers keep what they cannot send, and
copies of other topics keep their times."""
TIME_MS_MAX: Final = 253_402_300_800_000
"""Year 10000, where dates end. As an end of bounds: there is none."""
SLICE_COST: Final = 64 * 1024
"""Bytes that opening a ledger counts."""

_POSITION: Final = re.compile(r"(\d{1,19}):(-1|\d{1,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Positions and publish times that are wanted."""

    after: Position = EARLIEST
    """Exclusive."""
    upto: Position = LATEST
    """Inclusive."""
    from_ms: int = 0
    """Inclusive."""
    to_ms: int = TIME_MS_MAX
    """Exclusive; TIME_MS_MAX: nothing is too late, not even a time that is no date."""

    @property
    def has_times(self) -> bool:
        return self.from_ms > 0 or self.to_ms < TIME_MS_MAX

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One ledger of a topic, as far as it is confirmed."""

    ledger_id: int
    last_entry: int
    """-1: none."""
    is_closed: bool
    size: int = 0
    """Payload bytes; 0: not known."""
    created_ms: int = 0
    """0: not known."""
    closed_ms: int = 0
    """0: not known."""

    @property
    def entry_size(self) -> int:
        """Bytes of an entry, on average; 1 KiB where nobody knows."""
        return self.size // (self.last_entry + 1) if self.size and self.last_entry >= 0 else 1024


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive entries of one ledger, at least one."""

    topic: str
    ledger_id: int
    first: int
    last: int
    entry_size: int = 1024

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def cost(self) -> int:
        return SLICE_COST + self.count * self.entry_size


def parse_bounds(start: str, end: str) -> Bounds:
    """`start`: earliest, latest, LEDGER:ENTRY (from that entry on) or a time. `end`: latest, LEDGER:ENTRY (that entry
    included) or a time (exclusive). Times: ISO 8601, UTC unless they say otherwise; of publishing.

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
    # The first ms at or after it: what was published before is not wanted as `start`, and not left out as `end`.
    return to_ms(time) + (time.microsecond % 1_000 > 0)


def to_ms(time: datetime) -> int:
    """ms since 1970, rounded down; a time without a zone is UTC."""
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000 + since.microseconds // 1_000


# --- entries ----------------------------------------------------------------------------------------------------------


def slices_of(topic: str, extents: Iterable[Extent], bounds: Bounds) -> list[Slice]:
    """The entries within `bounds`; of times, whole ledgers that cannot hold such a message are left out."""
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
    """Whether a message of those times may be in it, by CLOCK_SLACK_MS and LATENESS_MAX_MS."""
    is_too_old = extent.closed_ms and extent.closed_ms + CLOCK_SLACK_MS < bounds.from_ms
    is_too_new = extent.created_ms and extent.created_ms - LATENESS_MAX_MS >= bounds.to_ms
    return not (is_too_old or is_too_new)


def tasks_of(slices: Iterable[Slice], *, entries_max: int, bytes_max: int) -> list[tuple[Slice, ...]]:
    """Cut and joined, in order, to tasks of at most so many entries and, by the average of their ledgers, bytes; a task
    has one entry at least."""
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
    return {topic: {"ledger": at.ledger_id, "entry": at.entry_id} for topic, at in positions.items()}


def from_offset(offset: Mapping[str, Any]) -> dict[str, Position]:
    """Raises BadRequest for what `to_offset` did not make."""
    try:
        return {topic: Position(int(at["ledger"]), int(at["entry"])) for topic, at in offset.items()}
    except (TypeError, KeyError, ValueError) as error:
        raise BadRequest("not an offset of this source; is the checkpoint another query's?", offset=offset) from error


def settled(extents: Sequence[Extent]) -> list[Extent]:
    """Up to the first ledger that is not closed, this one included: what stands behind it may come to change place."""
    ends = [index for index, extent in enumerate(extents) if not extent.is_closed]
    return list(extents[: ends[0] + 1] if ends else extents)


def initial(extents: Sequence[Extent], bounds: Bounds) -> Position:
    """Where a stream begins: the position before its first entry. EARLIEST is only that of a topic without ledgers, so
    that `check_not_trimmed` sees that the first one is gone."""
    if bounds.after == LATEST:
        return advance(settled(extents), EARLIEST, None)
    if bounds.after != EARLIEST:
        return bounds.after
    young = (extent for extent in extents if not extent.is_closed or _may_hold(extent, bounds))
    first = next(young, None)
    return advance(extents, EARLIEST, None) if first is None else Position(first.ledger_id, -1)


def advance(extents: Sequence[Extent], start: Position, count: int | None) -> Position:
    """The position `count` entries after `start`, or the last one there is. None: the last one.

    At the end of a closed ledger that has a successor it is the position before the successor's first entry: what lies
    behind may then be trimmed.
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
    """Raises NoSuchEntry when entries after `start` may be gone: its ledger is no longer one of the topic's."""
    if start.ledger_id >= 0 and all(extent.ledger_id != start.ledger_id for extent in extents):
        raise NoSuchEntry(
            "the topic went on without this query: entries after its last position may have been deleted by retention; "
            "option fail_on_data_loss=false (--skip-lost) goes on with what is left",
            topic=topic, position=start,
        )  # fmt: skip

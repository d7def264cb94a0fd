"""Draw the timeline of a run as SVG. The colours come from the style sheet of the page. Pure functions.

From top to bottom, on one time axis: faults as bars from begin to end; messages acknowledged and delivered per second;
messages refused and of unknown outcome per second; ledgers marked as under-replicated. Each fault is also a faint band
through all lanes, so that its effects appear below it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from bindery_e2e.judging.figures import FaultFigures, Figures

WIDTH: Final = 1160
LEFT: Final = 64
RIGHT: Final = 16
FAULT_HEIGHT: Final = 17
FAULT_ROWS_MAX: Final = 14
"""Maximum rows of bars; further overlapping faults share rows."""
LABELLED_MAX: Final = 40
"""Maximum number of faults with a full label. More faults are labelled with their number in the page's table."""
LANE_GAP: Final = 34
LETTER_WIDTH: Final = 6.8
"""Approximate width of a letter of the 11 px labels."""
TICKS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
TICKS_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class Axis:
    """Seconds to pixels."""

    seconds: float

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at_s, 0.0), self.seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class Lane:
    """A strip of the picture with a vertical axis from 0 to `top`."""

    y: float
    height: float
    top: float
    title: str

    def at(self, value: float) -> float:
        return self.y + self.height * (1 - min(value / self.top, 1.0))


def timeline(figures: Figures) -> str:
    """An <svg> element."""
    axis = Axis(max(figures.duration_s, 0.001))
    rows = rows_of(figures.faults, axis)
    count = max(rows, default=-1) + 1
    faults_y = 24.0
    y = faults_y + count * FAULT_HEIGHT + LANE_GAP
    width_s = figures.width_s
    rates = [(b.acknowledged / width_s, b.delivered / width_s) for b in figures.buckets]
    misses = [(b.refused / width_s, b.unknown / width_s) for b in figures.buckets]
    flow = Lane(y, 150, nice(max((max(pair) for pair in rates), default=1)), "messages per second")
    y += flow.height + LANE_GAP
    miss = Lane(y, 56, nice(max((sum(pair) for pair in misses), default=1)), "not acknowledged, messages per second")
    y += miss.height + LANE_GAP
    marks = Lane(y, 56, nice(max((count for _, count in figures.marked), default=1)), "ledgers under-replicated")
    bottom = y + marks.height
    starts = [bucket.at_s for bucket in figures.buckets]
    parts = [
        *_bands(figures.faults, axis, top=faults_y, bottom=bottom),
        *_ticks(axis, top=faults_y, bottom=bottom),
        _text(LEFT, 14, "faults", "title") if figures.faults else _text(LEFT, 14, "no faults", "title"),
        *_fault_bars(figures.faults, rows, axis, y=faults_y),
        *_frame(flow, [("acknowledged", "ok"), ("delivered", "delivered")]),
        area(starts, [rate for rate, _ in rates], width_s, axis, flow, "ok"),
        line(starts, [rate for _, rate in rates], width_s, axis, flow, "delivered"),
        *_frame(miss, [("refused", "refused"), ("unknown", "unknown")]),
        area(starts, [sum(pair) for pair in misses], width_s, axis, miss, "refused"),
        area(starts, [unknown for _, unknown in misses], width_s, axis, miss, "unknown"),
        *_frame(marks, [("marked", "marked")] if figures.marked else [("not checked", "none")]),
        _steps(figures.marked, axis, marks),
        *_notes(figures.notes, axis, bottom=bottom),
    ]
    height = bottom + 30
    label = escape(f"Timeline of {figures.duration_s:.0f} seconds with {len(figures.faults)} faults")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{label}">\n' + "\n".join(part for part in parts if part) + "\n</svg>"
    )


def rows_of(faults: Sequence[FaultFigures], axis: Axis) -> list[int]:
    """The row of each fault. Bars and labels of one row do not overlap unless FAULT_ROWS_MAX is reached."""
    free: list[float] = []
    found = []
    is_crowded = len(faults) > LABELLED_MAX
    for fault in faults:
        left, right = _extent(fault, axis, is_crowded)
        row = next((row for row, until in enumerate(free) if until <= left), None)
        if row is None and len(free) < FAULT_ROWS_MAX:
            free.append(0.0)
            row = len(free) - 1
        if row is None:
            row = min(range(len(free)), key=lambda candidate: free[candidate])
        free[row] = max(free[row], right + 8)
        found.append(row)
    return found


def nice(value: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that is not below `value`."""
    scale = 1.0
    while True:
        for step in (1.0, 2.0, 5.0):
            if value <= step * scale:
                return step * scale
        scale *= 10


def clock(seconds: float) -> str:
    """The time as m:ss, or as h:mm:ss from one hour on."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def area(starts: Sequence[float], values: Sequence[float], width_s: float, axis: Axis, lane: Lane, name: str) -> str:
    """Values as steps, filled down to zero."""
    if not any(values):
        return ""
    points = [f"M{axis.x(starts[0]):.1f} {lane.at(0):.1f}"]
    for start, value in zip(starts, values, strict=True):
        y = lane.at(value)
        points.append(f"L{axis.x(start):.1f} {y:.1f}L{axis.x(start + width_s):.1f} {y:.1f}")
    points.append(f"V{lane.at(0):.1f}Z")
    return f'<path class="area {name}" d="{"".join(points)}"/>'


def line(starts: Sequence[float], values: Sequence[float], width_s: float, axis: Axis, lane: Lane, name: str) -> str:
    if not any(values):
        return ""
    points = " ".join(
        f"{axis.x(start + width_s / 2):.1f},{lane.at(value):.1f}" for start, value in zip(starts, values, strict=True)
    )
    return f'<polyline class="line {name}" points="{points}"/>'


def _steps(marked: Sequence[tuple[float, int]], axis: Axis, lane: Lane) -> str:
    if not marked:
        return ""
    points = [f"M{axis.x(marked[0][0]):.1f} {lane.at(0):.1f}"]
    points += [f"H{axis.x(at):.1f}V{lane.at(count):.1f}" for at, count in marked]
    return f'<path class="area marked" d="{"".join(points)}H{axis.x(axis.seconds):.1f}V{lane.at(0):.1f}Z"/>'


def _extent(fault: FaultFigures, axis: Axis, is_crowded: bool) -> tuple[float, float]:
    """Left and right edge of bar and label together."""
    begin, end = _bar(fault, axis)
    width = len(_label(fault, is_crowded)) * LETTER_WIDTH + 6
    return (begin, max(end, begin + width)) if _label_fits(begin, width) else (begin - width, end)


def _label_fits(begin: float, width: float) -> bool:
    """Whether the label fits to the right of the bar's begin; otherwise it is placed left of the bar."""
    return begin + width < WIDTH - RIGHT


def _bar(fault: FaultFigures, axis: Axis) -> tuple[float, float]:
    begin = axis.x(fault.begin_s)
    end = axis.x(axis.seconds if fault.end_s is None else fault.end_s)
    return begin, max(end, begin + 3)


def _label(fault: FaultFigures, is_crowded: bool = False) -> str:
    return str(fault.number) if is_crowded else f"{fault.number} {fault.fault} {fault.target}".strip()


def _fault_bars(faults: Sequence[FaultFigures], rows: Sequence[int], axis: Axis, *, y: float) -> list[str]:
    is_crowded = len(faults) > LABELLED_MAX
    parts = []
    for fault, row in zip(faults, rows, strict=True):
        begin, end = _bar(fault, axis)
        top = y + row * FAULT_HEIGHT
        name = {"ok": "healed", "not offered": "absent"}.get(fault.outcome, "broken")
        label = _label(fault, is_crowded)
        is_right = _label_fits(begin, len(label) * LETTER_WIDTH + 6)
        at, anchor = (begin + 4, "start") if is_right else (begin - 4, "end")
        title = f"{_label(fault)}: {fault.outcome}, {clock(fault.begin_s)}"
        title += "" if fault.end_s is None else f" to {clock(fault.end_s)}"
        parts.append(
            f'<g><title>{escape(title)}</title><rect class="fault {name}" x="{begin:.1f}" y="{top:.1f}" '
            f'width="{end - begin:.1f}" height="{FAULT_HEIGHT - 3}" rx="2"/>'
            f'<text class="label" text-anchor="{anchor}" x="{at:.1f}" y="{top + 11:.1f}">{escape(label)}</text></g>'
        )
    return parts


def _bands(faults: Sequence[FaultFigures], axis: Axis, *, top: float, bottom: float) -> list[str]:
    parts = []
    for fault in faults:
        if fault.outcome != "not offered":
            begin, end = _bar(fault, axis)
            parts.append(
                f'<rect class="band" x="{begin:.1f}" y="{top:.1f}" width="{end - begin:.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
    return parts


def _ticks(axis: Axis, *, top: float, bottom: float) -> list[str]:
    step = next((tick for tick in TICKS if axis.seconds / tick <= TICKS_MAX), TICKS[-1])
    parts = []
    for number in range(int(axis.seconds // step) + 1):
        x = axis.x(number * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        parts.append(_text(x, bottom + 16, clock(number * step), "tick", anchor="middle"))
    return parts


def _frame(lane: Lane, legend: Sequence[tuple[str, str]]) -> list[str]:
    parts = [_text(LEFT, lane.y - 8, lane.title, "title")]
    x = LEFT + len(lane.title) * 7.8 + 14
    for words, name in legend:
        if name != "none":
            parts.append(f'<rect class="key {name}" x="{x:.1f}" y="{lane.y - 17:.1f}" width="10" height="10" rx="2"/>')
        parts.append(_text(x + 14, lane.y - 8, words, "tick"))
        x += 14 + len(words) * LETTER_WIDTH + 16
    for value in (0.0, lane.top / 2, lane.top):
        y = lane.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", "tick", anchor="end"))
    return parts


def _notes(notes: Sequence[tuple[float, str]], axis: Axis, *, bottom: float) -> list[str]:
    return [
        f"<g><title>{escape(f'{clock(at)} {text}')}</title>"
        f'<circle class="note" cx="{axis.x(at):.1f}" cy="{bottom:.1f}" r="4"/></g>'
        for at, text in notes
    ]


def _text(x: float, y: float, words: str, name: str, *, anchor: str = "start") -> str:
    return f'<text class="{name}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'

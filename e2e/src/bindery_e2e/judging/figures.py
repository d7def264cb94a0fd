"""Compute the figures of a run: gaps without a produce, latencies, and messages per second. Pure functions.

A *gap* of a topic is the time between two consecutive successful produces of any producers. The first gap begins with
the first request, the last one ends with the end of the last request. The gap of a fault is the longest gap that
overlaps the fault; it may begin before the fault and end after it. The parts of a gap before the end of an earlier
fault, and after the begin of a later fault, do not count, because they belong to that other fault.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bindery_e2e.judging.observed import FaultSeen, Observed, Request

NS: Final = 10**9
BUCKETS_MAX: Final = 300
"""Maximum number of columns of the timeline."""


class Gaps:
    def __init__(self, requests: Sequence[Request]) -> None:
        """`requests`: sorted by the time of their end."""
        self._times: dict[str, list[int]] = {}
        last: dict[str, int] = {}
        for request in requests:
            times = self._times.setdefault(request.topic, [])
            if not times:
                times.append(request.begun)
            times[0] = min(times[0], request.begun)
            last[request.topic] = request.ended
            if request.done:
                times.append(request.ended)
        for topic, ended in last.items():
            self._times[topic].append(ended)

    def of_fault(self, seen: FaultSeen, observed: Observed) -> tuple[float, str]:
        """(seconds, topic) of the longest gap of the fault."""
        end = end_of(seen, observed)
        others = [fault for fault in observed.faults.values() if fault.outcome != "not offered" and fault.n != seen.n]
        since = max((until for fault in others if (until := end_of(fault, observed)) <= seen.begin), default=0)
        until = min((fault.begin for fault in others if fault.begin >= end), default=observed.last_at)
        return self.longest(seen.begin, end, since=since, until=until)

    def longest(self, begin: int, end: int, *, since: int = 0, until: int | None = None) -> tuple[float, str]:
        """(seconds, topic) of the longest gap that overlaps [begin, end]; 0 s if there is none.

        Only the part of a gap between `since` and `until` counts. Times are in nanoseconds.
        """
        longest, where = 0, ""
        for topic, times in self._times.items():
            first = max(0, bisect_left(times, begin) - 1)
            for before, after in itertools.pairwise(times[first : bisect_left(times, end) + 1]):
                length = (after if until is None else min(after, until)) - max(before, since)
                if length > longest:
                    longest, where = length, topic
        return longest / NS, where


def end_of(seen: FaultSeen, observed: Observed) -> int:
    """End of a fault; a fault without an end lasts until the end of the history."""
    return observed.last_at if seen.end is None else seen.end


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of `values` do not exceed; None if `values` is empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


@dataclass(frozen=True, slots=True)
class Span:
    """Produces that overlap a period. Counts are messages; latencies are those of successful requests, in ms."""

    seconds: float
    acknowledged: int
    refused: int
    unknown: int
    gap_s: float
    gap_topic: str
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class FaultFigures:
    number: int
    """Position in the order in which faults began, from 1."""
    fault: str
    target: str
    begin_s: float
    """Seconds since the begin of the history."""
    end_s: float | None
    """Seconds since the begin of the history; None: the history has no end of the fault."""
    outcome: str
    span: Span
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Column of the timeline: messages in `width_s` seconds from `at_s` on."""

    at_s: float
    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    delivered: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    duration_s: float
    whole: Span
    faults: list[FaultFigures]
    width_s: float
    """Width of a bucket in seconds."""
    buckets: list[Bucket]
    marked: list[tuple[float, int]]
    """(seconds, ledgers marked as under-replicated) of each observation."""
    notes: list[tuple[float, str]]


def figures_of(observed: Observed) -> Figures:
    began, ended = observed.first_at, max(observed.last_at, observed.first_at + 1)
    spans = Spans(observed.requests)
    width = max(NS, -(-(ended - began) // BUCKETS_MAX))
    return Figures(
        duration_s=(ended - began) / NS,
        whole=spans.between(began, ended),
        faults=[_fault(number, seen, spans, observed) for number, seen in enumerate(observed.faults.values(), 1)],
        width_s=width / NS,
        buckets=_buckets(observed, began=began, ended=ended, width=width),
        marked=[((at - began) / NS, int(v["count"])) for at, v in observed.series.get("under-replicated", [])],
        notes=[((at - began) / NS, str(v["text"])) for at, v in observed.series.get("note", [])],
    )


class Spans:
    """Computes the figures of any period without a scan of all requests."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._ends = [request.ended for request in requests]
        self._longest = max((request.ended - request.begun for request in requests), default=0)
        self._gaps = Gaps(requests)

    def of_fault(self, seen: FaultSeen, observed: Observed) -> Span:
        gap_s, topic = self._gaps.of_fault(seen, observed)
        return replace(self.between(seen.begin, end_of(seen, observed)), gap_s=gap_s, gap_topic=topic)

    def between(self, begin: int, end: int) -> Span:
        counts = [0, 0, 0]
        latencies: list[float] = []
        for request in itertools.islice(self._requests, bisect_left(self._ends, begin), None):
            if request.ended > end + self._longest:
                break
            if request.begun > end:
                continue
            counts[0] += request.done
            counts[1] += request.refused
            counts[2] += request.unknown
            if request.done:
                latencies.append((request.ended - request.begun) / 1e6)
        gap_s, topic = self._gaps.longest(begin, end)
        return Span(
            seconds=(end - begin) / NS,
            acknowledged=counts[0],
            refused=counts[1],
            unknown=counts[2],
            gap_s=gap_s,
            gap_topic=topic,
            p50_ms=quantile(latencies, 0.5),
            p99_ms=quantile(latencies, 0.99),
        )


def _fault(number: int, seen: FaultSeen, spans: Spans, observed: Observed) -> FaultFigures:
    return FaultFigures(
        number=number,
        fault=seen.fault,
        target=seen.target,
        begin_s=(seen.begin - observed.first_at) / NS,
        end_s=None if seen.end is None else (seen.end - observed.first_at) / NS,
        outcome=seen.outcome or "never ended",
        span=spans.of_fault(seen, observed),
        values=seen.values,
    )


def _buckets(observed: Observed, *, began: int, ended: int, width: int) -> list[Bucket]:
    rows = [[0, 0, 0, 0] for _ in range((ended - began) // width + 1)]
    for request in observed.requests:
        row = rows[(request.ended - began) // width]
        row[0] += request.done
        row[1] += request.refused
        row[2] += request.unknown
    for at, count in observed.deliveries:
        rows[(at - began) // width][3] += count
    return [Bucket(index * width / NS, *row) for index, row in enumerate(rows)]

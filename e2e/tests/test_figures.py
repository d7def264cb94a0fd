"""Goal: a fault has the gaps and latencies that overlap it, also those that begin before it or end after it."""

import itertools
import random

import pytest
from bindery_e2e.judging.figures import BUCKETS_MAX, NS, Gaps, Spans, figures_of, quantile
from bindery_e2e.judging.observed import Observed, Request
from histories import MS, TRUTH, Story, good


def requests(*ends_s: float, topic: str = "t", took_s: float = 0.1, done: int = 1) -> list[Request]:
    return [Request(topic, int((end - took_s) * NS), int(end * NS), done, 0, 0) for end in ends_s]


@pytest.mark.parametrize(
    ("begin_s", "end_s", "gap_s"),
    [(1.5, 1.6, 1), (2.5, 2.6, 5), (1.5, 2.5, 5), (7.5, 99, 1), (0, 1.5, 1), (6, 6, 5), (100, 200, 0)],
    ids=["before", "inside", "reaches into it", "after", "the first", "a moment", "long after"],
)
def test_the_longest_overlapping_gap_is_found(begin_s: float, end_s: float, gap_s: float) -> None:
    gaps = Gaps(requests(1, 2, 7, 8))
    assert gaps.longest(int(begin_s * NS), int(end_s * NS)) == (gap_s, "t" if gap_s else "")


def test_a_topic_that_does_not_recover_has_a_gap_until_the_last_request() -> None:
    refused = requests(4, 9, done=0, topic="u")
    both = sorted([*requests(1, 2, 3, 4, 5, 6, 7, 8, 9), *requests(1, topic="u"), *refused], key=lambda r: r.ended)
    assert Gaps(both).longest(2 * NS, 3 * NS) == (8.0, "u")


def test_a_gap_belongs_to_the_fault_that_caused_it() -> None:
    """The second fault begins directly after the first, and from then on topics have no produce for three seconds."""
    story = Story()
    story.sent("p0", [0], ["1:0:-1:-1"])
    for number in (100, 101):
        story.add("fault-begin", number, fault="kill", target="b0")
        story.wait(1)
        story.sent("p0", [number], [f"1:{number}:-1:-1"])
        story.add("fault-end", number, outcome="ok")
    story.add("fault-begin", 102, fault="stop node", target="n1")
    story.add("fault-end", 102, outcome="not offered")
    story.wait(3)
    story.sent("p0", [1], ["1:200:-1:-1"])
    first, second, _ = figures_of(Observed(story.records)).faults
    assert first.span.gap_s == pytest.approx(1, abs=0.01)
    assert second.span.gap_s == pytest.approx(3, abs=0.01)


def test_gaps_agree_with_a_comparison_of_every_pair() -> None:
    lots = random.Random(5)
    ends = sorted(lots.uniform(0, 100) for _ in range(60))
    gaps = Gaps(requests(*ends))
    times = [int((ends[0] - 0.1) * NS), *(int(end * NS) for end in ends)]
    for _ in range(300):
        begin, end = sorted(int(lots.uniform(-5, 105) * NS) for _ in range(2))
        pairs = [b - a for a, b in itertools.pairwise(times) if b >= begin and a < end]
        assert gaps.longest(begin, end)[0] == max(pairs, default=0) / NS


def test_a_span_counts_requests_that_overlap_it() -> None:
    lots = random.Random(6)
    all_of_them = []
    for _ in range(400):
        begun = lots.randrange(100 * NS)
        all_of_them.append(Request("t", begun, begun + lots.randrange(5 * NS), *(lots.randrange(3) for _ in range(3))))
    all_of_them.sort(key=lambda request: request.ended)
    spans = Spans(all_of_them)
    for _ in range(100):
        begin, end = sorted(lots.randrange(100 * NS) for _ in range(2))
        span = spans.between(begin, end)
        mine = [request for request in all_of_them if request.ended >= begin and request.begun <= end]
        assert span.acknowledged == sum(request.done for request in mine)
        assert span.unknown == sum(request.unknown for request in mine)
        latencies = [(request.ended - request.begun) / 1e6 for request in mine if request.done]
        assert span.p99_ms == quantile(latencies, 0.99)


def test_a_quantile_is_the_smallest_sufficient_value() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3], 0.99) == 3
    assert quantile([4, 1, 3, 2], 0.5) == 2
    assert quantile(list(range(1, 101)), 0.99) == 99


def test_every_message_is_in_one_bucket() -> None:
    story = good()
    for number in range(3):
        story.wait(10)
        story.add("observation", what="under-replicated", count=number)
    story.add("fault-begin", 100, fault="kill", target="b0")
    story.wait(0.5)
    story.read(*TRUTH)
    figures = figures_of(Observed(story.records))
    assert sum(bucket.acknowledged for bucket in figures.buckets) == 5
    assert sum(bucket.refused for bucket in figures.buckets) == 1
    assert sum(bucket.unknown for bucket in figures.buckets) == 1
    assert sum(bucket.delivered for bucket in figures.buckets) == 12
    assert [count for _, count in figures.marked] == [0, 1, 2]
    assert (figures.faults[0].end_s, figures.faults[0].outcome) == (None, "never ended")
    assert figures.duration_s == pytest.approx((story.now - MS) / NS)


def test_a_long_run_has_a_limited_number_of_buckets() -> None:
    story = good()
    story.wait(36_000)
    story.read(*TRUTH)
    figures = figures_of(Observed(story.records))
    assert len(figures.buckets) <= BUCKETS_MAX + 1
    assert figures.buckets[-1].at_s + figures.width_s >= figures.duration_s

"""Goal: the linear validators agree with the definitions on random histories with random errors.

The oracle compares all pairs and counts by searching: slow, but a direct translation of the definitions.
"""

from dataclasses import dataclass, field
from typing import Any

from bindery_e2e.judging.validate import judge
from histories import Story, digest
from hypothesis import given, settings
from hypothesis import strategies as st

PRODUCERS = ("p0", "p1", "p2")
OUTCOMES = ("ok", "ok", "ok", "unknown", "failed")


@dataclass
class Message:
    producer: str
    sequence: int
    request: int
    index: int
    sent_at: int
    outcome: str = ""
    id: str = ""
    acknowledged_at: int = 0


@dataclass
class World:
    """A history of produces, and the messages that a correct cluster stores."""

    story: Story = field(default_factory=Story)
    messages: list[Message] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Producers alternate at random. A request is stored between its begin and its end, or later if its outcome is
    unknown."""
    world = World()
    open_requests: dict[str, list[Message]] = {}
    late: list[Message] = []
    next_sequence = dict.fromkeys(PRODUCERS, 0)

    def store(message: Message) -> None:
        message.id = f"1:{len(world.rows)}:-1:-1"
        name = digest(message.producer, message.sequence)
        world.rows.append([message.id, message.producer, message.sequence, name])

    for producer in draw(st.lists(st.sampled_from(PRODUCERS), max_size=24)):
        messages = open_requests.pop(producer, None)
        if messages is None:
            first, count = next_sequence[producer], draw(st.integers(1, 3))
            n = world.story.send(producer, *range(first, first + count))
            next_sequence[producer] += count
            now = world.story.now
            messages = [Message(producer, first + i, n, i, now) for i in range(count)]
            open_requests[producer] = messages
            world.messages += messages
            continue
        if late and draw(st.booleans()):
            store(late.pop())
        for message in messages:
            message.outcome = draw(st.sampled_from(OUTCOMES))
            if message.outcome == "ok":
                store(message)
            elif message.outcome == "unknown" and draw(st.booleans()):
                late.append(message)
        ids = [message.id if message.outcome == "ok" else message.outcome for message in messages]
        world.story.add("ok", messages[0].request, ids=ids)
        for message in messages:
            message.acknowledged_at = world.story.now
    for messages in open_requests.values():
        for message in messages:
            message.outcome = "unknown"
    return world


@st.composite
def damaged(draw: st.DrawFn, rows: list[list[Any]]) -> list[list[Any]]:
    rows = [list(row) for row in rows]
    for _ in range(draw(st.integers(0, 3))):
        if not rows:
            break
        at, other = (draw(st.integers(0, len(rows) - 1)) for _ in range(2))
        match draw(st.sampled_from(("swap", "drop", "double", "again", "payload", "foreign", "exchange"))):
            case "swap":
                rows[at], rows[other] = rows[other], rows[at]
            case "drop":
                del rows[at]
            case "double":
                rows.insert(other, list(rows[at]))
            case "again":
                rows.insert(other, [f"2:{len(rows)}:-1:-1", *rows[at][1:]])
            case "payload":
                rows[at][3] = "changed"
            case "foreign":
                rows.insert(at, [f"3:{len(rows)}:-1:-1", "p0", 9999, "x"])
            case "exchange":
                rows[at][1:], rows[other][1:] = rows[other][1:], rows[at][1:]
    return rows


def oracle(messages: list[Message], rows: list[list[Any]]) -> set[str]:
    found = set()
    by_key = {(m.producer, m.sequence): m for m in messages}
    for m in messages:
        if m.outcome == "ok":
            there = [r for r in rows if r[0] == m.id]
            if not there:
                found.add("lost")
            elif (there[-1][1], there[-1][2]) != (m.producer, m.sequence):
                found.add("changed")
    unique = [r for i, r in enumerate(rows) if r[0] not in [x[0] for x in rows[:i]]]
    if len(unique) < len(rows):
        found.add("duplicate")
    for r in unique:
        m = by_key.get((r[1], r[2]))
        if m is None or m.outcome == "failed":
            found.add("phantom")
        if m is not None and r[3] != digest(m.producer, m.sequence):
            found.add("changed")
        if m is not None and m.outcome != "failed" and sum(x[1:3] == r[1:3] for x in unique) > 1:
            found.add("duplicate")
    for i, before in enumerate(rows):
        for behind in rows[i + 1 :]:
            a, b = by_key.get((before[1], before[2])), by_key.get((behind[1], behind[2]))
            if a is None or b is None or b.outcome != "ok" or b.id != behind[0]:
                continue
            if b.acknowledged_at < a.sent_at:
                found.add("reordered")
            if a.outcome == "ok" and a.id == before[0] and a.request == b.request and a.index > b.index:
                found.add("reordered")
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_validators_agree_with_the_definitions(data: st.DataObject) -> None:
    world = data.draw(worlds())
    rows = data.draw(damaged(world.rows))
    world.story.read(*rows)
    assert {finding.kind for finding in judge(world.story.records).findings} == oracle(world.messages, rows)


@settings(max_examples=80, deadline=None)
@given(worlds())
def test_a_correct_cluster_is_always_good(world: World) -> None:
    world.story.read(*world.rows)
    assert not judge(world.story.records).findings


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_exclusive_deliveries_agree_with_the_definition(data: st.DataObject) -> None:
    """Without lost responses: x is out of order if a later message was delivered before it."""
    count = data.draw(st.integers(1, 8))
    story = Story()
    story.subscribed("s", "exclusive")
    rows = [[f"1:{i}:-1:-1", "p0", i, digest("p0", i)] for i in range(count)]
    for row in rows:
        story.sent("p0", [row[2]], [row[0]])
    order = data.draw(st.lists(st.integers(0, count - 1), max_size=16))
    for at in order:
        story.received("s", rows[at], kind="exclusive")
    story.read(*rows)
    firsts = list(dict.fromkeys(order))
    late = sum(any(earlier > x for earlier in firsts[:i]) for i, x in enumerate(firsts))
    assert sum(finding.count for finding in judge(story.records).findings) == late

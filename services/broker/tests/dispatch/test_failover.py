"""The active consumer of a Failover subscription: Pulsar's own choices, and what must not change a choice."""

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bindery_broker.dispatch.failover import pick_active

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "pulsar_owners.json").read_text())[
    "failover"
]
TOPIC = "persistent://public/default/orders"


@dataclass(eq=False)
class Member:
    name: str
    priority: int = 0


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['topic'][-20:]}-{len(row['consumers'])}")
def test_the_active_consumer_is_the_one_that_pulsar_chooses(row: dict[str, Any]) -> None:
    members = [Member(name, priority) for name, priority in row["consumers"]]
    active = pick_active(members, partition=row["partition"], topic=row["topic"])
    assert members.index(active) == row["active"]


@pytest.mark.parametrize("partition", [-1, 0, 1, 2])
def test_the_order_of_joining_does_not_matter(partition: int) -> None:
    members = [Member("c"), Member("a"), Member("b"), Member("0", 1)]
    chosen = {pick_active(order, partition=partition, topic=TOPIC).name for order in itertools.permutations(members)}
    assert len(chosen) == 1
    assert "0" not in chosen


def test_partitions_are_spread_over_the_consumers_with_the_best_priority():
    members = [Member("c"), Member("a"), Member("b"), Member("later", 5)]
    active = [pick_active(members, partition=partition, topic=TOPIC).name for partition in range(6)]
    assert active == ["a", "b", "c", "a", "b", "c"]


def test_other_topics_are_spread_over_the_consumers():
    members = [Member(f"c{n}") for n in range(5)]
    shares = Counter(pick_active(members, partition=-1, topic=f"{TOPIC}-{n}").name for n in range(2_000))
    assert set(shares) == {member.name for member in members}
    assert min(shares.values()) > 0.6 * 400
    assert max(shares.values()) < 1.5 * 400


def test_a_consumer_that_is_not_active_leaves_without_a_change():
    members = [Member(f"c{n}") for n in range(6)]
    for number in range(50):
        topic = f"{TOPIC}-{number}"
        active = pick_active(members, partition=-1, topic=topic)
        for member in members:
            if member is not active:
                others = [other for other in members if other is not member]
                assert pick_active(others, partition=-1, topic=topic) is active

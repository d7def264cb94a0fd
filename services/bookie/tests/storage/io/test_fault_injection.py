"""Fault injection: rules print as they are read, affect only the selected operations, and bookies survive them."""

import errno
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import (
    OPERATIONS,
    RULES_MAX,
    DrillControl,
    DrillRule,
    FaultyDisk,
    FaultyKV,
    SlowDisk,
)
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_core.errors import BadRequest
from bindery_core.wire.messages import Status
from hypothesis import given
from hypothesis import strategies as st

PATTERNS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), min_size=1)


@given(
    operations=st.lists(st.sampled_from(sorted(OPERATIONS)), unique=True).map(tuple),
    pattern=PATTERNS,
    fail=st.sampled_from(["EIO", "ENOSPC"]),
    delay=st.sampled_from([0.0, 0.001, 2.5, 60.0]),
    chance=st.sampled_from([0.01, 0.5, 1.0]),
    counts=st.tuples(*[st.integers(0, 1000)] * 3),
)
def test_a_rule_prints_as_the_line_it_is_read_from(
    operations: tuple[str, ...], pattern: str, fail: str, delay: float, chance: float, counts: tuple[int, int, int]
) -> None:
    after, times, seed = counts
    rule = DrillRule(operations, pattern, fail, delay, chance, after, times, seed)
    assert DrillRule.parse(str(rule)) == rule


def test_a_parsed_rule_has_the_fields_of_its_line() -> None:
    text = "read_at,kv_get */shard-1/*.log fail EIO delay 0.5 chance 0.1 after 3 times 2 seed 7"
    assert str(DrillRule.parse(text)) == text
    assert str(DrillRule.parse("* '/my disk/*' delay 1.50")) == "* '/my disk/*' delay 1.5"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "are needed"),
        ("read_at", "are needed"),
        ("reed_at * fail EIO", "unknown operation"),
        ("read_at *", "needs fail or delay"),
        ("read_at * chance 0.5", "needs fail or delay"),
        ("read_at * fail", "has no value"),
        ("read_at * fail EWHAT", "unknown error name"),
        ("read_at * delay 61", "at most 60"),
        ("read_at * delay nan", "at most 60"),
        ("read_at * delay 0", "above 0"),
        ("read_at * fail EIO chance 1.1", "at most 1"),
        ("read_at * fail EIO times 0", "1 or more"),
        ("read_at * fail EIO times x", "invalid literal"),
        ("read_at * fail EIO fail EIO", "repeated"),
        ("read_at * fail EIO until 3", "unknown or repeated"),
        ("read_at '*", "quotation"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        DrillRule.parse(text)


def test_faults_and_delays_affect_the_selected_operations(tmp_path: Path) -> None:
    failing = {("create", f"{tmp_path}/no"), ("datasync", f"{tmp_path}/f"), ("kv_get", "db")}

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(errno.ENOSPC, "full") if (operation, path) in failing else None

    faulty = FaultyDisk(RealDisk(), fault)
    with pytest.raises(OSError, match="full"):
        faulty.create(f"{tmp_path}/no")
    file = faulty.create(f"{tmp_path}/f")
    file.write_at(b"data", 0)
    with pytest.raises(OSError, match="full"):
        file.datasync()
    file.sync()
    kv = FaultyKV(MemoryKV(), "db", fault)
    kv.write_batch([(b"a", b"1")])
    with pytest.raises(OSError, match="full"):
        kv.get(b"a")
    assert kv.get_many([b"a"]) == [b"1"]
    slept: list[float] = []
    slow = SlowDisk(RealDisk(), lambda operation, path: 0.5 if operation == "sync" else 0.0, slept.append)
    slow.create(f"{tmp_path}/h").sync()
    assert slept == [0.5]


def outcomes(control: DrillControl, disk: Any, count: int) -> str:
    """Read this number of times: `.` succeeded, `x` failed."""
    reader = disk.open_read("/d/f")
    marks = ""
    for _ in range(count):
        try:
            reader.read_at(0, 1)
        except OSError as error:
            marks += "x" if (error.errno, error.filename) == (errno.EIO, "/d/f") else "?"
        else:
            marks += "."
    return marks


@pytest.fixture
def drilled(world: Any) -> tuple[DrillControl, Any, list[float]]:
    slept: list[float] = []
    control = DrillControl(sleep=slept.append)
    world.disk.create("/d/f").write_at(b"x", 0)
    return control, control.wrap_disk(world.disk), slept


def test_after_and_times_count_matching_operations(drilled: tuple[DrillControl, Any, list[float]]) -> None:
    control, disk, slept = drilled
    control.set_rules(["read_at /d/* fail EIO after 2 times 3", "open_read * delay 2"])
    assert outcomes(control, disk, 8) == "..xxx..."
    assert slept == [2]
    first, second = control.states()
    assert (first.rule, first.matched, first.acted, first.is_spent) == (
        "read_at /d/* fail EIO after 2 times 3",
        8,
        3,
        True,
    )
    assert (second.matched, second.acted, second.is_spent) == (1, 1, False)
    control.clear()
    assert control.states() == []
    assert outcomes(control, disk, 3) == "..."


def test_chance_is_reproducible_by_the_seed_of_the_rule(drilled: tuple[DrillControl, Any, list[float]]) -> None:
    control, disk, _ = drilled
    seen = []
    for seed in (1, 2, 1):
        control.set_rules([f"read_at * fail EIO chance 0.3 seed {seed}"])
        seen.append(outcomes(control, disk, 200))
    assert seen[0] == seen[2] != seen[1]
    assert 30 < seen[0].count("x") < 90


def test_an_invalid_set_of_rules_changes_nothing(drilled: tuple[DrillControl, Any, list[float]]) -> None:
    control, _, _ = drilled
    before = control.set_rules(["read_at * fail EIO"])
    for wrong in (["* * delay 1", "nonsense"], ["* * delay 1"] * (RULES_MAX + 1)):
        with pytest.raises(BadRequest):
            control.set_rules(wrong)
        assert control.states() == before


async def test_a_running_bookie_survives_a_full_and_a_failing_disk(kit: Any) -> None:
    control = DrillControl(sleep=lambda seconds: None)
    world = kit.World(wrap=control.wrap_disk)
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 20)
    control.set_rules(["write_at,create *.log fail ENOSPC"])
    with pytest.raises(OSError, match="flush failed"):
        await engine.flush()
    assert await kit.read(engine, *[(5, e) for e in range(20)]) == bodies
    control.clear()
    await engine.flush()
    control.set_rules(["read_at *.log fail EIO times 1"])
    answers = [await kit.read(engine, (5, 0)) for _ in range(2)]
    assert answers == [[Status.IO_ERROR], [bodies[0]]]
    assert control.states()[0].is_spent
    control.clear()
    await engine.close()


async def test_a_failing_index_is_answered_with_an_error(kit: Any) -> None:
    control = DrillControl(sleep=lambda seconds: None)
    world = kit.World()
    open_kv = control.wrap_open_kv(lambda path: world.kv)

    engine = world.engine(open_kv=open_kv)
    await engine.open()
    bodies = await kit.fill(engine, 5, 3)
    await engine.flush()
    control.set_rules(["kv_floor */index fail EIO"])
    assert await kit.read(engine, (5, 1)) == [Status.IO_ERROR]
    control.clear()
    assert await kit.read(engine, (5, 1)) == [bodies[1]]
    await engine.close()

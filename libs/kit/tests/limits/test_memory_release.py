"""MemoryRelease: memory is returned after a peak, and not more often than needed."""

import gc
import weakref

from bindery_kit.limits.memory_release import DROP_SIZE, INTERVAL_S, MemoryRelease, release_memory


def test_a_fall_since_the_peak_releases_twice() -> None:
    calls: list[int] = []
    memory = MemoryRelease(lambda: calls.append(1))
    drop = DROP_SIZE
    sizes = [0, drop - 1, 0, 3 * drop, 2 * drop + 1, 2 * drop, 2 * drop, 2 * drop, drop + 1, drop, 0, 0, 0]
    released = [memory.check(size, peak_size=size, now_s=number * INTERVAL_S) for number, size in enumerate(sizes)]
    assert [number for number, one in enumerate(released) if one] == [5, 6, 9, 10, 11]
    assert len(calls) == 5


def test_it_can_be_repeated_more_often() -> None:
    memory = MemoryRelease(lambda: None, repeats=2)
    memory.check(2 * DROP_SIZE, now_s=0)
    assert [memory.check(0, now_s=number * INTERVAL_S) for number in range(1, 6)] == [True, True, True, False, False]


def test_releases_are_rare_and_none_is_forgotten() -> None:
    memory = MemoryRelease(lambda: None)
    assert not memory.check(9 * DROP_SIZE, peak_size=0, now_s=100.0)
    assert memory.check(DROP_SIZE, peak_size=0, now_s=101.0)
    assert not memory.check(9 * DROP_SIZE, peak_size=0, now_s=102.0)
    assert not memory.check(0, peak_size=0, now_s=103.0)
    assert not memory.check(0, peak_size=0, now_s=101.0 + INTERVAL_S - 0.1)
    assert memory.check(0, peak_size=0, now_s=101.0 + INTERVAL_S)


def test_a_peak_between_two_checks_counts() -> None:
    memory = MemoryRelease(lambda: None)
    assert not memory.check(0, peak_size=DROP_SIZE - 1, now_s=0.0)
    assert memory.check(0, peak_size=DROP_SIZE, now_s=1.0)
    assert not memory.check(0, peak_size=DROP_SIZE, now_s=2.0)
    assert memory.check(0, peak_size=0, now_s=1.0 + INTERVAL_S)


def test_cyclic_garbage_is_collected() -> None:
    class Node:
        itself: "Node"

    gc.disable()
    try:
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
        assert gone() is not None
        release_memory()
        assert gone() is None
    finally:
        gc.enable()

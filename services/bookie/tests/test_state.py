"""A bookie is read-only exactly while at least one of its parts has a reason."""

import pytest
from bindery_bookie.state import READ_ONLY_ADMIN, READ_ONLY_DISK, BookieState


def test_a_new_bookie_neither_serves_nor_refuses() -> None:
    state = BookieState()
    assert (state.running, state.shutting_down, state.registered, state.high_priority_writes) == (
        False,
        False,
        False,
        False,
    )
    assert (state.read_only, state.reasons) == (False, {})
    assert state.membership == {"intent": "active", "sinceMs": 0, "untilMs": None, "reason": "", "by": ""}


def test_each_part_removes_only_its_own_reason() -> None:
    state = BookieState()
    state.set_read_only(READ_ONLY_DISK, "full")
    state.set_read_only(READ_ONLY_ADMIN, "an operator")
    state.set_read_only(READ_ONLY_ADMIN, None)
    state.set_read_only(READ_ONLY_ADMIN, None)
    assert (state.read_only, state.reasons) == (True, {"disk": "full"})
    state.set_read_only(READ_ONLY_DISK, None)
    assert (state.read_only, state.reasons) == (False, {})


def test_reasons_are_a_copy() -> None:
    state = BookieState()
    state.reasons["disk"] = "not of the state"
    assert not state.read_only


@pytest.mark.parametrize(
    ("is_read_only", "high_priority_writes", "priority", "accepts"),
    [
        (False, False, 0, True),
        (False, False, 1, True),
        (True, False, 0, False),
        (True, False, 1, False),
        (True, True, 0, False),
        (True, True, 1, True),
        (True, True, -1, False),
    ],
)
def test_adds_of_high_priority_are_accepted_while_there_is_space(
    is_read_only: bool, high_priority_writes: bool, priority: int, accepts: bool
) -> None:
    state = BookieState()
    state.high_priority_writes = high_priority_writes
    state.set_read_only(READ_ONLY_DISK, "full" if is_read_only else None)
    assert state.accepts_add(priority=priority) is accepts


def test_listeners_are_called_when_a_part_sets_its_first_reason_or_removes_it() -> None:
    state = BookieState()
    seen: list[dict[str, str]] = []
    state.on_change(lambda: seen.append(state.reasons))
    state.on_change(lambda: seen.append({}))
    state.set_read_only("disk", None)
    state.set_read_only("disk", "90 % in use")
    state.set_read_only("disk", "99 % in use")
    assert seen == [{"disk": "90 % in use"}, {}]
    state.set_read_only("admin", "an operator")
    state.set_read_only("disk", None)
    assert seen[2:] == [{"disk": "99 % in use", "admin": "an operator"}, {}, {"admin": "an operator"}, {}]


def test_a_part_can_ask_for_the_reasons_of_others() -> None:
    state = BookieState()
    assert not state.has_reason_besides("disk")
    state.set_read_only("disk", "full")
    assert not state.has_reason_besides("disk")
    assert state.has_reason_besides("admin")
    state.set_read_only("admin", "an operator")
    assert state.has_reason_besides("disk")

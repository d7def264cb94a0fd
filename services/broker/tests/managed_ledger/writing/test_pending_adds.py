"""Groups of adds, and the result of an add whose ledger fails, whose deadline passes or whose topic ends."""

import asyncio

import pytest
from bindery_broker.managed_ledger.writing.pending_adds import GROUP_SIZE_MAX, Group, PendingAdds
from bindery_core.errors import (
    AddTimeout,
    BinderyError,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NotEnoughBookies,
    TopicFenced,
    TryAgain,
)
from bindery_pulsar.message_id import Position

Answer = asyncio.Future[list[Position]]


def add(pending: PendingAdds, *payloads: bytes, deadline: float = 10.0) -> Answer:
    future: Answer = asyncio.get_running_loop().create_future()
    pending.append(payloads, future, queued_at=0.0, deadline=deadline)
    return future


def send(pending: PendingAdds, first: int = 0) -> Group:
    group = pending.next_group(first)
    assert group is not None
    return group


def error_of(answer: Answer) -> BaseException | None:
    assert answer.done()
    return answer.exception()


async def test_adds_are_sent_in_groups_of_limited_size() -> None:
    pending = PendingAdds()
    half = bytes(GROUP_SIZE_MAX // 2)
    for payload in (half, half, b"x", bytes(GROUP_SIZE_MAX + 1), b"y"):
        add(pending, payload)
    groups = [send(pending), send(pending, 2), send(pending, 3), send(pending, 4)]
    assert [group.count for group in groups] == [2, 1, 1, 1]
    assert pending.next_group(5) is None


async def test_a_cancelled_add_is_not_sent() -> None:
    pending = PendingAdds()
    add(pending, b"abc").cancel()
    kept = add(pending, b"d")
    group = send(pending)
    assert (group.payloads(), pending.size) == ([b"d"], 1)
    group.is_stored = True
    pending.confirm(7)
    assert kept.result() == [Position(7, 0)]
    assert pending.size == 0


async def test_groups_are_confirmed_in_order() -> None:
    pending = PendingAdds()
    one, two = add(pending, b"a", b"bc"), None
    first = send(pending)
    two = add(pending, b"d")
    second = send(pending, 2)
    second.is_stored = True
    assert pending.confirm(7) == []
    assert not two.done()
    first.is_stored = True
    stored = pending.confirm(7)
    assert [(entries.positions, entries.size) for entries in stored] == [
        ([Position(7, 0), Position(7, 1)], 3),
        ([Position(7, 2)], 1),
    ]
    assert (one.result(), two.result()) == ([Position(7, 0), Position(7, 1)], [Position(7, 2)])
    assert (pending.size, pending.count) == (0, 0)


async def test_after_a_recovery_the_rest_of_an_add_is_sent_first() -> None:
    pending = PendingAdds()
    split, later = add(pending, b"a", b"b", b"c"), add(pending, b"d")
    send(pending, 5)
    (stored,) = pending.settle(7, 6)
    assert (stored.positions, list(stored.payloads), stored.size) == ([Position(7, 5)], [b"a"], 1)
    assert (pending.size, pending.has_in_flight) == (3, False)
    group = send(pending, 0)
    assert group.payloads() == [b"b", b"c", b"d"]
    group.is_stored = True
    pending.confirm(8)
    assert split.result() == [Position(7, 5), Position(8, 0), Position(8, 1)]
    assert later.result() == [Position(8, 2)]


@pytest.mark.parametrize(("found", "is_unknown"), [(0, False), (1, True)])
async def test_an_expired_add_is_unknown_if_part_of_it_is_stored(found: int, is_unknown: bool) -> None:
    pending = PendingAdds()
    answer = add(pending, b"a", b"b", deadline=10)
    send(pending)
    pending.settle(7, found)
    pending.expire(NotEnoughBookies("made up"), now=9.9, ledger_has_failed=True)
    assert not answer.done()
    pending.expire(NotEnoughBookies("made up"), now=10, ledger_has_failed=True)
    assert type(error_of(answer)) is (AddTimeout if is_unknown else NotEnoughBookies)
    assert pending.size == 0


async def test_an_add_in_flight_expires_only_if_its_ledger_failed() -> None:
    pending = PendingAdds()
    answer = add(pending, b"a", deadline=10)
    send(pending)
    pending.expire(TryAgain("made up"), now=10, ledger_has_failed=False)
    assert not answer.done()
    pending.expire(TryAgain("made up"), now=10, ledger_has_failed=True)
    assert isinstance(error_of(answer), AddTimeout)
    pending.settle(7, 0)
    assert (pending.size, pending.count) == (0, 0)


async def test_an_unsent_add_never_fails_as_unknown() -> None:
    pending = PendingAdds()
    answer = add(pending, b"a", deadline=10)
    pending.expire(MetadataOutcomeUnknown("made up"), now=10, ledger_has_failed=False)
    assert type(error_of(answer)) is MetadataUnavailable


@pytest.mark.parametrize(
    ("end", "sent", "queued"),
    [
        (TryAgain("made up"), AddTimeout, TryAgain),
        (TopicFenced("made up"), TopicFenced, TopicFenced),
    ],
)
async def test_the_end_of_the_topic_answers_every_add(
    end: BinderyError, sent: type[BinderyError], queued: type[BinderyError]
) -> None:
    pending = PendingAdds()
    in_flight = add(pending, b"a")
    send(pending)
    waiting = add(pending, b"b")
    pending.fail_all(end)
    assert (type(error_of(in_flight)), type(error_of(waiting))) == (sent, queued)
    assert error_of(waiting) is not end
    assert (pending.size, pending.count) == (0, 0)


async def test_the_next_deadline_is_the_earliest_of_the_unanswered_adds() -> None:
    pending = PendingAdds()
    assert pending.next_deadline() is None
    answered, other = add(pending, b"a", deadline=1), add(pending, b"b", deadline=2)
    send(pending)
    add(pending, b"c", deadline=3)
    assert pending.next_deadline() == 1
    answered.cancel()
    assert pending.next_deadline() == 2
    other.cancel()
    assert pending.next_deadline() == 3

"""Goal: each error of the delivery of delayed messages is found, and the figures of lateness are right."""

from array import array
from collections.abc import Iterable

import pytest
from bindery_e2e.judging.delays import Delays, Receipt, caught_up_at, judge_delays

DUE_AT = [10_000, 10_100, 10_200]


def receipt(
    begun: int, ended: int, got: Iterable[int] = (), acked: Iterable[int] = (), *, outcome: str = "ok"
) -> Receipt:
    return Receipt(begun, ended, outcome, array("q", got), array("q", acked))


def judged(*receipts: Receipt, drained: bool = True) -> Delays:
    return judge_delays(DUE_AT, receipts, drained=drained)


def test_messages_that_come_when_they_are_due_are_right() -> None:
    found = judged(
        receipt(9_000, 10_050, [0]), receipt(10_060, 10_250, [1, 2], [0]), receipt(10_250, 10_300, (), [1, 2])
    )
    assert not found.errors
    assert (found.delivered, found.repeated) == (3, 0)
    assert (found.steady.p50, found.steady.longest, found.steady.in_time) == (50, 150, 1.0)


def test_a_message_that_comes_early_is_found() -> None:
    found = judged(receipt(9_000, 10_150, [0, 1, 2]), receipt(10_200, 10_300, (), [0, 1, 2]))
    assert found.errors == {"early": 1}
    assert found.examples == ["early: message 2 came 50 ms before it was due"]


def test_a_message_that_never_comes_is_found() -> None:
    assert judged(receipt(9_000, 10_200, [0, 1]), receipt(10_300, 10_400, (), [0, 1])).errors == {"missing": 1}


def test_a_message_that_is_not_acknowledged_is_found() -> None:
    found = judged(receipt(9_000, 10_200, [0, 1, 2]), receipt(10_300, 10_400, (), [0, 1]))
    assert found.errors == {"missing": 1}


@pytest.mark.parametrize("drained", [True, False])
def test_an_acknowledgement_without_an_answer_counts_if_nothing_is_left(drained: bool) -> None:
    receipts = [receipt(9_000, 10_200, [0, 1, 2]), receipt(10_300, 10_400, (), [0, 1, 2], outcome="unknown")]
    assert judged(*receipts, drained=drained).errors == ({} if drained else {"missing": 3})


def test_a_message_that_comes_after_its_acknowledgement_was_answered_is_found() -> None:
    receipts = [
        receipt(9_000, 10_200, [0, 1, 2]),
        receipt(10_300, 10_400, (), [0, 1, 2]),
        receipt(10_350, 10_450, [0]),  # sent before the answer
        receipt(10_500, 10_600, [1]),
    ]
    found = judged(*receipts)
    assert found.errors == {"redelivered": 1}
    assert found.repeated == 1


@pytest.mark.parametrize("outcome", ["unknown", "failed"])
def test_a_message_may_come_again_if_its_acknowledgement_was_not_answered(outcome: str) -> None:
    receipts = [
        receipt(9_000, 10_200, [0, 1, 2]),
        receipt(10_300, 10_400, (), [0, 1, 2], outcome=outcome),
        receipt(10_500, 10_600, [0, 1, 2]),
        receipt(10_700, 10_800, (), [0, 1, 2]),
    ]
    found = judged(*receipts)
    assert not found.errors
    assert found.repeated == 3


def test_a_number_that_was_not_sent_is_found() -> None:
    receipts = [receipt(9_000, 10_200, [0, 1, 2, 3, -1]), receipt(10_300, 10_400, (), [0, 1, 2])]
    assert judged(*receipts).errors == {"phantom": 2}


def test_lateness_is_that_of_the_first_delivery_and_separate_for_disturbances() -> None:
    due_at = [1_000 * number for number in range(1, 1_001)]
    receipts = [receipt(due, due + number, [number]) for number, due in enumerate(due_at)]
    receipts.append(receipt(2_000_000, 2_000_001, (), range(1_000)))
    found = judge_delays(due_at, receipts, drained=True)
    steady = found.steady
    assert (steady.p50, steady.p99, steady.p999, steady.longest) == (499, 989, 998, 999)
    found = judge_delays(due_at, receipts, drained=True, disturbances=[(900_000, 2_000_000)])
    assert (found.steady.longest, found.steady.count, found.disturbed.count) == (898, 899, 101)


def test_caught_up_is_the_first_response_whose_messages_are_all_in_time() -> None:
    receipts = [receipt(10_000, 10_050, [0]), receipt(12_000, 12_100, [1]), receipt(12_200, 12_300)]
    assert caught_up_at(DUE_AT, receipts, since=9_000) == 10_050
    assert caught_up_at(DUE_AT, receipts, since=11_000) is None
    assert caught_up_at([*DUE_AT, 13_000], [*receipts, receipt(12_900, 13_500, [3])], since=11_000) == 13_500

"""Message ids as text, and their order."""

import pytest
from bindery_core.errors import BadRequest
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId, Position
from hypothesis import given
from hypothesis import strategies as st

TOP = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "message_id"),
    [
        ("5:0", MessageId(5, 0)),
        ("5:0:-1", MessageId(5, 0)),
        ("5:0:3", MessageId(5, 0, partition=3)),
        ("5:0:-1:2", MessageId(5, 0, batch_index=2)),
        (f"{TOP}:{TOP}:{2**31 - 1}:{2**31 - 1}", MessageId(TOP, TOP, 2**31 - 1, 2**31 - 1)),
    ],
)
def test_two_to_four_numbers_are_parsed(text: str, message_id: MessageId) -> None:
    assert MessageId.parse(text) == message_id


@given(st.integers(0, TOP), st.integers(0, TOP), st.integers(-1, 2**31 - 1), st.integers(-1, 2**31 - 1))
def test_printed_ids_are_parsed_unchanged(ledger_id: int, entry_id: int, batch_index: int, partition: int) -> None:
    message_id = MessageId(ledger_id, entry_id, batch_index, partition)
    assert MessageId.parse(str(message_id)) == message_id
    assert message_id == MessageId.of(message_id.position, batch_index=batch_index, partition=partition)


@pytest.mark.parametrize(
    "text",
    [
        "", "5", "5:", ":0", "5:0:0:0:0", "a:0", "5:0:x", " 5:0", "5:0\n", "+5:0", "05:0", "5:-2", "-1:0", "0:-1",
        "5:0:-2",
        "5.0:1", "\u0665:0", f"{TOP + 1}:0", f"0:{TOP + 1}", f"0:0:{2**31}", f"0:0:0:{2**31}", "9" * 10_000,
    ],
)  # fmt: skip
def test_anything_else_is_a_bad_request(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        MessageId.parse(text)
    assert len(str(caught.value)) < 250


def test_ids_are_ordered_by_ledger_then_entry_then_index() -> None:
    ids = [MessageId.parse(t) for t in ("1:9:-1:0", "2:0:-1:-1", "2:0:-1:0", "2:0:-1:1", "2:1:-1:0", "10:0:-1:0")]
    assert sorted([ids[3], ids[1], ids[5], ids[0], ids[4], ids[2]]) == ids
    assert EARLIEST < Position(0, -1) < Position(0, 0) < Position(1, 0) < LATEST
    assert str(Position(3, -1)) == "3:-1"

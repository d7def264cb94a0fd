"""AckState and its changes compared with a set of acknowledged messages, over ledgers that grow and roll."""

from bindery_broker.managed_ledger import BatchAck, Redelivered
from bindery_broker.managed_ledger.cursors.ack_state import AckState
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_pulsar.managed_ledger_codec import CursorState
from bindery_pulsar.message_id import Position
from bindery_pulsar.subscription_log import LogReplay, encode_change, encode_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

BATCH_SIZE = 3
PICK = st.integers(0, 10**6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 6)),
        st.tuples(st.just("roll"), st.just(0)),
        st.tuples(st.just("ack"), PICK),
        st.tuples(st.just("ack"), PICK),
        st.tuples(st.just("index"), PICK),
        st.tuples(st.just("cumulative"), PICK),
        st.tuples(st.just("seek"), PICK),
        st.tuples(st.just("reload"), st.just(0)),
    ),
    max_size=50,
)


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_acknowledgements_match_a_model_that_uses_a_set(steps: list[tuple[str, int]]) -> None:
    """Every message counts as (position, index) in the naive model; all entries are batches of three.

    The log has the changes of several steps in a record, and `reload` continues from it.
    """
    ledgers = LedgerList([LedgerRecord(ledger_id=4)])
    state = AckState(ledgers, CursorState(mark_delete=Position(4, -1)))
    entries: list[Position] = []
    acked: set[tuple[Position, int]] = set()
    log = list(encode_snapshot(state.frozen(), entry_id=0))

    def whole(position: Position) -> set[tuple[Position, int]]:
        return {(position, index) for index in range(BATCH_SIZE)}

    for kind, number in steps:
        entry = entries[number % len(entries)] if entries else None
        if kind == "grow":
            entries += [Position(ledgers.end.ledger_id, ledgers.end.entry_id + i) for i in range(number)]
            ledgers.grow(entries=number, size=number)
        elif kind == "roll" and ledgers.current.entries:
            ledgers.assign([*ledgers, LedgerRecord(ledger_id=ledgers.current.ledger_id + 3)])
        elif kind == "reload":
            log += encode_change(state.change(state.take_changes()), snapshot_entry=0, entry_id=len(log))
            replay = LogReplay()
            for entry_id, record in enumerate(log):
                replay.feed(entry_id, record)
            assert replay.state() == state.stored()
            state = AckState(ledgers, replay.state())
        elif entry is None:
            continue
        elif kind == "ack":
            _, completed = state.ack([entry], [])
            assert completed == ([] if whole(entry) <= acked else [entry])
            acked |= whole(entry)
        elif kind == "index":
            index = number % BATCH_SIZE
            _, completed = state.ack([], [BatchAck(entry, BATCH_SIZE, [index])])
            assert completed == ([entry] if whole(entry) - acked == {(entry, index)} else [])
            acked.add((entry, index))
        elif kind == "cumulative":
            state.ack_upto(entry)
            acked |= {item for other in entries if other <= entry for item in whole(other)}
        elif kind == "seek":
            state.seek(entry)
            acked = {item for other in entries if other < entry for item in whole(other)}

        done = [other for other in entries if whole(other) <= acked]
        assert [other for other in entries if state.is_acked(other)] == done
        assert state.backlog[0] == len(entries) - len(done)
        prefix = next((i for i, other in enumerate(entries) if other not in done), len(entries))
        assert state.mark_delete == (entries[prefix - 1] if prefix else Position(4, -1))
        for other in entries:
            remaining = state.remaining(other)
            expected = sum(1 << index for position, index in whole(other) - acked)
            assert remaining == (expected if 0 < expected < 2**BATCH_SIZE - 1 else None)
            following = [later for later in entries if later >= other and later not in done]
            assert state.next_unacked(other) == (following[0] if following else ledgers.end)


def test_a_trimmed_entry_cannot_be_acknowledged() -> None:
    """A late acknowledgement of a trimmed entry must leave no range behind: it could never be removed again."""
    ledgers = LedgerList([LedgerRecord(ledger_id=4, entries=3, size=3), LedgerRecord(ledger_id=7, entries=2, size=2)])
    state = AckState(ledgers, CursorState(mark_delete=Position(4, -1)))
    ledgers.drop_first(1)
    assert state.ack([Position(4, 1)], []) == (False, [])
    assert state.ack([], [BatchAck(Position(4, 1), BATCH_SIZE, [0])]) == (False, [])
    assert state.ack([], [BatchAck(Position(4, 2), BATCH_SIZE, [0, 1, 2])]) == (False, [])
    assert not state.acked
    assert not state.batches
    assert state.ack([Position(7, 0)], []) == (True, [Position(7, 0)])
    assert state.mark_delete == Position(7, 0)


def test_a_repeated_cumulative_acknowledgement_changes_nothing() -> None:
    ledgers = LedgerList([LedgerRecord(ledger_id=4, entries=5, size=5)])
    state = AckState(ledgers, CursorState(mark_delete=Position(4, -1)))
    assert state.ack_upto(Position(4, 2)) is True
    assert state.ack_upto(Position(4, 2)) is False
    assert state.ack_upto(Position(4, 1)) is False
    assert state.mark_delete == Position(4, 2)


def test_the_bytes_of_a_backlog_exclude_acknowledged_entries() -> None:
    ledgers = LedgerList(
        [LedgerRecord(ledger_id=1, entries=4, size=400), LedgerRecord(ledger_id=2, entries=4, size=80)]
    )
    state = AckState(ledgers, CursorState(mark_delete=Position(1, 1)))
    assert state.backlog == (6, 280)
    state.ack([Position(2, 0), Position(2, 2), Position(2, 3)], ())
    assert state.backlog == (3, 140)
    state.ack_upto(Position(2, 3))
    assert state.backlog == (0, 0)


def test_many_messages_of_a_very_large_batch_are_acknowledged_at_once() -> None:
    """A cumulative acknowledgement names up to a million messages: the time must not grow with their square."""
    ledgers = LedgerList([LedgerRecord(ledger_id=4, entries=2)])
    state = AckState(ledgers, CursorState(mark_delete=Position(4, -1)))
    batch, size = Position(4, 1), 1_000_000
    for indexes in (range(size // 2), [size - 1, size - 3, size - 1], [*range(size // 2, size - 4)], range(0)):
        acked = BatchAck(batch, size, indexes)
        state.check_batch(acked)
        assert state.ack((), (acked,)) == (bool(indexes), [])
    assert state.remaining(batch) == 0b101 << size - 4
    rest = BatchAck(batch, size, [size - 4, size - 2])
    assert state.ack((), (rest,)) == (True, [batch])


def test_the_size_of_the_state_includes_the_messages_of_batches() -> None:
    """The estimate is not below the record, and not many times as large."""
    ledgers = LedgerList([LedgerRecord(ledger_id=4, entries=200)])
    state = AckState(ledgers, CursorState(mark_delete=Position(4, -1)))
    assert state.size == 0
    count = 10_000
    state.ack((), [BatchAck(Position(4, n), count, range(n % 7, count, 3)) for n in range(100)])
    state.record_redeliveries([Redelivered(Position(4, n), (1 << count) // 3, 1 + n) for n in range(50, 150)])
    stored = sum(map(len, encode_snapshot(state.frozen(), entry_id=0)))
    assert stored <= state.size <= 2 * stored
    assert AckState(ledgers, state.stored()).size == state.size
    state.ack((), [BatchAck(Position(4, n), count, range(count)) for n in range(100)])
    state.ack_upto(Position(4, 199))
    assert state.size == 0

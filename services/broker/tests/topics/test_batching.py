"""Messages that share an entry, the ids of messages, and errors of encoding."""

import pytest
from bindery_broker.topics.batching import EntryPlan, encode_entries, message_ids, plan_entries
from bindery_core.errors import BadRequest, TooLarge
from bindery_pulsar.message_codec import METADATA_SIZE_MAX, PAYLOAD_SIZE_MAX, OutgoingMessage, decode_entry, read_head
from bindery_pulsar.message_id import MessageId, Position
from hypothesis import given, settings
from hypothesis import strategies as st


def message(payload: bytes = b"x", **fields: object) -> OutgoingMessage:
    return OutgoingMessage(payload=payload, **fields)  # type: ignore[arg-type]


def shape(plan: list[EntryPlan]) -> list[tuple[int, ...]]:
    return [entry.indexes for entry in plan]


def test_equal_messages_share_an_entry_and_a_single_one_is_not_a_batch() -> None:
    assert shape(plan_entries([message()] * 3)) == [(0, 1, 2)]
    assert shape(plan_entries([message()])) == [(0,)]
    assert plan_entries([]) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "k"},
        {"key": b"k"},
        {"ordering_key": b"o"},
        {"properties": {"a": "TAGS"}},
    ],
)
def test_a_change_of_key_or_tags_ends_an_entry(fields: dict[str, object]) -> None:
    plain, other = message(), message(**fields)
    assert shape(plan_entries([plain, plain, other, other, plain])) == [(0, 1), (2, 3), (4,)]


def test_a_delayed_message_is_never_in_a_batch() -> None:
    plain, delayed = message(), message(deliver_at_ms=5)
    plan = plan_entries([plain, plain, delayed, delayed, plain, plain, delayed])
    assert shape(plan) == [(0, 1), (2,), (3,), (4, 5), (6,)]
    entries = encode_entries([plain, plain, delayed], plan[:2], producer_name="p", publish_time_ms=1, sequence_id=0)
    heads = [read_head(entry) for entry in entries]
    assert [(head.is_batch, head.deliver_at_ms) for head in heads] == [(True, None), (False, 5)]


def test_other_differences_do_not_end_an_entry() -> None:
    messages = [message(properties={"a": "1"}), message(properties={"b": "2"}, event_time_ms=7), message(sequence_id=9)]
    assert shape(plan_entries(messages)) == [(0, 1, 2)]


def test_entries_are_bounded_in_count_and_size() -> None:
    assert shape(plan_entries([message()] * 5, messages_max=2)) == [(0, 1), (2, 3), (4,)]
    small, large = message(bytes(10)), message(bytes(1000))
    assert shape(plan_entries([small, large, small, small], size_max=200)) == [(0,), (1,), (2, 3)]
    assert shape(plan_entries([message()] * 3, batch=False)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("fields", [{"key": "k" * 150}, {"properties": {"a": "b" * 150}}])
def test_keys_and_properties_count_for_the_size_of_an_entry(fields: dict[str, object]) -> None:
    assert shape(plan_entries([message(**fields)] * 3, size_max=300)) == [(0,), (1,), (2,)]
    assert shape(plan_entries([message()] * 3, size_max=300)) == [(0, 1, 2)]


def test_entries_have_at_most_a_thousand_messages_or_about_128_kib() -> None:
    assert [len(indexes) for indexes in shape(plan_entries([message()] * 1001))] == [1000, 1]
    assert [len(indexes) for indexes in shape(plan_entries([message(bytes(2**15 - 100))] * 5))] == [4, 1]


@pytest.mark.parametrize(
    "fields",
    [{"payload": bytes(PAYLOAD_SIZE_MAX + 1)}, {"key": "k" * METADATA_SIZE_MAX}, {"properties": {"a": "b" * 10**6}}],
)
def test_the_error_for_a_message_that_is_too_large_has_its_index(fields: dict[str, object]) -> None:
    with pytest.raises(TooLarge) as caught:
        plan_entries([message(), message(**fields)])
    assert caught.value.facts["index"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"properties": {"a": "\ud800"}},
        {"key": "\ud800"},
        {"sequence_id": -1},
        {"sequence_id": 2**64},
        {"event_time_ms": -1},
        {"event_time_ms": 2**64},
        {"deliver_at_ms": 2**63},
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_the_error_for_a_message_that_cannot_be_encoded_has_its_index(fields: dict[str, object], batch: bool) -> None:
    messages = [message(), message(), message(**fields)]
    plan = plan_entries(messages, batch=batch)
    with pytest.raises(BadRequest) as caught:
        encode_entries(messages, plan, producer_name="p", publish_time_ms=1, sequence_id=0)
    assert caught.value.facts["index"] == 2


@pytest.mark.parametrize("batch", [False, True])
def test_an_error_that_no_single_message_causes_names_the_first_message_of_the_entry(batch: bool) -> None:
    messages = [message(), message()]
    plan = plan_entries(messages, batch=batch)
    with pytest.raises(BadRequest) as caught:
        encode_entries(messages, plan, producer_name="\ud800", publish_time_ms=1, sequence_id=0)
    assert caught.value.facts["index"] == 0


def test_a_large_payload_leaves_less_room_for_properties() -> None:
    large = message(bytes(PAYLOAD_SIZE_MAX), properties={"a": "b" * 60_000})
    assert encode_entries([large], plan_entries([large]), producer_name="p", publish_time_ms=1, sequence_id=0)
    with pytest.raises(TooLarge, match="key and properties"):
        plan_entries([message(bytes(PAYLOAD_SIZE_MAX), properties={"a": "b" * 64_000})])


def test_the_largest_allowed_message_fits_an_entry() -> None:
    largest = message(bytes(PAYLOAD_SIZE_MAX), properties={"a": "b" * 10_000}, key="k" * 1000)
    (entry,) = encode_entries([largest], plan_entries([largest]), producer_name="p", publish_time_ms=1, sequence_id=0)
    assert decode_entry(entry)[0].payload == largest.payload


KINDS = st.sampled_from(
    [{}, {"key": "a"}, {"key": "b"}, {"deliver_at_ms": 9}, {"properties": {"t": "TAGS"}}, {"properties": {"t": "1"}}]
)


@settings(deadline=None, max_examples=100)
@given(st.lists(KINDS, max_size=30), st.booleans(), st.integers(1, 5))
def test_each_message_id_leads_to_its_message(kinds: list[dict[str, object]], batch: bool, messages_max: int) -> None:
    messages = [message(b"%d" % i, **fields) for i, fields in enumerate(kinds)]
    plan = plan_entries(messages, batch=batch, messages_max=messages_max)
    entries = encode_entries(messages, plan, producer_name="p", publish_time_ms=7, sequence_id=100)
    positions = [Position(3, i) for i in range(len(entries))]
    ids = message_ids(plan, positions, partition=2)
    assert len(set(ids)) == len(messages)
    stored = {
        MessageId.of(position, batch_index=found.batch_index, partition=2): found
        for position, entry in zip(positions, entries, strict=True)
        for found in decode_entry(entry)
    }
    assert len(stored) == len(messages)
    for index, (message_id, sent) in enumerate(zip(ids, messages, strict=True)):
        found = stored[message_id]
        assert (found.payload, found.key, found.properties) == (sent.payload, sent.key, sent.properties)
        assert found.deliver_at_ms == sent.deliver_at_ms
        assert found.sequence_id == 100 + index
        head = read_head(entries[message_id.entry_id])
        assert (head.key, head.tags, head.deliver_at_ms) == (sent.key, sent.tags, sent.deliver_at_ms)
    assert ids == sorted(ids)


def test_a_batch_has_at_most_128_kib_with_32_bytes_for_each_message() -> None:
    half = message(bytes(65_536 - 32))
    assert shape(plan_entries([half, half])) == [(0, 1)]
    assert shape(plan_entries([half, message(bytes(65_536 - 31))])) == [(0,), (1,)]

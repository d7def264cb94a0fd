"""The limits and defaults of ordinary operations, and their descriptions in OpenAPI."""

from typing import Any

import pytest
from bindery_broker.http.v1.models import (
    Body,
    Deleted,
    ExpireBody,
    Explanation,
    ForceQuery,
    ReadQuery,
    ResetBody,
    RoutingQuery,
    SeekBody,
    SkipBody,
    SubscribeBody,
    SubscriptionList,
    SubscriptionListQuery,
    TopicListQuery,
    TopicStats,
)
from pydantic import BaseModel, ValidationError


def accepted(model: type[BaseModel], field: str, value: Any) -> bool:
    """Return whether a request with this value is accepted, and then check that it is kept."""
    try:
        found = model.model_validate({field: value})
    except ValidationError:
        return False
    assert getattr(found, field) == value
    return True


@pytest.mark.parametrize(
    ("model", "field", "least", "most"),
    [
        (ReadQuery, "max", 1, 1_000),
        (ReadQuery, "max_bytes", 1, 16_777_216),
        (ReadQuery, "wait_ms", 0, 30_000),
        (TopicListQuery, "max", 1, 10_000),
        (SeekBody, "timestamp", 0, 253_402_300_799_999),
        (SeekBody, "percent", 0, 100),
        (SkipBody, "entries", 1, 1_000_000_000),
        (ExpireBody, "older_than_ms", 0, 253_402_300_799_999),
    ],
)
def test_numbers_are_accepted_within_their_limits(model: type[BaseModel], field: str, least: int, most: int) -> None:
    assert accepted(model, field, least)
    assert accepted(model, field, most)
    assert not accepted(model, field, least - 1)
    assert not accepted(model, field, most + 1)


@pytest.mark.parametrize(
    ("model", "field", "least", "most"),
    [(SubscribeBody, "tags", 1, 4_096), (TopicListQuery, "after", 0, 1_024)],
)
def test_texts_are_accepted_within_their_limits(model: type[BaseModel], field: str, least: int, most: int) -> None:
    assert accepted(model, field, "é" * least)
    assert accepted(model, field, "é" * most)
    assert not accepted(model, field, "é" * (most + 1))
    assert not least or not accepted(model, field, "")


def test_properties_of_a_subscription_are_limited() -> None:
    field = "subscription_properties"
    assert accepted(SubscribeBody, field, {str(number): "" for number in range(100)})
    assert not accepted(SubscribeBody, field, {str(number): "" for number in range(101)})
    assert accepted(SubscribeBody, field, {"k" * 65_536: "v" * 65_536})
    assert not accepted(SubscribeBody, field, {"k" * 65_537: ""})
    assert not accepted(SubscribeBody, field, {"k": "v" * 65_537})


@pytest.mark.parametrize(("model", "field"), [(ReadQuery, "start"), (SeekBody, "message_id")])
def test_a_place_is_an_end_of_the_topic_or_a_message(model: type[BaseModel], field: str) -> None:
    longest = f"{'9' * 19}:{'9' * 19}:{'9' * 10}:{'9' * 10}"
    for text in ("earliest", "latest", "5:0", "5:0:-1", "5:0:-1:-1", longest):
        assert accepted(model, field, text)
    for text in ("", "first", "5", "-1:0", "5:0:1:2:3", "\nlatest", "9" * 20 + ":0"):
        assert not accepted(model, field, text)


def test_the_documented_limit_of_a_place_is_above_the_longest_message_id() -> None:
    assert ReadQuery.model_json_schema()["properties"]["start"]["maxLength"] == 64


@pytest.mark.parametrize(
    ("namespace", "is_accepted"),
    [
        ("a/b", True),
        ("a" * 128 + "/" + "b" * 128, True),
        ("-=:._/b", True),
        ("a" * 129 + "/b", False),
        ("a/" + "b" * 129, False),
        ("a", False),
        ("a/", False),
        ("a/b/c", False),
        ("\na/b", False),
        ("a/b\n", False),
        ("a/é", False),
        ("٣/b", False),
    ],
)
def test_a_namespace_has_two_names(namespace: str, is_accepted: bool) -> None:
    assert accepted(TopicListQuery, "namespace", namespace) is is_accepted


@pytest.mark.parametrize(
    ("model", "given", "defaults"),
    [
        (RoutingQuery, {}, {"redirect": False, "listener": None}),
        (ForceQuery, {}, {"redirect": False, "listener": None, "force": False}),
        (
            ReadQuery,
            {},
            {
                "redirect": False,
                "listener": None,
                "partition": None,
                "compacted": False,
                "start": "earliest",
                "max": 100,
                "max_bytes": 4_194_304,
                "wait_ms": 0,
            },
        ),
        (TopicListQuery, {}, {"namespace": None, "after": None, "max": 1_000}),
        (SubscribeBody, {}, {"initial": "earliest", "tags": None, "subscription_properties": None}),
        (ResetBody, {"initial": "latest"}, {"initial": "latest"}),
        (SeekBody, {}, {"message_id": None, "timestamp": None, "percent": None}),
        (SubscriptionList, {"subscriptions": []}, {"subscriptions": [], "damaged": {}, "next": None}),
        (SubscriptionListQuery, {}, {"redirect": False, "listener": None, "after": None, "max": 1_000}),
    ],
)
def test_fields_that_are_left_out_have_defaults(
    model: type[BaseModel], given: dict[str, Any], defaults: dict[str, Any]
) -> None:
    assert model.model_validate(given).model_dump() == defaults


def test_the_place_of_a_reset_subscription_is_required() -> None:
    with pytest.raises(ValidationError):
        ResetBody.model_validate({})


@pytest.mark.parametrize("model", [RoutingQuery, ForceQuery, ReadQuery, TopicListQuery, SubscribeBody, SeekBody])
def test_unknown_fields_are_refused(model: type[BaseModel]) -> None:
    assert not accepted(model, "colour", "red")


@pytest.mark.parametrize("model", [RoutingQuery, SeekBody])
def test_requests_do_not_change(model: type[BaseModel]) -> None:
    found = model()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(found, next(iter(model.model_fields)), None)


def test_queries_are_converted_from_text_and_bodies_are_not() -> None:
    assert ReadQuery.model_validate({"max": "5", "redirect": "true"}) == ReadQuery(max=5, redirect=True)
    assert not accepted(SeekBody, "timestamp", "5")
    assert not issubclass(ReadQuery, Body)


@pytest.mark.parametrize(
    ("model", "field", "begin"),
    [
        (RoutingQuery, "redirect", "Answer with a 307 redirect"),
        (SeekBody, "timestamp", "Continue with the first message"),
        (TopicStats, "size", "Payload bytes"),
        (Explanation, "summary", "One sentence"),
    ],
)
def test_fields_are_described_in_openapi(model: type[BaseModel], field: str, begin: str) -> None:
    assert model.model_json_schema()["properties"][field]["description"].startswith(begin)


def test_answers_may_be_changed_until_they_are_sent() -> None:
    answer = Deleted(deleted="a")
    answer.deleted = "b"
    assert answer.model_dump() == {"deleted": "b"}

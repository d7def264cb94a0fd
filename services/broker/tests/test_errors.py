"""The errors of the broker keep their codes and statuses, which clients rely on."""

import pytest
from bindery_broker import errors
from bindery_core.errors import BadRequest, BinderyError, Conflict, NotThere, TooManyRequests, TryAgain

ERRORS: list[tuple[type[BinderyError], str, int, type[BinderyError]]] = [
    (errors.NotSupported, "not_supported", 400, BadRequest),
    (errors.ConsumerBusy, "consumer_busy", 409, Conflict),
    (errors.SubscriptionTypeConflict, "subscription_type_conflict", 409, Conflict),
    (errors.UnknownMessages, "unknown_messages", 400, BadRequest),
    (errors.DelayTooLong, "delay_too_long", 400, BadRequest),
    (errors.TopicInUse, "topic_in_use", 409, Conflict),
    (errors.TopicIsPartitioned, "topic_is_partitioned", 409, Conflict),
    (errors.TopicTerminated, "topic_terminated", 409, Conflict),
    (errors.NotOwner, "not_owner", 503, TryAgain),
    (errors.OwnedByPulsar, "owned_by_pulsar", 409, Conflict),
    (errors.RetryTopicAway, "try_again", 503, TryAgain),
    (errors.NoSuchMessage, "no_such_message", 404, NotThere),
    (errors.NoSuchSchema, "no_such_schema", 404, NotThere),
    (errors.InvalidSchema, "invalid_schema", 400, BadRequest),
    (errors.IncompatibleSchema, "incompatible_schema", 409, Conflict),
    (errors.ProducerBusy, "producer_busy", 409, Conflict),
    (errors.ProducerFenced, "producer_fenced", 409, Conflict),
    (errors.IdempotencyKeyReused, "idempotency_key_reused", 422, BadRequest),
    (errors.IdempotencyKeyInUse, "idempotency_key_in_use", 409, Conflict),
    (errors.NoSuchNamespace, "no_such_namespace", 404, NotThere),
    (errors.NotCompactable, "not_compactable", 422, BinderyError),
    (errors.NoSuchBroker, "no_such_broker", 404, NotThere),
    (errors.NoSuchTenant, "no_such_tenant", 404, NotThere),
    (errors.NamespaceDeleted, "namespace_deleted", 409, Conflict),
    (errors.NamespaceNotEmpty, "namespace_not_empty", 409, Conflict),
    (errors.TenantNotEmpty, "tenant_not_empty", 409, Conflict),
    (errors.TopicDeleted, "topic_deleted", 409, Conflict),
    (errors.TooManyTopics, "too_many_topics", 409, Conflict),
    (errors.InvalidPolicy, "invalid_policy", 400, BadRequest),
    (errors.ResponsesFull, "too_many_requests", 429, TooManyRequests),
    (errors.PolicyForbids, "policy_forbids", 409, Conflict),
    (errors.BacklogQuotaExceeded, "backlog_quota_exceeded", 429, TooManyRequests),
    (errors.BacklogQuotaRefused, "backlog_quota_refused", 507, TooManyRequests),
    (errors.PublishRateExceeded, "publish_rate_exceeded", 429, TooManyRequests),
    (errors.TooManyProducers, "too_many_producers", 429, TooManyRequests),
    (errors.SubscribeRateExceeded, "subscribe_rate_exceeded", 429, TooManyRequests),
    (errors.LimitExceeded, "limit_exceeded", 429, TooManyRequests),
]


@pytest.mark.parametrize(("error", "code", "status", "group"), ERRORS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_error_has_its_code_status_and_group(
    error: type[BinderyError], code: str, status: int, group: type[BinderyError]
) -> None:
    found = error("made up", topic="a/b/c")
    assert (found.code, found.status) == (code, status)
    assert isinstance(found, group)
    assert str(found) == "made up: topic=a/b/c"
    assert error().message == code.replace("_", " ")


def test_the_table_of_the_module_lists_every_error() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (errors.__doc__ or "").splitlines()]
    table = {(row[0], row[1], int(row[2])) for row in rows if len(row) == 4 and row[2].isdigit()}
    assert table == {(error.__name__, code, status) for error, code, status, _ in ERRORS}
    made_here = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    defined = {value.__name__ for value in made_here if isinstance(value, type) and not value.__name__.startswith("_")}
    assert defined == {error.__name__ for error, *_ in ERRORS}

"""Errors: each has a stable code, an HTTP status, and the class that says what the caller should do next."""

import pytest
from bindery_core import errors
from bindery_core.errors import BinderyError

TABLE = {
    "TryAgain": ("BinderyError", 503, "try_again"),
    "NotEnoughBookies": ("TryAgain", 503, "not_enough_bookies"),
    "BookieUnavailable": ("TryAgain", 503, "bookie_unavailable"),
    "MetadataUnavailable": ("TryAgain", 503, "metadata_unavailable"),
    "MetadataUnreachable": ("MetadataUnavailable", 503, "metadata_unavailable"),
    "TooManyRequests": ("TryAgain", 429, "too_many_requests"),
    "ReadOnly": ("TryAgain", 503, "read_only"),
    "LedgerStateUnknown": ("TryAgain", 503, "ledger_state_unknown"),
    "OutcomeUnknown": ("BinderyError", 504, "outcome_unknown"),
    "AddTimeout": ("OutcomeUnknown", 504, "add_timeout"),
    "MetadataOutcomeUnknown": ("OutcomeUnknown", 504, "metadata_outcome_unknown"),
    "LostOwnership": ("BinderyError", 409, "lost_ownership"),
    "LedgerFenced": ("LostOwnership", 409, "ledger_fenced"),
    "LedgerClosed": ("LostOwnership", 409, "ledger_closed"),
    "TopicFenced": ("LostOwnership", 409, "topic_fenced"),
    "NotLeader": ("LostOwnership", 409, "not_leader"),
    "Conflict": ("BinderyError", 409, "conflict"),
    "AlreadyExists": ("Conflict", 409, "already_exists"),
    "VersionConflict": ("Conflict", 409, "version_conflict"),
    "NotEmpty": ("Conflict", 409, "not_empty"),
    "NotThere": ("BinderyError", 404, "not_there"),
    "NoSuchLedger": ("NotThere", 404, "no_such_ledger"),
    "NoSuchEntry": ("NotThere", 404, "no_such_entry"),
    "NoSuchTopic": ("NotThere", 404, "no_such_topic"),
    "NoSuchSubscription": ("NotThere", 404, "no_such_subscription"),
    "NoSuchNode": ("NotThere", 404, "no_such_node"),
    "BadRequest": ("BinderyError", 400, "bad_request"),
    "BadVersion": ("BadRequest", 400, "bad_version"),
    "TooLarge": ("BadRequest", 413, "too_large"),
    "UnsupportedMediaType": ("BadRequest", 415, "unsupported_media_type"),
    "Unauthorized": ("BinderyError", 401, "unauthorized"),
    "Forbidden": ("BinderyError", 403, "forbidden"),
    "Corrupt": ("BinderyError", 500, "corrupt"),
    "DigestMismatch": ("Corrupt", 500, "digest_mismatch"),
    "DamagedStorage": ("Corrupt", 500, "damaged_storage"),
}


def test_every_error_has_its_class_status_and_code() -> None:
    """Programs rely on the codes; a new error belongs into this table."""
    found = {
        kind.__name__: (kind.__base__.__name__, kind.status, kind.code)
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BinderyError) and kind is not BinderyError and kind.__base__
    }
    assert found == TABLE
    assert (BinderyError.status, BinderyError.code) == (500, "internal")


def test_a_message_ends_with_the_facts() -> None:
    error = errors.NoSuchEntry("no such entry", ledger_id=7, entry_id=42)
    assert str(error) == "no such entry: ledger_id=7 entry_id=42"
    assert error.message == "no such entry"
    assert error.facts == {"ledger_id": 7, "entry_id": 42}
    assert error.args == ("no such entry",)


def test_a_message_without_facts_is_the_whole_text() -> None:
    assert str(errors.BadRequest("no such range")) == "no such range"


@pytest.mark.parametrize(
    ("error", "text"),
    [(errors.NotEnoughBookies(), "not enough bookies"), (errors.TryAgain(after_s=3), "try again: after_s=3")],
)
def test_without_a_message_the_code_is_the_text(error: BinderyError, text: str) -> None:
    assert str(error) == text


def test_a_fact_may_be_called_message() -> None:
    assert errors.BadRequest("refused", message="x").facts == {"message": "x"}

"""Error numbers of both protocol versions."""

import pytest
from bindery_core import errors
from bindery_core.wire.messages import Status
from bindery_core.wire.status import V2_OF, of_error, of_v2, v2_answer

# From BookieProtocol and BookkeeperProtocol: v2 number, v3 number.
NUMBERS = [
    (0, 0),
    (1, 402),
    (2, 403),
    (100, 404),
    (101, 501),
    (102, 502),
    (103, 503),
    (104, 504),
    (105, 505),
    (106, 506),
    (107, 507),
]


@pytest.mark.parametrize(("v2_number", "v3_number"), NUMBERS)
def test_each_number_has_an_equivalent_in_the_other_protocol(v2_number: int, v3_number: int) -> None:
    assert V2_OF[Status(v3_number)] == v2_number
    assert of_v2(v2_number) == v3_number


def test_an_unknown_ledger_state_is_an_io_error_in_v2_and_other_statuses_are_unchanged() -> None:
    """BookKeeper's v2 client closes its connection at 107."""
    assert {status: v2_answer(status) for status in Status} == {**V2_OF, Status.UNKNOWN_LEDGER_STATE: 101}
    assert v2_answer(999) == 101


def test_numbers_that_v2_does_not_have_are_refused() -> None:
    for number in (-1, 3, 99, 108, 402):
        with pytest.raises(errors.BadRequest):
            of_v2(number)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.NoSuchLedger(), Status.NO_LEDGER),
        (errors.NoSuchEntry(), Status.NO_ENTRY),
        (errors.BadRequest(), Status.BAD_REQUEST),
        (errors.TooLarge(), Status.BAD_REQUEST),
        (errors.BadVersion(), Status.BAD_VERSION),
        (errors.Unauthorized(), Status.UNAUTHORIZED),
        (errors.LedgerFenced(), Status.FENCED),
        (errors.ReadOnly(), Status.READ_ONLY),
        (errors.TooManyRequests(), Status.TOO_MANY_REQUESTS),
        (errors.LedgerStateUnknown(), Status.UNKNOWN_LEDGER_STATE),
        (errors.DamagedStorage(), Status.IO_ERROR),
        (errors.MetadataUnavailable(), Status.IO_ERROR),
    ],
)
def test_damage_and_unexpected_errors_are_an_io_error_and_never_a_denial(
    error: errors.BinderyError, status: Status
) -> None:
    assert of_error(error) == status

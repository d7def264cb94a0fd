"""What users are told if bookies refuse a job, and the check before an audit."""

from types import SimpleNamespace
from typing import Any

import pytest
from bindery_client.connection.connection import NOT_TRUSTED, REFUSES_CLIENT, REFUSES_TLS, REJECTS_CREDENTIALS
from bindery_client.connection.security import NO_FILES, SecurityFiles
from bindery_core.errors import BinderyError, BookieUnavailable, NoSuchEntry, Unauthorized
from bindery_core.ids import BookieId
from bindery_core.wire.messages import BookieInfoResponse, Status
from bindery_spark.sources.bookie_access import REFUSES_READER, advice, check, explained

BOTH = SecurityFiles(token_file="/t", ca_file="/c")
ONLY_TOKEN = SecurityFiles(token_file="/t")
ONLY_CA = SecurityFiles(ca_file="/c")


@pytest.mark.parametrize(
    ("text", "security", "expected"),
    [
        (NOT_TRUSTED, BOTH, "Name the CA of the bookies' certificates in option ca_file or BINDERY_CLIENT_CA_FILE"),
        (REFUSES_TLS, BOTH, "These bookies have no TLS: leave out option ca_file or BINDERY_CLIENT_CA_FILE"),
        (REJECTS_CREDENTIALS, BOTH, "Put a token that the bookies accept into the file of option token_file"),
        (REJECTS_CREDENTIALS, ONLY_TOKEN, "Bookies that require TLS need option ca_file or BINDERY_CLIENT_CA_FILE"),
        (REFUSES_CLIENT, NO_FILES, "need option token_file or BINDERY_CLIENT_TOKEN_FILE, and option ca_file or"),
        (REFUSES_CLIENT, ONLY_CA, "need option token_file or BINDERY_CLIENT_TOKEN_FILE"),
        (REFUSES_READER, BOTH, "The role of the token must be one of auth.client_roles of the bookies"),
    ],
)
def test_a_refusal_has_advice(text: str, security: SecurityFiles, expected: str) -> None:
    assert expected in advice(f"missing=b: {text}; c: {text}", security)


@pytest.mark.parametrize("text", ["bookie cannot be reached", "bookie refuses the operation", "no answer in time"])
def test_other_errors_have_none(text: str) -> None:
    assert advice(text, NO_FILES) == ""


async def test_a_refusal_is_explained_and_other_errors_pass_unchanged() -> None:
    with pytest.raises(Unauthorized, match=f"{REFUSES_CLIENT}: bookie_id=b.*BINDERY_CLIENT_TOKEN_FILE"):
        async with explained(NO_FILES):
            raise BookieUnavailable(REFUSES_CLIENT, bookie_id="b")
    other = NoSuchEntry("gone")
    with pytest.raises(NoSuchEntry) as error:
        async with explained(NO_FILES):
            raise other
    assert error.value is other


class Pool:
    """Bookies that answer at once: with a status, or with an error of the connection."""

    def __init__(self, **answers: Status | BinderyError) -> None:
        self._answers = answers
        self.directory = SimpleNamespace(bookies=dict.fromkeys(map(BookieId, answers)))
        self._ids = 0

    def txn_id(self) -> int:
        self._ids += 1
        return self._ids

    def connection(self, bookie_id: BookieId) -> Any:
        def send(frame: bytes, keys: Any, sink: Any, *, timeout_s: float) -> None:
            answer = self._answers[bookie_id]
            if isinstance(answer, BinderyError):
                sink.failed(bookie_id, answer)
            else:
                sink.answered(bookie_id, [BookieInfoResponse(keys[0], answer, None, 7)])

        return SimpleNamespace(send=send)


DOWN = BookieUnavailable("bookie cannot be reached")


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"a": Status.OK, "b": Status.UNAUTHORIZED},
        {"a": DOWN, "b": DOWN},
        {"a": Status.TOO_MANY_REQUESTS, "b": Status.UNAUTHORIZED},
    ],
)
async def test_an_audit_may_begin_unless_all_bookies_that_answer_refuse(answers: dict[str, Any]) -> None:
    await check(Pool(**answers), NO_FILES, timeout_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answers",
    [
        {"a": Status.UNAUTHORIZED, "b": Status.UNAUTHORIZED},
        {"a": BookieUnavailable(f"bookie cannot be reached: {REJECTS_CREDENTIALS}"), "b": DOWN},
    ],
)
async def test_an_audit_does_not_begin_if_all_bookies_that_answer_refuse(answers: dict[str, Any]) -> None:
    with pytest.raises(BookieUnavailable, match="no bookie accepts this job; a: bookie") as error:
        await check(Pool(**answers), ONLY_CA, timeout_s=1.0)  # type: ignore[arg-type]
    assert advice(str(error.value), ONLY_CA)

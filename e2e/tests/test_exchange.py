"""Goal: an outcome is only failed if the request cannot have had an effect."""

import random
import socket
from pathlib import Path

import httpx
import pytest
from bindery_core.errors import (
    AddTimeout,
    BadRequest,
    BinderyError,
    LedgerFenced,
    NotEnoughBookies,
    OutcomeUnknown,
    TooLarge,
    TooManyRequests,
)
from bindery_e2e.traffic.clients import Outgoing, produce_request, produced_ids, row_of
from bindery_e2e.traffic.exchange import BrokerAccess, fixed, outcome_of
from bindery_e2e.traffic.payloads import SIZE_MAX, Payloads, digest_of, find_files
from bindery_kit.http.problem import problem_of


def of_error(error: BinderyError) -> str:
    answer = problem_of(error)
    response = httpx.Response(answer.status_code, content=bytes(answer.body), headers=dict(answer.headers))
    return outcome_of(response).kind


def test_refusals_of_the_broker_are_failed_or_unknown_by_their_error() -> None:
    for refused in (NotEnoughBookies(), TooManyRequests(), BadRequest(), TooLarge()):
        assert of_error(refused) == "failed", refused
    for unknown in (OutcomeUnknown(), AddTimeout(), LedgerFenced(), BinderyError()):
        assert of_error(unknown) == "unknown", unknown


@pytest.mark.parametrize("status", [400, 404, 408, 429, 500, 502, 503, 504])
def test_the_page_of_a_proxy_is_unknown(status: int) -> None:
    assert outcome_of(httpx.Response(status, text="<html>upstream</html>")).kind == "unknown"
    assert outcome_of(httpx.Response(status, json={"code": "try_again"})).kind == "unknown"  # no problem+json


def test_an_invalid_response_is_unknown() -> None:
    assert outcome_of(httpx.Response(200, text="half an ans")).kind == "unknown"
    assert outcome_of(httpx.Response(200, json={"message_ids": []})).kind == "ok"
    ok = outcome_of(httpx.Response(200, json={"message_ids": ["1:0:-1:-1"]}))
    assert produced_ids(ok, 1) == ["1:0:-1:-1"]
    assert produced_ids(ok, 2) is None
    assert produced_ids(outcome_of(httpx.Response(200, json=["no"])), 1) is None


def test_a_207_response_has_an_outcome_for_each_message() -> None:
    errors = [
        {"code": code, "status": status, "detail": ""} for code, status in (("try_again", 503), ("add_timeout", 504))
    ]
    results = [{"message_id": "1:0:-1:-1"}, *({"error": error} for error in errors)]
    outcome = outcome_of(httpx.Response(207, json={"results": results}))
    assert produced_ids(outcome, 3) == ["1:0:-1:-1", "failed", "unknown"]


async def test_without_a_connection_nothing_was_sent_and_the_endpoint_is_called_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    asked = []

    async def endpoint() -> str:
        asked.append(1)
        return f"http://127.0.0.1:{port}/"

    access = BrokerAccess(endpoint, timeout_s=2)
    async with access.client() as http:
        for _ in range(2):
            await access.base_url()
            outcome = await access.call(http, "GET", "/")
            assert outcome.kind == "failed"
            assert "nothing was sent" in outcome.error
    assert len(asked) == 2


async def test_a_timeout_and_a_broken_connection_are_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = BrokerAccess(fixed(f"http://127.0.0.1:{silent.getsockname()[1]}"), timeout_s=0.2)
        async with access.client() as http:
            await access.base_url()
            assert (await access.call(http, "GET", "/")).kind == "unknown"


async def test_an_endpoint_that_fails_is_called_again() -> None:
    answers = iter([OSError("not now"), "http://127.0.0.1:1"])

    async def endpoint() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await BrokerAccess(endpoint, timeout_s=1).base_url() == "http://127.0.0.1:1"


# -- data --------------------------------------------------------------------------------------------------------------


def test_payloads_are_the_files_bytes_in_all_sizes(tmp_path: Path) -> None:
    contents = [random.Random(seed).randbytes(300_000) for seed in range(3)]
    for number, content in enumerate(contents):
        (tmp_path / f"f{number}").write_bytes(content)
    (tmp_path / "empty").touch()
    payloads = Payloads(find_files([tmp_path]), seed=1)
    chunks = [payloads.next() for _ in range(1_000)]
    assert all(any(chunk in content for content in contents) for chunk in chunks)
    assert min(map(len, chunks)) == 0
    assert 32 * 1024 < max(map(len, chunks)) <= SIZE_MAX
    again = Payloads(find_files([tmp_path]), seed=1)
    assert [again.next() for _ in range(1_000)] == chunks


def test_missing_payload_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file with anything in it"):
        find_files([tmp_path])
    (tmp_path / "f").write_text("x" * 2_000)
    payloads = Payloads(find_files([tmp_path / "f"]), seed=1)
    (tmp_path / "f").unlink()
    with pytest.raises(FileNotFoundError, match="has gone"):
        [payloads.next() for _ in range(100)]


def test_a_row_has_id_producer_sequence_and_digest() -> None:
    mine = {"message_id": "1:0:-1:-1", "properties": {"producer": "p0", "sequence": "3"}}
    assert row_of({**mine, "payload": "é"}) == ["1:0:-1:-1", "p0", 3, digest_of("é".encode())]
    assert row_of({**mine, "payload_base64": "/w=="}) == ["1:0:-1:-1", "p0", 3, digest_of(b"\xff")]
    assert row_of({"message_id": "1:0", "properties": {}, "payload": ""}) == ["1:0", "", -1, digest_of(b"")]
    assert row_of({"message_id": "1:0", "properties": {"sequence": "-1"}, "payload": ""})[1:3] == ["", -1]


def test_one_message_is_a_raw_body_and_several_are_lines() -> None:
    single = produce_request("p0", Outgoing([4], [b"\x00"], ["d"]), batch=True)
    assert single["content"] == b"\x00"
    assert single["headers"]["bindery-property-sequence"] == "4"
    several = produce_request("p0", Outgoing([4, 5], [b"", b"x"], ["d", "e"]), batch=False)
    assert several["content"].count(b"\n") == 1
    assert several["params"] == {"producer": "p0", "batch": "false"}

"""The authentication gate: the response to each request of an unauthenticated client, in both protocol versions."""

from collections.abc import Collection

import pytest
from bindery_bookie.access.authentication import (
    CertificateAuthenticator,
    Gate,
    TokenAuthenticator,
    Verdict,
    certificate_names,
)
from bindery_core.errors import Unauthorized
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Operation, Request, Status
from bindery_identity.tokens import SharedSecrets, SignedTokens, sign

SECRET = b"correct horse battery staple"
PLUGIN = "bindery"
GOOD = m.AuthRequest(1, PLUGIN, SECRET)
BAD = m.AuthRequest(2, PLUGIN, b"wrong")
OTHER_PLUGIN = m.AuthRequest(3, "another", SECRET)
ADD = m.AddRequest(4, 5, 6, b"key", b"body")
READ = m.ReadRequest(7, 8, -1)
START_TLS = m.StartTlsRequest(9)


def gate(*, tls_required: bool = False) -> Gate:
    authenticator = TokenAuthenticator(SharedSecrets([SECRET]), plugin=PLUGIN, now_s=lambda: 0.0)
    return Gate(authenticator, tls_required=tls_required)


def by_certificate(*allowed: str) -> Gate:
    return Gate(CertificateAuthenticator(plugin=PLUGIN, allowed=allowed), tls_required=True)


@pytest.mark.parametrize("version", [2, 3])
def test_a_good_token_opens_the_gate_for_later_requests(version: int) -> None:
    one = gate()
    assert one.admit([GOOD, ADD, READ], version=version) == Verdict([ADD, READ], [m.AuthResponse(1, 0, PLUGIN)])
    assert one.is_open
    assert one.admit([BAD, ADD], version=version) == Verdict([BAD, ADD], [])


def closes(verdict: Verdict, answers: list[m.Response]) -> bool:
    assert verdict.passed == []
    assert verdict.answers == answers
    return isinstance(verdict.close, Unauthorized)


def refusal(request: Request, operation: Operation) -> m.ErrorResponse:
    return m.ErrorResponse(request.txn_id, operation, Status.UNAUTHORIZED)


def test_a_bad_token_ends_the_connection() -> None:
    assert closes(gate().admit([BAD, GOOD], version=3), [refusal(BAD, Operation.AUTH)])
    assert closes(gate().admit([BAD, GOOD], version=2), [])


def test_another_plugin_is_refused_in_v3_and_ends_the_connection_in_v2() -> None:
    one = gate()
    assert one.admit([OTHER_PLUGIN], version=3) == Verdict([], [refusal(OTHER_PLUGIN, Operation.AUTH)])
    assert one.admit([GOOD], version=3).close is None
    assert one.is_open, "the connection was kept"
    assert closes(gate().admit([OTHER_PLUGIN], version=2), [])


@pytest.mark.parametrize(
    ("request_", "operation"),
    [
        (ADD, Operation.ADD_ENTRY),
        (READ, Operation.READ_ENTRY),
        (m.WriteLacRequest(1, 2, 3, b"", b""), Operation.WRITE_LAC),
        (m.ReadLacRequest(1, 2), Operation.READ_LAC),
        (m.BookieInfoRequest(1), Operation.GET_BOOKIE_INFO),
        (m.ForceLedgerRequest(1, 2), Operation.FORCE_LEDGER),
        (m.ListEntriesRequest(1, 2), Operation.GET_LIST_OF_ENTRIES_OF_LEDGER),
        (m.OtherRequest(1, Operation.BATCH_READ_ENTRY, 3), Operation.BATCH_READ_ENTRY),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_v3_requests_before_authentication_get_header_and_outer_status_only(
    request_: Request, operation: Operation
) -> None:
    one = gate()
    assert one.admit([request_, request_], version=3) == Verdict([], [refusal(request_, operation)] * 2)
    assert not one.is_open


def test_v2_adds_and_reads_before_authentication_are_refused_in_their_own_responses() -> None:
    expected = [m.AddResponse(4, Status.UNAUTHORIZED, 5, 6), m.ReadResponse(7, Status.UNAUTHORIZED, 8, -1)]
    assert gate().admit([ADD, READ], version=2) == Verdict([], expected)
    old = [m.OtherRequest(3, Operation.ADD_ENTRY, 3, 5, 6), m.OtherRequest(3, Operation.READ_ENTRY, 3, 8, 9)]
    assert [answer.status for answer in gate().admit(old, version=2).answers] == [Status.UNAUTHORIZED] * 2


def test_other_v2_requests_before_authentication_end_the_connection() -> None:
    assert closes(gate().admit([m.BatchReadRequest(2, 1, 0, 1)], version=2), [])
    assert closes(gate().admit([m.OtherRequest(3, Operation.BATCH_READ_ENTRY, 3)], version=2), [])


def test_start_tls_passes_before_authentication() -> None:
    assert gate().admit([READ, START_TLS], version=3) == Verdict([START_TLS], [refusal(READ, Operation.READ_ENTRY)])


def test_requests_after_start_tls_do_not_pass_with_it() -> None:
    refused = [refusal(ADD, Operation.ADD_ENTRY), refusal(READ, Operation.READ_ENTRY)]
    assert gate().admit([START_TLS, ADD, READ], version=3) == Verdict([START_TLS], refused)
    assert gate(tls_required=True).admit([START_TLS, ADD, READ], version=3) == Verdict([START_TLS], refused)
    assert closes(gate().admit([START_TLS, BAD, READ], version=3), [refusal(BAD, Operation.AUTH)])
    opened = gate().admit([START_TLS, GOOD, READ], version=3)
    assert opened.passed == [START_TLS, READ]


def test_a_good_token_in_clear_text_is_refused_if_tls_is_required() -> None:
    one = gate(tls_required=True)
    assert closes(one.admit([GOOD], version=3), [refusal(GOOD, Operation.AUTH)])
    one = gate(tls_required=True)
    one.secured(None)
    assert not one.is_open
    assert one.admit([GOOD], version=3).answers == [m.AuthResponse(1, 0, PLUGIN)]
    assert one.is_open


def test_the_handshake_opens_the_gate_if_only_tls_is_required() -> None:
    one = Gate(None, tls_required=True)
    assert one.admit([ADD], version=3) == Verdict([], [refusal(ADD, Operation.ADD_ENTRY)])
    assert one.admit([GOOD], version=3) == Verdict([], [refusal(GOOD, Operation.AUTH)])
    one.secured(None)
    assert one.is_open


@pytest.mark.parametrize("names", [["broker"], ["someone", "broker.test"]])
def test_a_certificate_with_an_allowed_name_opens_the_gate(names: Collection[str]) -> None:
    one = by_certificate("broker", "broker.test")
    one.secured(names)
    assert one.is_open
    assert one.who in ("broker", "broker.test")


@pytest.mark.parametrize("names", [None, [], ["guest"], ["broker.test.example"]])
def test_any_other_certificate_does_not_open_the_gate(names: Collection[str] | None) -> None:
    one = by_certificate("broker", "broker.test")
    with pytest.raises(Unauthorized):
        one.secured(names)
    assert not one.is_open
    assert one.admit([READ], version=3).answers == [refusal(READ, Operation.READ_ENTRY)]
    assert closes(one.admit([GOOD], version=3), [refusal(GOOD, Operation.AUTH)])


def test_without_allowed_names_every_certificate_of_the_ca_is_accepted() -> None:
    one = by_certificate()
    one.secured(["whoever"])
    assert one.who == "whoever"


def test_the_gate_keeps_the_name_in_a_signed_token() -> None:
    one = Gate(TokenAuthenticator(SignedTokens([b"k" * 32]), plugin="jwt", now_s=lambda: 100.0), tls_required=False)
    one.admit([m.AuthRequest(1, "jwt", sign(b"k" * 32, subject="broker-7", expires_at_s=101))], version=3)
    assert one.who == "broker-7"


def test_the_names_of_a_certificate_are_read_from_the_form_of_the_ssl_module() -> None:
    certificate = {
        "subject": ((("organizationName", "Bindery"),), (("commonName", "broker"),)),
        "subjectAltName": (("DNS", "broker.test"), ("IP Address", "127.0.0.1"), ("email", "x@y"), ("DNS", "broker")),
    }
    assert certificate_names(certificate) == ["broker", "broker.test", "127.0.0.1"]
    assert certificate_names({}) is None
    assert certificate_names(None) is None

"""The upgrade of a connection to TLS: each row of the module's table, and the invariant over random batches."""

from itertools import product

import pytest
from bindery_bookie.access.tls_upgrade import Batch, Released, TlsState, TlsUpgrade
from bindery_core.errors import BadRequest, Unauthorized
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import Request

TLS = m.StartTlsRequest(7)
AUTH = m.AuthRequest(8, "bindery", b"token")
READ = m.ReadRequest(9, 1, 0)


def upgrade(state: TlsState = TlsState.CLEAR, *, is_required: bool = False) -> TlsUpgrade:
    """Return an upgrade in `state`."""
    one = TlsUpgrade(is_offered=True, is_required=is_required)
    if state is not TlsState.CLEAR:
        assert one.accept(7)
    if state in (TlsState.DRAINING, TlsState.HANDSHAKE, TlsState.SECURE):
        assert one.begin(is_closing=False, has_unsent=False, must_authenticate=state is TlsState.DRAINING) == 7
    if state is TlsState.SECURE:
        one.secured()
    assert one.state is state
    return one


def test_requests_without_start_tls_are_handled() -> None:
    one = upgrade()
    assert one.receive([AUTH, READ], [READ], has_partial_frame=True) == Batch([AUTH, READ], [READ])
    assert one.state is TlsState.CLEAR


def test_start_tls_as_the_last_request_is_handled() -> None:
    assert upgrade().receive([READ, TLS], [], has_partial_frame=False) == Batch([READ, TLS], [])


@pytest.mark.parametrize(
    ("in_v3", "in_v2", "partial"),
    [
        ([TLS, READ], [], False),
        ([TLS], [READ], False),
        ([TLS], [], True),
        ([TLS, AUTH, READ], [], False),
        ([TLS, TLS], [], False),
        ([TLS, AUTH], [AUTH], True),
    ],
)
def test_requests_other_than_auth_after_start_tls_are_refused_and_nothing_is_handled(
    in_v3: list[Request], in_v2: list[Request], partial: bool
) -> None:
    batch = upgrade().receive(in_v3, in_v2, has_partial_frame=partial)
    assert (batch.in_v3, batch.in_v2, type(batch.refuse)) == ([], [], BadRequest)


def test_auth_after_start_tls_is_held_until_the_connection_is_secure() -> None:
    one = upgrade()
    assert one.receive([READ, TLS, AUTH], [AUTH], has_partial_frame=False) == Batch([READ, TLS], [])
    assert one.accept(7)
    assert one.begin(is_closing=False, has_unsent=False, must_authenticate=False) == 7
    assert one.secured() == Released([], [([AUTH], v3), ([AUTH], v2)], [])


def test_auth_after_start_tls_is_refused_if_tls_is_required() -> None:
    batch = upgrade(is_required=True).receive([TLS, AUTH], [], has_partial_frame=False)
    assert (batch.in_v3, type(batch.refuse)) == ([], Unauthorized)


def test_start_tls_is_accepted_once_and_only_if_it_is_offered() -> None:
    assert not TlsUpgrade(is_offered=False, is_required=False).accept(1)
    assert not upgrade(TlsState.SECURE).accept(1)


@pytest.mark.parametrize("must_authenticate", [True, False])
@pytest.mark.parametrize("is_required", [True, False])
def test_frames_in_clear_text_are_awaited_only_if_tls_is_optional(must_authenticate: bool, is_required: bool) -> None:
    one = upgrade(TlsState.ACCEPTED, is_required=is_required)
    assert one.begin(is_closing=False, has_unsent=False, must_authenticate=must_authenticate) == 7
    assert one.is_draining == (must_authenticate and not is_required)
    assert one.is_in_progress


def test_unread_responses_refuse_the_upgrade_and_a_closing_connection_ignores_it() -> None:
    one = upgrade(TlsState.ACCEPTED)
    assert type(one.begin(is_closing=False, has_unsent=True, must_authenticate=True)) is BadRequest
    one = upgrade(TlsState.ACCEPTED)
    assert one.begin(is_closing=True, has_unsent=True, must_authenticate=True) is None
    assert one.state is TlsState.CLEAR
    assert one.begin(is_closing=False, has_unsent=False, must_authenticate=True) is None, "nothing was accepted"


@pytest.mark.parametrize("state", [TlsState.DRAINING, TlsState.HANDSHAKE])
def test_responses_and_data_are_held_in_order_during_the_upgrade(state: TlsState) -> None:
    one = upgrade(state)
    assert all([one.hold_response(b"1"), one.hold_data(b"a"), one.hold_response(b"2"), one.hold_data(b"b")])
    one.shake()
    assert one.secured() == Released([b"1", b"2"], [], [b"a", b"b"])
    assert not one.hold_response(b"3")
    assert not one.hold_data(b"c")


def test_a_lost_connection_releases_nothing() -> None:
    one = upgrade(TlsState.DRAINING)
    one.hold_response(b"1")
    assert one.drain([AUTH], [], has_partial_frame=False) is None
    one.lose()
    one.shake()
    assert one.secured() == Released()


@pytest.mark.parametrize(("in_v3", "partial"), [([READ], False), ([AUTH, TLS], False), ([AUTH], True)])
def test_frames_in_clear_text_other_than_auth_are_refused(in_v3: list[Request], partial: bool) -> None:
    one = upgrade(TlsState.DRAINING)
    assert type(one.drain(in_v3, [], has_partial_frame=partial)) is BadRequest
    one.shake()
    assert one.secured() == Released()


def test_in_every_batch_only_auth_after_start_tls_is_ever_handled() -> None:
    """All batches of up to four requests in v3 and two in v2, with and without a partial frame."""
    kinds: tuple[Request, ...] = (READ, AUTH, TLS)
    v3_batches = [list(batch) for size in range(5) for batch in product(kinds, repeat=size)]
    v2_batches: list[list[Request]] = [list(batch) for size in range(3) for batch in product((READ, AUTH), repeat=size)]
    upgraded = 0
    for in_v3, in_v2, partial, required in product(v3_batches, v2_batches, (False, True), (False, True)):
        one = TlsUpgrade(is_offered=True, is_required=required)
        batch = one.receive(in_v3, in_v2, has_partial_frame=partial)
        if TLS not in in_v3:
            assert batch == Batch(in_v3, in_v2)
            continue
        at = in_v3.index(TLS)
        if batch.refuse is not None:
            assert batch.in_v3 == batch.in_v2 == []
            continue
        upgraded += 1
        assert (batch.in_v3, batch.in_v2) == (in_v3[: at + 1], [])
        assert one.accept(7)
        assert one.begin(is_closing=False, has_unsent=False, must_authenticate=False) == 7
        released = one.secured()
        handled_later = [request for requests, _ in released.auth for request in requests]
        assert handled_later == [*in_v3[at + 1 :], *in_v2]
        assert set(map(type, handled_later)) <= (set() if required else {m.AuthRequest})
    assert upgraded > 50

"""Hostile HTTP connections are planned by seed, and know which requests must be refused."""

import functools
import json
from random import Random

from bindery_simulation.http_fuzz import (
    BODIES,
    KINDS,
    LEDGER_ID_MIN,
    TOKEN,
    UNDONE,
    End,
    Piece,
    Plan,
    Refusal,
    damaged,
    filled,
    needs_token,
    plan,
)

ROUTES = (
    ("DELETE", "/api/v1/ledger/delete"),
    ("GET", "/v1/topics/{tenant}/{namespace}/{topic}/stats"),
    ("POST", "/v1/recovery/pause"),
    ("POST", "/v1/topics/{tenant}/{namespace}/{topic}/messages"),
    ("PUT", "/api/v1/bookie/state/readonly"),
)
HEAD_SIZE_MAX = 32 * 1024
HEADERS_MAX = 100


@functools.cache
def plans(count: int = 1000) -> list[Plan]:
    return [plan(5, number, ROUTES) for number in range(count)]


def refused(refusal: Refusal) -> list[tuple[list[bytes], bytes]]:
    """Return the lines of the head, and the rest, of the first request of each plan with this refusal."""
    found = [one.data for one in plans(3000) if one.refusal is refusal]
    assert len(found) > 20
    heads = [data.partition(b"\r\n\r\n") for data in found]
    return [(head.split(b"\r\n"), rest) for head, _, rest in heads]


def values(lines: list[bytes], name: bytes) -> list[bytes]:
    return [line[len(name) + 1 :].strip() for line in lines if line.lower().startswith(name.lower() + b":")]


def test_a_plan_is_a_function_of_seed_and_number() -> None:
    for number in range(200):
        assert plan(3, number, ROUTES) == plan(3, number, ROUTES)
    assert plan(3, 17, ROUTES) != plan(3, 18, ROUTES) != plan(4, 18, ROUTES)


def test_plans_cover_every_kind_every_end_and_every_refusal() -> None:
    found = plans()
    assert {one.kind for one in found} == {"valid", "damaged", *KINDS}
    assert {one.end for one in found} == set(End)
    assert {one.refusal for one in found} == {None, *Refusal}
    assert all(one.request_ends and one.pieces for one in found)
    assert {one.kind for one in found if one.is_slow} == {"slow head", "slow body", "slow request", "unread"}


def test_a_request_counts_when_all_its_bytes_are_sent() -> None:
    one = Plan(0, "valid", (Piece(bytes(30)),), End.ANSWERED, (10, 25, 30))
    assert [one.requests(size) for size in (0, 9, 10, 24, 25, 29, 30)] == [0, 0, 1, 1, 2, 2, 3]
    for one in plans():
        size = len(one.data)
        assert one.request_ends[-1] == size
        assert list(one.request_ends) == sorted(set(one.request_ends))
        assert one.requests(size) == len(one.request_ends)
        assert one.requests(size - 1) == len(one.request_ends) - 1


def test_most_valid_requests_have_a_body_that_their_route_accepts() -> None:
    route = ("PUT", "/api/v1/bookie/state/readonly")
    accepted = other = 0
    for one in plans(2000):
        if one.kind != "valid":
            continue
        for part in one.data.split(b"PUT /api/v1/bookie/state/readonly")[1:]:
            head, _, rest = part.partition(b"\r\n\r\n")
            [length] = values(head.split(b"\r\n"), b"Content-Length")
            try:
                accepted += type(json.loads(rest[: int(length)])["readOnly"]) is bool
            except (ValueError, KeyError, TypeError):
                other += 1
    assert accepted > 2 * other > 50
    assert route in BODIES
    assert route in UNDONE


def test_oversized_heads_exceed_a_limit() -> None:
    for lines, _ in refused(Refusal.HEAD):
        size = sum(len(line) + 2 for line in lines) + 2
        assert size > HEAD_SIZE_MAX or len(lines) - 1 > HEADERS_MAX


def test_over_long_bodies_are_sent_or_announced() -> None:
    for lines, body in refused(Refusal.BODY):
        [length] = values(lines, b"Content-Length")
        assert int(length) > 2**16
        if b"/v1/topics/" not in lines[0]:
            assert len(body) == int(length)


def test_refused_requests_have_exactly_one_fault() -> None:
    valid = b"Bearer " + TOKEN.encode()
    for refusal in (Refusal.BODY, Refusal.CODING, Refusal.TYPE, Refusal.TOKEN):
        for lines, body in refused(refusal):
            codings, types, tokens = (
                values(lines, name) for name in (b"Content-Encoding", b"Content-Type", b"Authorization")
            )
            assert len(values(lines, b"Host")) == 1
            assert (tokens != [valid]) == (refusal is Refusal.TOKEN)
            assert (types != [b"application/json"]) == (refusal is Refusal.TYPE)
            assert bool(codings) == (refusal is Refusal.CODING)
            assert (values(lines, b"Content-Length") != [b"%d" % len(body)] or len(body) > 2**16) == (
                refusal is Refusal.BODY
            )


def test_pages_of_other_sites_say_so() -> None:
    for lines, _ in refused(Refusal.ORIGIN):
        origins, sites = values(lines, b"Origin"), values(lines, b"Sec-Fetch-Site")
        assert origins not in ([], [b"http://127.0.0.1"]) or sites == [b"cross-site"]


def test_the_broker_s_routes_need_no_operator_s_token() -> None:
    assert needs_token(("POST", "/v1/recovery/pause"))
    assert not needs_token(("GET", "/v1/recovery/status"))
    assert not needs_token(("POST", "/v1/topics/{tenant}/{namespace}/{topic}/messages"))


def test_only_missing_ledgers_are_deleted() -> None:
    deletions = 0
    for one in plans():
        for part in one.data.split(b"DELETE /api/v1/ledger/delete")[1:]:
            deletions += 1
            assert one.kind in ("valid", "origins")
            assert part.startswith(b"?ledger_id=")
            assert int(part.removeprefix(b"?ledger_id=").partition(b" ")[0]) >= LEDGER_ID_MIN
    assert deletions > 20


def test_clients_that_hold_a_connection_open_leave_their_request_incomplete() -> None:
    for one in plans():
        if one.end is End.HOLD and one.kind == "slow head":
            assert b"\r\n\r\n" not in one.data
            assert one.refusal is Refusal.LATE_HEAD
        elif one.end is End.HOLD:
            head, _, body = one.data.partition(b"\r\n\r\n")
            length = int(head.rpartition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            assert len(body) < length


def test_parameters_of_paths_are_filled() -> None:
    for seed in range(50):
        assert "{" not in filled(Random(seed), "/v1/topics/{tenant}/{namespace}/{topic}/x/{unknown}")


def test_damage_changes_a_request() -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert sum(damaged(Random(seed), request) != request for seed in range(100)) > 90

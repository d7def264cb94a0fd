"""Hostile HTTP connections are planned by seed, and leave harmful routes to requests that must be refused."""

from random import Random

from bindery_simulation.http_fuzz import HARMFUL, KINDS, LEDGER_ID_MIN, End, Plan, damaged, filled, plan

ROUTES = (
    ("DELETE", "/api/v1/ledger/delete"),
    ("GET", "/v1/topics/{tenant}/{namespace}/{topic}/stats"),
    ("POST", "/v1/recovery/pause"),
    ("POST", "/v1/topics/{tenant}/{namespace}/{topic}/messages"),
)


def plans(count: int = 1000) -> list[Plan]:
    return [plan(5, number, ROUTES) for number in range(count)]


def test_a_plan_is_a_function_of_seed_and_number() -> None:
    for number in range(200):
        assert plan(3, number, ROUTES) == plan(3, number, ROUTES)
    assert plan(3, 17, ROUTES) != plan(3, 18, ROUTES) != plan(4, 18, ROUTES)


def test_plans_cover_every_kind_and_every_end() -> None:
    found = plans()
    assert {one.kind for one in found} == {"valid", "damaged", *KINDS}
    assert {one.end for one in found} == set(End)
    assert all(one.requests >= 1 and one.pieces for one in found)


def test_harmful_routes_are_requested_only_by_pages_of_other_sites() -> None:
    requested = 0
    for one in plans():
        for part in one.data.split(b"POST /v1/recovery/pause")[1:]:
            head = part.partition(b"\r\n\r\n")[0]
            requested += 1
            assert one.kind in ("valid", "origins")
            assert b"\r\nOrigin: " in head or b"\r\nSec-Fetch-Site: cross-site" in head
    assert requested > 20
    assert ("POST", "/v1/recovery/pause") in HARMFUL


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

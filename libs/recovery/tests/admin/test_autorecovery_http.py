"""BookKeeper's autorecovery routes: which operation of the admin each calls, and what it answers."""

import json
import random
from typing import Any

import pytest
from bindery_core.errors import BadRequest
from bindery_core.ids import LedgerId
from bindery_kit.admin.http import Answer, Request
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_recovery.admin.autorecovery_http import ROOT, ROUTES
from bindery_recovery.admin.recovery_admin import RecoveryAdmin

JSON = [(b"content-type", b"application/json")]


class Context:
    """A service context whose admin records the calls of `replace`."""

    def __init__(self) -> None:
        self.replaced: list[tuple[str, bool]] = []
        self.delay_s: int | None = None
        self.marks = self

    async def lost_bookie_delay_s(self) -> int | None:
        return self.delay_s

    async def recovery_admin(self) -> Any:
        return self

    async def replace(self, bookie_id: str, *, delete_cookie: bool) -> None:
        self.replaced.append((bookie_id, delete_cookie))


async def call(context: Any, method: str, name: str, body: bytes = b"", **query: str) -> Answer:
    (route,) = [one for one in ROUTES if (one.method, one.path) == (method, f"{ROOT}/{name}")]
    return await route.handler(context, Request(method, route.path, query, body, headers=JSON))


async def put(context: Any, name: str, body: bytes) -> Answer:
    return await call(context, "PUT", name, body)


async def test_the_lost_bookie_delay_is_not_found_until_an_auditor_has_set_it() -> None:
    context = Context()
    answer = await call(context, "GET", "lost_bookie_recovery_delay")
    assert (answer.status, json.loads(answer.body)["code"]) == (404, "no_auditor")
    context.delay_s = 0
    answer = await call(context, "GET", "lost_bookie_recovery_delay")
    assert (answer.status, answer.body) == (200, b"lostBookieRecoveryDelay value: 0")


@pytest.mark.parametrize(
    ("name", "sources", "text"),
    [
        ("bookie", '["b1:3181", "ignored:1"]', b"Success send recovery request command."),
        ("decommission", '"b1:3181"', b"Success send decommission Bookie command b1:3181"),
    ],
)
async def test_both_routes_replace_the_bookie_and_answer_as_bookkeeper(name: str, sources: str, text: bytes) -> None:
    context = Context()
    answer = await put(context, name, b'{"bookie_src": %s, "delete_cookie": true}' % sources.encode())
    assert (answer.status, answer.body) == (200, text)
    await put(context, name, b'{"bookie_src": %s}' % sources.encode())
    assert context.replaced == [("b1:3181", True), ("b1:3181", False)]


@pytest.mark.parametrize("name", ["bookie", "decommission"])
@pytest.mark.parametrize("body", [b"{}", b'{"bookie_src": []}', b'{"bookie_src": [7]}', b'{"bookie_src": 7}'])
async def test_a_body_without_a_bookie_id_is_refused(name: str, body: bytes) -> None:
    context = Context()
    with pytest.raises(BadRequest):
        await put(context, name, body)
    assert context.replaced == []


# --- on metadata in memory --------------------------------------------------------------------------------------------


class AdminContext:
    """A service context with an admin whose metadata is in memory."""

    def __init__(self, admin: RecoveryAdmin) -> None:
        self.admin = admin

    async def recovery_admin(self) -> RecoveryAdmin:
        return self.admin


@pytest.fixture
async def context() -> AdminContext:
    async def no_ledgers() -> Any:
        raise AssertionError("these routes need no ledger client")

    store, layout = MemoryTree().connect(), LedgersLayout()
    await store.create(layout.root)
    admin = RecoveryAdmin(
        store, layout, by="anna", ledgers=no_ledgers, randomness=random.Random(1), clock_ms=lambda: 1000
    )
    await admin.marks.prepare()
    return AdminContext(admin)


async def test_the_switch_pauses_and_resumes_recovery(context: AdminContext) -> None:
    assert json.loads((await call(context, "GET", "status")).body) == {"enabled": True}
    for text, is_enabled in (("false", False), ("false", False), ("true", True), ("true", True)):
        answer = await call(context, "PUT", "status", enabled=text)
        assert (answer.status, json.loads(answer.body)) == (200, {"enabled": is_enabled})
        assert await context.admin.is_enabled() is is_enabled
        assert json.loads((await call(context, "GET", "status")).body) == {"enabled": is_enabled}
    with pytest.raises(BadRequest, match="enabled is missing"):
        await call(context, "PUT", "status")
    with pytest.raises(BadRequest):
        await call(context, "PUT", "status", enabled="perhaps")
    assert [event.kind for event in await context.admin.records.history()] == ["resumed", "paused"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [3, 4, 5]),
        ({"missingreplica": ""}, [3, 4, 5]),
        ({"missingreplica": "b1:1"}, [3]),
        ({"missingreplica": "b2:1"}, [3, 4]),
        ({"excludingmissingreplica": "b1:1"}, [4, 5]),
        ({"excludingmissingreplica": ""}, [3, 4, 5]),
        ({"missingreplica": "b2:1", "excludingmissingreplica": "b1:1"}, [4]),
        ({"missingreplica": "b1:1", "printmissingreplica": "true"}, {"3": ["b1:1", "b2:1"]}),
        ({"missingreplica": "b1:1", "printmissingreplica": "false"}, [3]),
    ],
)
async def test_marked_ledgers_are_selected_by_their_missing_replicas(
    context: AdminContext, query: dict[str, str], expected: Any
) -> None:
    for number, replicas in ((3, ("b1:1", "b2:1")), (4, ("b2:1",)), (5, ())):
        await context.admin.marks.mark(LedgerId(number), replicas)
    answer = await call(context, "GET", "list_under_replicated_ledger", **query)
    assert (answer.status, json.loads(answer.body)) == (200, expected)
    assert answer.content_type == "application/json"


async def test_no_marked_ledger_is_not_found(context: AdminContext) -> None:
    answer = await call(context, "GET", "list_under_replicated_ledger")
    assert (answer.status, answer.body) == (404, b"No under replicated ledgers found")


async def test_the_auditor_is_the_leader_of_the_election(context: AdminContext) -> None:
    answer = await call(context, "GET", "who_is_auditor")
    assert (answer.status, answer.body) == (404, b"No auditor elected")
    path = f"{LedgersLayout().auditor_election}/V_"
    await context.admin.store.create(path, b'bookieId: "auditor-0"\n', sequential=True, make_parents=True)
    answer = await call(context, "GET", "who_is_auditor")
    assert (answer.status, answer.body) == (200, b"Auditor: auditor-0")


async def test_a_delay_is_a_whole_number_of_seconds(context: AdminContext) -> None:
    for body in (b'{"delay_seconds": "1"}', b'{"delay_seconds": -1}', b'{"delay_seconds": true}', b"{}"):
        with pytest.raises(BadRequest):
            await put(context, "lost_bookie_recovery_delay", body)
    assert await context.admin.marks.lost_bookie_delay_s() is None
    answer = await put(context, "lost_bookie_recovery_delay", b'{"delay_seconds": 33}')
    assert (answer.status, answer.body) == (200, b"Success set lostBookieRecoveryDelay to 33")
    assert await context.admin.marks.lost_bookie_delay_s() == 33


async def test_an_audit_is_triggered_by_writing_the_delay_again(context: AdminContext) -> None:
    await context.admin.marks.set_lost_bookie_delay_s(33)
    path = LedgersLayout().lost_bookie_delay
    before = (await context.admin.store.get(path)).stat.version
    answer = await call(context, "PUT", "trigger_audit")
    assert (answer.status, answer.body) == (200, b"Success trigger audit.")
    assert (await context.admin.store.get(path)).stat.version == before + 1


def test_only_the_list_of_all_marked_ledgers_is_a_heavy_request() -> None:
    assert [route.path for route in ROUTES if route.is_heavy] == [f"{ROOT}/list_under_replicated_ledger"]

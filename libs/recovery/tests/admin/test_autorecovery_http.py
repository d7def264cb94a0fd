"""BookKeeper's autorecovery routes: which operation of the admin each calls, and what it answers."""

import json
from typing import Any

import pytest
from bindery_core.errors import BadRequest
from bindery_kit.admin.http import Answer, Request
from bindery_recovery.admin.autorecovery_http import ROOT, ROUTES


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


async def call(context: Context, method: str, name: str, body: bytes = b"") -> Answer:
    (route,) = [one for one in ROUTES if (one.method, one.path) == (method, f"{ROOT}/{name}")]
    return await route.handler(context, Request(method, route.path, body=body))


async def put(context: Context, name: str, body: bytes) -> Answer:
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

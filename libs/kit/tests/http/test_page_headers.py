"""Headers of HTML pages, and the one that every response has."""

import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from bindery_kit.http.http_server import HttpServer
from bindery_kit.http.page_headers import page_headers


def test_a_page_runs_and_loads_nothing_and_is_shown_in_no_frame() -> None:
    headers = page_headers("body { color: red }")
    digest = base64.b64encode(hashlib.sha256(b"body { color: red }").digest()).decode()
    assert headers == {
        "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_every_style_has_its_own_digest() -> None:
    policies = {page_headers(style)["Content-Security-Policy"] for style in ("", "a", "a ", "\u00e9")}
    assert len(policies) == 4


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/broken", {}, 500),
        ("/", {"Origin": "http://evil.example"}, 403),
        ("/", {"Host": "evil.example"}, 403),
    ],
    ids=["a response", "an error of the application", "another origin", "another host"],
)
async def test_no_response_is_sniffed(path: str, headers: dict[str, str], status: int) -> None:
    async def app(
        scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/broken":
            raise OSError("broken")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"x"})

    async with (
        HttpServer(app, lifespan="off") as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        answer = await http.get(path, headers=headers)
    assert answer.status_code == status
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]

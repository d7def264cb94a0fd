"""The client of a bookie: tokens, paths, and errors that name the fix."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from bindery.bookie.admin_api import BookieAdmin, BookieRefused, BookieUnreachable, NotServed
from bindery_core.errors import BinderyError, Unauthorized

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BINDERY_BOOKIE_URL", "BINDERY_BOOKIE_TOKEN_FILE", "BINDERY_BOOKIE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_json_goes_in_and_out(serve: Callable[[Handler], None]) -> None:
    requests: list[tuple[str, str, bytes]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append((request.method, str(request.url), request.read()))
        return httpx.Response(200, content={"GET": b'{"a":1}', "PUT": b"done", "DELETE": b""}[request.method])

    serve(handler)
    with BookieAdmin("http://h:1/", None) as bookie:
        assert bookie.get("disks", limit=2, after=None) == {"a": 1}
        assert bookie.put("drill", {"b": 2}) == "done"
        assert bookie.put("drill") == "done"
        assert bookie.delete("drill") is None
    root = "http://h:1/api/v1/bookie"
    assert requests == [
        ("GET", f"{root}/disks?limit=2", b""),
        ("PUT", f"{root}/drill", b'{"b":2}'),
        ("PUT", f"{root}/drill", b""),
        ("DELETE", f"{root}/drill", b""),
    ]


def test_the_url_comes_from_the_option_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BookieAdmin(None, None).url == "http://127.0.0.1:8000"
    monkeypatch.setenv("BINDERY_BOOKIE_URL", "http://env:1")
    assert BookieAdmin(None, None).url == "http://env:1"
    assert BookieAdmin("http://option:2", None).url == "http://option:2"


def test_the_token_comes_from_a_file_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Callable[[Handler], None]
) -> None:
    serve(lambda request: httpx.Response(200, json=request.headers.get("authorization")))

    def sent(token_file: str | None) -> object:
        with BookieAdmin("http://h:1", token_file) as bookie:
            return bookie.get("state")

    assert sent(None) is None
    monkeypatch.setenv("BINDERY_BOOKIE_TOKEN", " variable ")
    assert sent(None) == "Bearer variable"
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("first\n")
    two.write_text("second\n")
    monkeypatch.setenv("BINDERY_BOOKIE_TOKEN_FILE", str(one))
    assert sent(None) == "Bearer first"
    assert sent(str(two)) == "Bearer second"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("refused"), "no bookie answers at http://h:1: is it running?"),
        (httpx.ReadTimeout("late"), "the bookie at http://h:1 did not answer within 30 s"),
        (httpx.ReadError("reset"), "cannot reach the bookie at http://h:1: reset"),
        (httpx.InvalidURL("odd"), "cannot reach the bookie at http://h:1: odd"),
    ],
)
def test_a_lost_bookie_is_named(serve: Callable[[Handler], None], error: Exception, words: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    serve(handler)
    with BookieAdmin("http://h:1", None) as bookie, pytest.raises(BookieUnreachable) as caught:
        bookie.get("state")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (401, b'{"detail":"no tokens are configured: set x"}', Unauthorized, "no tokens are configured: set x"),
        (401, b'{"detail":"wrong token"}', Unauthorized,
         "wrong token; pass --token-file, or set BINDERY_BOOKIE_TOKEN_FILE or BINDERY_BOOKIE_TOKEN"),
        (404, b'{"detail":"no such ledger"}', NotServed, "no such ledger"),
        (409, b'{"title":"conflict"}', BookieRefused, "conflict (409)"),
        (400, b"plain text", BookieRefused, "plain text (400)"),
        (399 + 1, b"x" * 600, BookieRefused, "x" * 500 + " (400)"),
        (503, b"", BookieRefused, "Service Unavailable (503)"),
        (404, b'{"detail":"nothing is served at /x; the API is described at /docs"}', BookieRefused,
         "http://h:1 is a broker, not a bookie; --url or BINDERY_BOOKIE_URL names one's --http-port"),
        (404, b'{"detail":"nothing is served at /x; see /api/v1/bookie/state"}', NotServed,
         "nothing is served at /x; see /api/v1/bookie/state"),
    ],
)  # fmt: skip
def test_a_refusal_has_the_reason(
    serve: Callable[[Handler], None], status: int, body: bytes, kind: type[BinderyError], message: str
) -> None:
    serve(lambda _: httpx.Response(status, content=body))
    with BookieAdmin("http://h:1", None) as bookie, pytest.raises(BinderyError) as caught:
        bookie.get("x")
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_codes_are_stable() -> None:
    assert [kind.code for kind in (BookieUnreachable, BookieRefused, NotServed)] == [
        "bookie_unreachable",
        "refused",
        "not_found",
    ]

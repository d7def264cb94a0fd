"""The base of HTTP clients: URLs, parameters, and who answered."""

from typing import Any

import httpx
import pytest
from bindery.common.json_http import JsonHttp, answerer_of, problem_of
from bindery_core.errors import BadRequest


class Recorder(JsonHttp):
    """Returns its arguments instead of sending a request."""

    def request(self, method: str, path: str, **options: Any) -> Any:
        return method, path, options


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:1/", "HTTP://h:1/a/b/", "http://[::1]:8080", "http://10.0.0.1:8000//"]
)
def test_a_url_is_accepted_without_its_last_slash(url: str) -> None:
    with Recorder(url, timeout_s=1) as http:
        assert http.url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "ftp://h",
        "http://",
        "http:///a",
        "http://h\\x",
        "http://h?x=1",
        "http://h#x",
        "http://h /",
        "http://h:port",
    ],
)
def test_another_text_is_not_a_url(url: str) -> None:
    with pytest.raises(BadRequest, match="not a URL") as caught:
        Recorder(url, timeout_s=1)
    assert str(caught.value) == f"not a URL: {url}; the format is http://host:port"


@pytest.mark.parametrize(
    "url",
    [
        "http://me@h",
        "http://me:secret@h:1/a",
        "http://@h",
        "HTTPS://secret@h?x",
        "http://me:secret@h@x",
        "http://h\\@x",
    ],
)
def test_a_url_with_credentials_is_refused_without_showing_them(url: str) -> None:
    with pytest.raises(BadRequest, match="the URL has credentials before its @, which are not sent") as caught:
        Recorder(url, timeout_s=1)
    assert "secret" not in str(caught.value)
    assert "--token-file" in str(caught.value)


def test_an_at_sign_in_the_path_is_no_credential() -> None:
    with Recorder("http://h/a@b", timeout_s=1) as http:
        assert http.url == "http://h/a@b"


def test_parameters_that_are_none_are_omitted() -> None:
    with Recorder("http://h", timeout_s=1) as http:
        assert http.get("/a", x=0, y=None, z="") == ("GET", "/a", {"params": {"x": 0, "z": ""}})


def test_the_block_closes_the_connection() -> None:
    with Recorder("http://h", timeout_s=2.5, headers={"Authorization": "Bearer t"}) as http:
        connection = http._http
        assert not connection.is_closed
        assert connection.headers["authorization"] == "Bearer t"
        assert connection.timeout == httpx.Timeout(2.5)
        assert not connection.trust_env
    assert connection.is_closed


@pytest.mark.parametrize(
    ("body", "problem"), [(b'{"detail":"x"}', {"detail": "x"}), (b"[1]", {}), (b"text", {}), (b"", {})]
)
def test_problem_details_are_an_object(body: bytes, problem: dict[str, Any]) -> None:
    assert problem_of(httpx.Response(400, content=body)) == problem


@pytest.mark.parametrize(
    ("detail", "who"),
    [
        ("nothing is served at /x; see /v1/recovery/status", "an auditor"),
        ("nothing is served at /x; see /api/v1/bookie/state", "a bookie"),
        ("nothing is served at /x; the API is described at /docs", "a broker"),
        ("nothing is served at /api/v1/bookie/state; see elsewhere", None),
        ("no such topic; the API is described at /docs", None),
        ("", None),
        (None, None),
    ],
)
def test_a_service_is_recognized_by_the_error_for_a_path_it_does_not_serve(detail: str | None, who: str | None) -> None:
    assert answerer_of({"detail": detail}) == who


def test_a_problem_without_detail_has_no_answerer() -> None:
    assert answerer_of({}) is None

"""Upload of backups to a store, and the signature for S3."""

import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from bindery.cluster.backup_upload import ATTEMPTS_MAX, NotUploaded, Store
from bindery.cluster.s3_signature import S3Key, signed_headers
from bindery_core.errors import BadRequest

EXAMPLE = S3Key("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EXAMPLE_TIME = datetime(2013, 5, 24, tzinfo=UTC)


class StoreServer:
    """A store that records requests and answers with the next of `statuses`, then with 200."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, {name.lower(): one for name, one in self.headers.items()}, body))
                status = outer.statuses.pop(0) if outer.statuses else 200
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "6")
                self.end_headers()
                self.wfile.write(b"answer")

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer()
    thread = Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "metadata-20261130T051200Z-01234567.jsonl.gz"
    path.write_bytes(b"content" * 10_000)
    return path


def folder(tmp_path: Path, **files: str) -> str:
    place = tmp_path / "store"
    place.mkdir(exist_ok=True)
    for name, content in files.items():
        (place / name.replace("_", "-")).write_text(content)
    return str(place)


def test_the_name_goes_where_the_url_says(server: StoreServer, file: Path, tmp_path: Path) -> None:
    for url, path in (
        ("/backups/", f"/backups/{file.name}"),
        ("/c/{name}?sig=secret", f"/c/{file.name}?sig=secret"),
        ("/fixed?sig=secret", "/fixed?sig=secret"),
    ):
        store = Store.of(
            folder(tmp_path, url=f"{server.url}{url}\n", headers="X-Kind: block\nAuthorization: Bearer t\n")
        )
        place = store.put(file)
        assert place == server.url + path.partition("?")[0]
        seen, headers, body = server.requests.pop()
        assert (seen, body) == (path, file.read_bytes())
        assert (headers["x-kind"], headers["authorization"]) == ("block", "Bearer t")
        assert "transfer-encoding" not in headers, "object stores require a length"


def test_an_upload_is_repeated_only_if_that_may_help(server: StoreServer, file: Path) -> None:
    slept: list[float] = []
    store = Store(f"{server.url}/a?sig=secret", sleep=slept.append)
    server.statuses = [503, 429]
    store.put(file)
    assert (len(server.requests), slept) == (3, [1.0, 2.0])
    for status, attempts in ((403, 1), (307, 1)):
        server.requests.clear()
        server.statuses = [status]
        with pytest.raises(NotUploaded, match=f"{status} .*answer") as raised:
            store.put(file)
        assert len(server.requests) == attempts
        assert "secret" not in str(raised.value)
    server.requests.clear()
    server.statuses = [500] * 9
    with pytest.raises(NotUploaded):
        store.put(file)
    assert len(server.requests) == ATTEMPTS_MAX


def test_a_store_that_does_not_answer_is_named(file: Path) -> None:
    with pytest.raises(NotUploaded, match=r"cannot send the backup to http://127\.0\.0\.1:1/a: "):
        Store("http://127.0.0.1:1/a", sleep=lambda _: None).put(file)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "url is missing"),
        ({"url": "ftp://a/b"}, "not a URL that begins with https"),
        ({"url": "https://"}, "not a URL"),
        ({"url": "https://a/", "headers": "no colon"}, "a line that is not `Name: value`"),
        ({"url": "https://a/", "access_key_id": "a"}, "both are needed"),
        ({"url": "a" * 70_000}, "is larger than"),
    ],
    ids=str,
)
def test_a_wrong_description_is_refused(files: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=words):
        Store.of(folder(tmp_path, **files))


def test_requests_to_s3_are_signed(server: StoreServer, file: Path, tmp_path: Path) -> None:
    keys = {"access_key_id": "A\n", "secret_access_key": "S\n", "session_token": "T", "region": "eu-west-1"}
    Store.of(folder(tmp_path, url=f"{server.url}/bucket/", **keys)).put(file)
    ((_, headers, body),) = server.requests
    assert headers["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
    assert headers["x-amz-security-token"] == "T"
    time = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    expected = signed_headers(
        "PUT",
        f"{server.url}/bucket/{file.name}",
        payload_sha256=headers["x-amz-content-sha256"],
        key=S3Key("A", "S", "T", "eu-west-1"),
        now=time,
    )
    assert headers["authorization"] == expected["Authorization"]
    assert "/eu-west-1/s3/aws4_request" in headers["authorization"]


def test_signatures_are_those_of_amazons_examples() -> None:
    """Source: "Examples: Signature Calculations in AWS Signature Version 4" of the S3 API reference."""
    host = "https://examplebucket.s3.amazonaws.com"
    empty = hashlib.sha256(b"").hexdigest()
    for method, url, payload, headers, signature in (
        (
            "GET", f"{host}/test.txt", empty, {"Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT", f"{host}/test%24file.text", hashlib.sha256(b"Welcome to Amazon S3.").hexdigest(),
            {"Date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET", f"{host}/?max-keys=2&prefix=J", empty, {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ):  # fmt: skip
        made = signed_headers(method, url, payload_sha256=payload, key=EXAMPLE, now=EXAMPLE_TIME, headers=headers)
        assert re.search("Signature=(.*)", made["Authorization"])[1] == signature, url  # type: ignore[index]

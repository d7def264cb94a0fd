"""The attacker's site: its pages, and names that change where they lead."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from bindery_e2e.browser.hostile_site import CLUSTER_NAME, NAME, REBOUND, HostileSite


@pytest.fixture
def site() -> Iterator[HostileSite]:
    with HostileSite() as one:
        one.attempts = {"name": [{"id": "1"}], "rebound x.example": []}
        yield one


@pytest.fixture
def victim() -> Iterator[int]:
    """Port of a server on loopback that answers 418."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(418)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()


def connect(site: HostileSite, name: str, port: int) -> socket.socket | None:
    """Connect through the attacker's name server; None if the name leads nowhere."""
    sock = socket.create_connection(("127.0.0.1", int(site.proxy.rpartition(":")[2])), timeout=10)
    sock.sendall(b"\x05\x01\x00")
    assert sock.recv(2) == b"\x05\x00"
    sock.sendall(b"\x05\x01\x00\x03" + bytes([len(name)]) + name.encode() + struct.pack(">H", port))
    if sock.recv(10)[1] == 0:
        return sock
    sock.close()
    return None


def status(sock: socket.socket | None) -> bytes:
    assert sock is not None
    sock.sendall(b"GET /page?kind=name HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return sock.recv(1 << 16).split()[1]


def test_pages_have_the_script_with_their_attempts(site: HostileSite) -> None:
    page = httpx.get(f"{site.url}/page?kind=name", trust_env=False).text
    assert f"{site.url}/attack.js?kind=name" in page
    script = httpx.get(f"{site.url}/attack.js?kind=name", trust_env=False).text
    config = json.loads(script.partition(";\n")[0].removeprefix("const CONFIG = "))
    assert config == {"site": site.url, "kind": "name", "attempts": [{"id": "1"}], "rebind": None}
    assert "sandbox='allow-scripts" in httpx.get(f"{site.url}/sandbox?kind=name", trust_env=False).text
    assert '"rebind": "x.example"' in site.script("rebound x.example")


def test_results_are_received(site: HostileSite) -> None:
    httpx.post(f"{site.url}/result?kind=name", json=[{"id": "1"}], trust_env=False)
    assert site.results == {"name": [{"id": "1"}]}


def test_a_name_leads_to_the_site_until_it_is_rebound(site: HostileSite, victim: int) -> None:
    name = REBOUND["broker"]
    assert status(connect(site, name, victim)) == b"200"
    kept = connect(site, name, victim)
    assert kept is not None
    httpx.get(f"{site.url}/rebind?name={name}", trust_env=False)
    assert kept.recv(1) == b"", "connections to the site are closed"
    assert status(connect(site, name, victim)) == b"418"
    assert status(connect(site, NAME, victim)) == b"200"


def test_no_other_host_is_reached(site: HostileSite, victim: int) -> None:
    assert status(connect(site, CLUSTER_NAME, victim)) == b"418"
    assert connect(site, "www.example.com", victim) is None
    assert connect(site, "localhost", victim) is None
    assert "www.example.com" in site.asked

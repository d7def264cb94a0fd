"""HostileSite: the web server and the name server of an attacker, on loopback.

The browser resolves names with a SOCKS proxy, which is the attacker's name server: every name of `NAMES` leads to the
site until `rebind(name)`, and from then on to the same port of loopback, as after a change of a DNS record with a short
lifetime. Open connections of that name are closed. `CLUSTER_NAME` always leads to loopback. No other host is reached.

| path                     | response                                                                             |
|--------------------------|--------------------------------------------------------------------------------------|
| /page?kind=              | page that runs the attempts of a kind                                                |
| /sandbox?kind=           | page that shows /page in a sandbox, where it has no origin                           |
| /attack.js?kind=         | the script                                                                           |
| /redirect?code=&to=      | redirect                                                                             |
| /refresh?to=             | page that leads to another one                                                       |
| /csp?to=                 | page whose violations of its own policy are reported to another site                 |
| /rebind?name=            | changes a name                                                                       |
| POST /result?kind=       | receives what a page could read                                                      |
"""

import contextlib
import html
import json
import select
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

HOST: Final = "127.0.0.1"
NAME: Final = "evil.example"
CLUSTER_NAME: Final = "cluster.evil.example"
REBOUND: Final = {name: f"rebound-{name}.example" for name in ("broker", "bookie", "auditor")}
"""Service -> name of the attacker that is rebound to it."""
NAMES: Final = (NAME, *REBOUND.values())
SCRIPT: Final = Path(__file__).with_name("attack.js")


class HostileSite:
    """`url`: of the site, by address. `proxy`: of the browser. `results`: kind of page -> what it reported."""

    def __init__(self) -> None:
        self.attempts: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        """Kind of page -> its attempts."""
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.asked: set[str] = set()
        """Names that the browser resolved."""
        self.rebound: set[str] = set()
        self._tunnels: list[tuple[str, socket.socket]] = []
        self._http = ThreadingHTTPServer((HOST, 0), _handler(self))
        self._socks = _SocksServer((HOST, 0), _socks_handler(self))
        self.port: int = self._http.server_port
        for server in (self._http, self._socks):
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def proxy(self) -> str:
        return f"socks5://{HOST}:{self._socks.server_address[1]}"

    def address(self, name: str, port: int) -> tuple[str, int] | None:
        """Resolve a name; None if there is no such host."""
        self.asked.add(name)
        if name in NAMES:
            return (HOST, port) if name in self.rebound else (HOST, self.port)
        return (HOST, port) if name in (CLUSTER_NAME, "0.0.0.0") else None

    def rebind(self, name: str) -> None:
        self.rebound.add(name)
        for tunnel_name, tunnel in list(self._tunnels):
            if tunnel_name == name:
                with contextlib.suppress(OSError):
                    tunnel.shutdown(socket.SHUT_RDWR)

    def script(self, kind: str) -> str:
        """Return the script of a page of `kind`."""
        config: dict[str, Any] = {"site": self.url, "kind": kind, "attempts": self.attempts[kind]}
        config["rebind"] = kind.partition(" ")[2] if kind.startswith("rebound ") else None
        return f"const CONFIG = {json.dumps(config)};\n{SCRIPT.read_text()}"

    def document(self, kind: str) -> str:
        """Return a page of `kind`."""
        return f"<!doctype html><title>{kind}</title><body><script src='{self.url}/attack.js?kind={kind}'></script>"

    def close(self) -> None:
        for server in (self._http, self._socks):
            server.shutdown()
            server.server_close()
        for _, tunnel in self._tunnels:
            tunnel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _handler(site: HostileSite) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            kind, to = query.get("kind", ""), query.get("to", "")
            status, content, headers = 200, "", {"Content-Type": "text/html; charset=utf-8"}
            if parts.path == "/page":
                content = site.document(kind)
            elif parts.path == "/sandbox":
                allowed = "allow-scripts allow-forms allow-popups allow-top-navigation"
                content = f"<!doctype html><iframe sandbox='{allowed}' src='/page?kind={kind}'></iframe>"
            elif parts.path == "/attack.js":
                content, headers = site.script(kind), {"Content-Type": "text/javascript; charset=utf-8"}
            elif parts.path == "/redirect":
                status, headers["Location"] = int(query["code"]), to
            elif parts.path == "/refresh":
                content = f"<!doctype html><meta http-equiv='refresh' content='0;url={html.escape(to)}'>"
            elif parts.path == "/csp":
                headers["Content-Security-Policy"] = f"img-src 'none'; report-uri {to}"
                content = "<!doctype html><img src='/nothing'>"
            elif parts.path == "/rebind":
                site.rebind(query["name"])
            elif parts.path == "/result":
                site.results[kind] = json.loads(body)
            else:
                status = 404
            self._send(status, content.encode(), headers)

        do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = _answer

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            everyone = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store", "Connection": "close"}
            for name, value in {**headers, **everyone, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


class _SocksServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The browser closes connections at any time."""


def _socks_handler(site: HostileSite) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        """SOCKS version 5 (RFC 1928) without authentication: connections only."""

        def handle(self) -> None:
            client: socket.socket = self.request
            _, methods = self._exactly(2)
            self._exactly(methods)
            client.sendall(b"\x05\x00")
            _, _, _, kind = self._exactly(4)
            if kind == 3:
                name = self._exactly(self._exactly(1)[0]).decode("ascii", "replace")
            else:
                family = socket.AF_INET if kind == 1 else socket.AF_INET6
                name = socket.inet_ntop(family, self._exactly(4 if kind == 1 else 16))
            (port,) = struct.unpack(">H", self._exactly(2))
            address = site.address(name, port)
            try:
                server = socket.create_connection(address, timeout=5) if address else None
            except OSError:
                server = None
            client.sendall(b"\x05" + (b"\x00" if server else b"\x04") + b"\x00\x01" + bytes(6))
            if server is not None:
                site._tunnels += [(name, client), (name, server)]
                with server:
                    self._relay(client, server)

        def _exactly(self, size: int) -> bytes:
            found = b""
            while len(found) < size:
                piece = self.request.recv(size - len(found))
                if not piece:
                    raise ConnectionError
                found += piece
            return found

        @staticmethod
        def _relay(one: socket.socket, other: socket.socket) -> None:
            while True:
                for ready in select.select([one, other], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (other if ready is one else one).sendall(data)

    return Handler

"""Call the broker without a pause, and tell which certificates the ports serve and which tokens they accept.

Runs in the toolbox, with the environment of its commands. Two clients produce, receive and acknowledge messages: one
keeps its connection, and one connects for each call. They use the files of the token and of the authorities as they are
at that moment. Each line of stdin is a JSON object, answered by a line:

| question  | content                                     | answer                                                  |
|-----------|---------------------------------------------|---------------------------------------------------------|
| https     | URLs that need a token                      | `serials`: port -> serial number of the certificate     |
| ledger    | `host:port` of the ledger ports of bookies  |                                                         |
| tokens    | name -> token                               | `accepted`: name -> ports that accept it                |
|           |                                             | `calls`: successful ones so far, `failures`: the others |
"""

import http.client
import json
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import AuthRequest, Request, Response, StartTlsRequest
from bindery_identity.tls import client_tls

TIMEOUT_S = 60.0
PAUSE_S = 0.1
"""Seconds between two rounds of calls of a client."""
FAILURES_MAX = 20
BROKER = urlsplit(os.environ["BINDERY_URL"])
TLS = client_tls(ca_file=os.environ["BINDERY_HTTP_CA_FILE"]).context


class Counts:
    """Successful calls, and descriptions of the first failures."""

    def __init__(self) -> None:
        self.calls = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        with self._lock:
            self.calls += 1

    def failed(self, text: str) -> None:
        with self._lock:
            if len(self.failures) < FAILURES_MAX:
                self.failures.append(f"{time.strftime('%H:%M:%S')} {text}")


class Client:
    """One client with a topic of its own. `is_kept`: its calls share a connection."""

    def __init__(self, name: str, counts: Counts, *, is_kept: bool) -> None:
        self._name = name
        self._counts = counts
        self._is_kept = is_kept
        self._topic = f"/v1/topics/public/default/steady-calls-{name}"
        self._connection: http.client.HTTPSConnection | None = None

    def run(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                self._round(f"{self._name} {number}")
            except Exception as error:
                self._counts.failed(f"{self._name}, round {number}: {type(error).__name__}: {error}")
                self._connection = None
            time.sleep(PAUSE_S)

    def _round(self, payload: str) -> None:
        self._call(f"{self._topic}/messages?batch=false", [{"payload": payload}])
        subscription = f"{self._topic}/subscriptions/all"
        wanted = {"consumer": self._name, "initial": "earliest", "max": 1, "wait_ms": 20_000}
        messages = self._call(f"{subscription}/receive", wanted)["messages"]
        if [message["payload"] for message in messages] != [payload]:
            raise ValueError(f"sent {payload!r}, received {messages}")
        self._call(f"{subscription}/ack", {"message_ids": [message["message_id"] for message in messages]})

    def _call(self, path: str, body: Any) -> Any:
        connection = self._connection or https_connection(BROKER.netloc)
        token = Path(os.environ["BINDERY_TOKEN_FILE"]).read_text().split()[0]
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise ValueError(f"{path}: {response.status} {answer[:300]!r}")
        self._counts.succeeded()
        if self._is_kept:
            self._connection = connection
        else:
            connection.close()
        return json.loads(answer or b"null")


def https_connection(netloc: str) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection(netloc, timeout=TIMEOUT_S, context=TLS)


def https_port(url: str, token: str) -> tuple[str, bool]:
    """Return the serial number of the certificate, and whether the port accepts the token."""
    parts = urlsplit(url)
    connection = https_connection(parts.netloc)
    try:
        connection.connect()
        serial = serial_of(connection.sock)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request("GET", target, headers={"Authorization": f"Bearer {token}"})
        return serial, connection.getresponse().status not in (401, 403)
    finally:
        connection.close()


def ledger_port(address: str, token: str) -> tuple[str, bool]:
    """As `https_port`."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
        assert ask(plain, StartTlsRequest(1)).status == 0
        with TLS.wrap_socket(plain, server_hostname=host) as secured:
            serial = serial_of(secured)
            status = getattr(ask(secured, AuthRequest(2, "bindery", token.encode())), "status", None)
            return serial, status == 0


def serial_of(connection: ssl.SSLSocket) -> str:
    certificate = connection.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


def ask(connection: socket.socket, request: Request) -> Response:
    connection.sendall(v3.encode_request(request))
    decoder = FrameDecoder()
    while data := connection.recv(65_536):
        if messages := decoder.feed(data):
            return v3.decode_response(messages[0])
    raise ConnectionResetError("the bookie closed the connection")


def look(question: dict[str, Any]) -> dict[str, Any]:
    serials: dict[str, str] = {}
    accepted: dict[str, list[str]] = {name: [] for name in question["tokens"]}
    ports: list[tuple[str, str, Callable[[str, str], tuple[str, bool]]]] = [
        *((urlsplit(url).netloc, url, https_port) for url in question["https"]),
        *((address, address, ledger_port) for address in question["ledger"]),
    ]
    for port, target, attempt in ports:
        for name, token in question["tokens"].items():
            serials[port], is_accepted = attempt(target, token)
            if is_accepted:
                accepted[name].append(port)
    return {"serials": serials, "accepted": accepted}


def main() -> None:
    counts = Counts()
    for name, is_kept in (("kept", True), ("fresh", False)):
        threading.Thread(target=Client(name, counts, is_kept=is_kept).run, daemon=True).start()
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = look(json.loads(line))
        except (OSError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({**answer, "calls": counts.calls, "failures": counts.failures}), flush=True)


if __name__ == "__main__":
    main()

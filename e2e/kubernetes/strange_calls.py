"""Try every port of a release, and print each attempt with its outcome. Runs in a pod without credentials.

stdin is a JSON object:

| key        | content                                                                            |
|------------|------------------------------------------------------------------------------------|
| bookies    | `host:port` of ledger ports                                                        |
| zookeeper  | `host:port` of ZooKeeper's client port                                             |
| nodes      | paths of ZooKeeper's nodes                                                         |
| closed     | `host:port` where nothing should listen                                            |

Each line of stdout is a list: port, attempt, outcome. Outcomes that refuse: `unreachable`, `closed`, `unauthorized`,
`no auth`, `not allowed`. Any other one is what a client without credentials gets. Nothing is changed by an attempt that
succeeds unexpectedly, except for the creation of a node: changes and deletions name a version that no node has.
"""

import json
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any

from bindery_core.wire import v2, v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import (
    AddRequest,
    AuthRequest,
    BatchReadRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    Request,
    StartTlsRequest,
    Status,
    WriteLacRequest,
)
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoAuthError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.security import OPEN_ACL_UNSAFE

TIMEOUT_S = 10.0
LEDGER_ID = 1
KEY = bytes(20)
NO_VERSION = 2**30
"""A version that no node has."""
ANY_SERVER = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
ANY_SERVER.check_hostname, ANY_SERVER.verify_mode = False, ssl.CERT_NONE
WORDS = (
    "conf", "cons", "crst", "dirs", "dump", "envi", "gtmk", "hash", "isro", "lead", "mntr", "orst", "ruok", "srst",
    "srvr", "stat", "stmk", "wchc", "wchp", "wchs",
)  # fmt: skip
"""All commands of four letters that ZooKeeper has."""


def requests(version: int) -> dict[str, Request]:
    """Attempt -> request in this version of the protocol."""
    both: dict[str, Request] = {
        "AUTH with a token that no key signed": AuthRequest(version, "bindery", b"e30.e30.AAAA"),
        "READ": ReadRequest(version, LEDGER_ID, 0),
        "READ that fences": ReadRequest(version, LEDGER_ID, 0, flag=1, master_key=KEY),
        "ADD": AddRequest(version, LEDGER_ID, 0, KEY, bytes(64)),
    }
    if version == v2.VERSION:
        return {**both, "BATCH_READ": BatchReadRequest(version, LEDGER_ID, 0, 1, count_max=10)}
    return {
        **both,
        "WRITE_LAC": WriteLacRequest(version, LEDGER_ID, 0, KEY, bytes(36)),
        "READ_LAC": ReadLacRequest(version, LEDGER_ID),
        "FORCE_LEDGER": ForceLedgerRequest(version, LEDGER_ID),
        "GET_BOOKIE_INFO": BookieInfoRequest(version, requested=3),
        "GET_LIST_OF_ENTRIES": ListEntriesRequest(version, LEDGER_ID),
    }


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def answer(connection: socket.socket, codec: Any, request: Request) -> str:
    connection.sendall(codec.encode_request(request))
    decoder = FrameDecoder()
    while data := connection.recv(65_536):
        if messages := decoder.feed(data):
            status = Status(codec.decode_response(messages[0]).status)
            return "unauthorized" if status is Status.UNAUTHORIZED else status.name
    return "closed"


def ledger_port(address: str, codec: Any, request: Request, *, with_tls: bool) -> str:
    with connect(address) as plain:
        if not with_tls:
            return answer(plain, codec, request)
        started = answer(plain, v3, StartTlsRequest(1))
        if started != "OK":
            return f"START_TLS: {started}"
        with ANY_SERVER.wrap_socket(plain) as secured:
            return answer(secured, codec, request)


def raw(address: str, sent: bytes) -> str:
    """Send bytes and return what came back until the end of the connection."""
    with connect(address) as connection:
        connection.sendall(sent)
        received = b""
        while data := connection.recv(65_536):
            received += data
        return received.decode(errors="replace")


def tls_at_once(address: str) -> str:
    with connect(address) as plain, ANY_SERVER.wrap_socket(plain) as secured:
        return f"a handshake with {secured.version()}"


def connection_only(address: str) -> str:
    with connect(address):
        return "a connection"


def word(address: str, name: str) -> str:
    found = raw(address, name.encode())
    return "not allowed" if "whitelist" in found else f"{len(found)} bytes" if found else "closed"


def attempt(port: str, what: str, call: Callable[[], str]) -> None:
    try:
        outcome = call()
    except (ConnectionRefusedError, TimeoutError, socket.gaierror):
        outcome = "unreachable"
    except (ssl.SSLError, ConnectionError):
        outcome = "closed"
    except NoAuthError:
        outcome = "no auth"
    except KazooException as error:
        outcome = type(error).__name__
    print(json.dumps([port, what, outcome or "closed"]), flush=True)


def try_ledger_port(address: str) -> None:
    attempt(address, "HTTP in clear text", lambda: raw(address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
    attempt(address, "TLS without START_TLS", lambda: tls_at_once(address))
    for codec, version in ((v2, v2.VERSION), (v3, v3.VERSION)):
        for name, request in requests(version).items():
            for with_tls in (False, True):
                what = f"v{version} {name}, {'TLS' if with_tls else 'clear text'}"
                attempt(address, what, lambda: ledger_port(address, codec, request, with_tls=with_tls))  # noqa: B023


def try_zookeeper(address: str, nodes: list[str]) -> None:
    attempt(address, "TLS", lambda: tls_at_once(address))
    for name in WORDS:
        attempt(address, f"command {name}", lambda: word(address, name))  # noqa: B023
    client = KazooClient(address, timeout=TIMEOUT_S)
    try:
        client.start(TIMEOUT_S)
    except KazooTimeoutError:
        attempt(address, "session", lambda: "unreachable")
        return

    def done(result: object) -> str:
        return "done"

    def created(path: str) -> str:
        client.create(path, b"")
        client.delete(path)
        return "done"

    try:
        for node in nodes:
            below = f"{node.rstrip('/')}/strange"
            attempt(address, f"children {node}", lambda: done(client.get_children(node)))  # noqa: B023
            attempt(address, f"get {node}", lambda: done(client.get(node)))  # noqa: B023
            attempt(address, f"set {node}", lambda: done(client.set(node, b"", version=NO_VERSION)))  # noqa: B023
            attempt(address, f"delete {node}", lambda: done(client.delete(node, version=NO_VERSION)))  # noqa: B023
            attempt(address, f"create {below}", lambda: created(below))  # noqa: B023
            attempt(
                address,
                f"set the access list of {node}",
                lambda: done(client.set_acls(node, OPEN_ACL_UNSAFE, version=NO_VERSION)),  # noqa: B023
            )
        attempt(
            address, "reconfig", lambda: done(client.reconfig(joining="server.9=a:1:2;3", leaving="", new_members=""))
        )
    finally:
        client.stop()
        client.close()


def main() -> None:
    plan = json.load(sys.stdin)
    for address in plan["bookies"]:
        try_ledger_port(address)
    try_zookeeper(plan["zookeeper"], plan["nodes"])
    for address in plan["closed"]:
        attempt(address, "connect", lambda: connection_only(address))  # noqa: B023


if __name__ == "__main__":
    main()

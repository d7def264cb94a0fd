"""Measure what TLS, a token and permissions cost on a broker's port: messages per second, processor time, memory.

    python bench/secured.py                             # 3 minutes
    python bench/secured.py --rounds 8 --seconds 2 --connections 8

Two brokers of one cluster, with bookies in common: `plain` has neither; `secured` has https, and requires a signed
token whose role has a permission of the namespace. Each has a namespace of its own, so that no request is forwarded.
They take turns of `--seconds` for each row, and each round changes the order, so that other load on the machine affects
both. `speed` is the secured messages/s divided by the plain ones, the median over the pairs of neighbouring turns; it
includes the client, which encrypts as well. `by CPU` is the same for messages per second of the broker's processor
time. Memory is the growth of the broker's resident set with `--idle` connections that have sent one request each.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import platform
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import broker
import httpx
import msgspec
import uvloop
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_broker.access.access import Access, Target
from bindery_broker.access.decision import Rules
from bindery_identity.authenticator import Authenticator
from bindery_identity.tls import TlsFiles, server_tls
from bindery_identity.tokens import SignedTokens, sign
from bindery_kit.access.authenticate import Authenticate
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.http.http_limits import ServerLimits
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.tls_transport import TlsConnection
from bindery_kit.process.runtime import DIE_WITH_PARENT
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from bindery_simulation.certificates.authority import Authority

HOST: Final = "127.0.0.1"
KEY: Final = b"k" * 32
ROLE: Final = "clerk"
OPERATOR: Final = "operator"
BROKERS: Final = "brokers"
"""Role of the secured broker itself."""
START_TIMEOUT_S: Final = 120.0
REQUEST_SIZE: Final = 1_300
ANSWER_SIZE: Final = 250
"""Bytes of a request with a message of 1 KiB, and of its answer."""
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass
class Side:
    """One of the two brokers."""

    name: str
    url: str
    pid: int
    tls: ssl.SSLContext | None = None
    token: str = ""

    async def connect(self, url: str) -> broker.Connection:
        return await broker.Connection.open(url, tls=self.tls, token=self.token)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def resident_kib(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


class Turn(NamedTuple):
    messages_per_s: float
    cpu_us: float
    """Microseconds of the broker's processor time per message."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def brokers(folder: Path, *, is_control: bool) -> Iterator[list[Side]]:
    """Yield both brokers, on a cluster of three bookies whose own broker is idle."""
    authority = Authority(folder, "ca")
    certificate, key = authority.issue("broker")
    (folder / "keys").write_bytes(KEY)
    (folder / "own-token").write_bytes(sign(KEY, subject=BROKERS))
    secured = {
        "HTTP_TLS_CERTIFICATE_FILE": str(certificate),
        "HTTP_TLS_KEY_FILE": str(key),
        "PEERS_CA_FILE": str(authority.ca_file),
        "AUTH_TOKENS_KEYS_FILE": str(folder / "keys"),
        "AUTH_BROKER_TOKEN_FILE": str(folder / "own-token"),
        "AUTH_PROXY_ROLES": BROKERS,
        "AUTHORIZATION_ENABLED": "true",
        "AUTHORIZATION_SUPER_USER_ROLES": f"{OPERATOR},{BROKERS}",
    }
    if is_control:
        secured = {}
    tls = ssl.create_default_context(cadata=authority.pem.decode())
    token = sign(KEY, subject=ROLE, expires_at_s=int(time.time()) + 86_400).decode()
    with ThrowawayCluster(bookies=3) as cluster, contextlib.ExitStack() as running:
        sides = []
        for name, scheme, settings in (("plain", "http", {}), ("secured", "http" if is_control else "https", secured)):
            port = free_port()
            url = f"{scheme}://{HOST}:{port}"
            common = {"ZOOKEEPER": cluster.zookeeper, "PORT": str(port), "ADVERTISED_URL": url}
            process = running.enter_context(service({**common, **settings}, folder / f"{name}.log"))
            side = Side(name, url, process.pid, *((tls, token) if settings else ()))
            sides.append(side)
            headers = {"authorization": f"Bearer {sign(KEY, subject=OPERATOR).decode()}"}
            with httpx.Client(base_url=url, verify=tls, trust_env=False, headers=headers, timeout=30) as http:
                until_ready(http, process, folder / f"{name}.log")
                actions = {"actions": ["produce", "consume"]}
                for path, body in (("", {}), (f"/permissions/{ROLE}", actions)):
                    made = http.put(f"/v1/namespaces/public/{name}{path}", json=body)
                    assert made.status_code in (200, 201, 204), made.text
        yield sides


@contextlib.contextmanager
def service(settings: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a broker until the block ends.

    Each has a session of its own: Linux divides the processors between sessions, and the client of the benchmark must
    not take the share of one of the brokers.
    """
    environment = {f"BROKER_{name}": value for name, value in settings.items()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bindery_broker"],
            stdout=output,
            stderr=output,
            env={**os.environ, **environment, DIE_WITH_PARENT: str(os.getpid())},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def until_ready(http: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/readyz").status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a broker does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


async def turn(
    side: Side, step: broker.Step, lines: list[broker.Connection], *, batch: int, options: argparse.Namespace
) -> Turn:
    before = side.cpu_s()
    row = await broker.run(
        side.url,
        step,
        what="",
        connections=len(lines),
        per_request=batch,
        size=options.size,
        seconds=options.seconds,
        lines=lines,
    )
    return Turn(row.messages_per_s, (side.cpu_s() - before) / max(row.messages, 1) * 1e6)


async def compare(sides: list[Side], options: argparse.Namespace) -> None:
    """Show a row for each kind of request. Connections stay open, so that handshakes are in no row."""
    for connections in options.connections:
        lines = {side.name: [await side.connect(side.url) for _ in range(connections)] for side in sides}
        for batch in (1, options.batch):
            found: dict[tuple[str, str], list[Turn]] = {}
            for number in range(options.rounds + 1):
                for side in sides if number % 2 else sides[::-1]:
                    topic = f"public/{side.name}/t-{connections}-{batch}"
                    steps = {
                        "produce": broker.producing(topic, size=options.size, batch=batch),
                        "receive+ack": broker.receiving(topic, subscription="bench", batch=batch),
                    }
                    for what, step in steps.items():
                        result = await turn(side, step, lines[side.name], batch=batch, options=options)
                        if number:  # the first round warms up
                            found.setdefault((what, side.name), []).append(result)
            for what in ("produce", "receive+ack"):
                show(what, connections, batch, found[what, "plain"], found[what, "secured"])
        for line in itertools.chain(*lines.values()):
            await line.close()


def show(what: str, connections: int, batch: int, plain: list[Turn], secured: list[Turn]) -> None:
    pairs = list(zip(plain, secured, strict=True))
    speeds = [two.messages_per_s / one.messages_per_s for one, two in pairs]
    costs = [one.cpu_us / two.cpu_us for one, two in pairs]
    cpus = [statistics.median(turn.cpu_us for turn in turns) for turns in (plain, secured)]
    cells = [statistics.median(turn.messages_per_s for turn in turns) for turns in (plain, secured)]
    print(
        f"| {what} | {connections} | {batch} | {cells[0]:,.0f} | {cells[1]:,.0f} "
        f"| {statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f}) "
        f"| {cpus[0]:,.0f} | {cpus[1]:,.0f} | {statistics.median(costs):.2f} |",
        flush=True,
    )


async def memory(sides: list[Side], count: int) -> None:
    for side in sides:
        step = broker.producing(f"public/{side.name}/idle", size=100, batch=1)
        before = side.resident_kib()
        lines = []
        for _ in range(count):
            lines.append(await side.connect(side.url))
            await step(lines[-1], 0)
        print(f"{side.name}: {(side.resident_kib() - before) / count:.1f} KiB per connection, {count} connections")
        for line in lines:
            with contextlib.suppress(OSError, ssl.SSLError):
                await line.close()


def least_us(step: Callable[[], object], *, count: int = 300, rounds: int = 40) -> float:
    """Return the least processor time of a call in microseconds."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(count):
            step()
        found.append((time.process_time() - began) / count * 1e6)
    return min(found)


def show_parts(folder: Path) -> None:
    """Show what a secured request costs beyond a plain one."""
    token = sign(KEY, subject=ROLE, expires_at_s=2**33)
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + token)]
    authenticator = Authenticator(now_s=time.time, tokens=SignedTokens([KEY]))
    print("| part | us |\n|---|--:|")
    print(f"| token, remembered | {least_us(lambda: authenticator.by_headers(headers)):.1f} |")
    first = least_us(lambda: SignedTokens([KEY]).verify(token, now_s=time.time()))
    print(f"| token, first time (HS256) | {first:.1f} |")
    uvloop.run(show_checks(headers, authenticator))
    authority = Authority(folder, "ca")
    certificate, key = authority.issue("broker")
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(certificate, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = accepting.wrap_bio(to_server, to_client, server_side=True)
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    for one in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            one.do_handshake()
    with contextlib.suppress(ssl.SSLWantReadError):
        client.read()
    files = server_tls(certificate_file=str(certificate), key_file=str(key), now_s=time.time)
    served = uvloop.run(served_us(files, trusting))
    print(f"| TLS of the server: request of {REQUEST_SIZE:,} bytes, answer of {ANSWER_SIZE} | {served:.1f} |")
    for size in (1_300, 130_000):

        def both(size: int = size) -> None:
            client.write(bytes(size))
            left = size
            while left:
                left -= len(server.read(65_536))

        print(f"| TLS: encrypt and decrypt {size:,} bytes | {least_us(both):.1f} |")


async def show_checks(headers: list[tuple[bytes, bytes]], authenticator: Authenticator) -> None:
    """Show what authentication and permissions cost a request, once the broker knows the role and the records."""

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        return

    async def refuse(*_: Any) -> None:
        raise AssertionError("refused")

    port = Authenticate(app, authenticator, refuse=refuse, clock=time.monotonic)
    client = ("127.0.0.1", 1)

    def authenticate() -> None:
        at_once(port({"type": "http", "path": "/v1", "headers": headers, "client": client}, app, app))

    print(f"| authentication of a request | {least_us(authenticate):.1f} |")
    tree = MemoryTree()
    store = tree.connect()
    grants = {"auth_policies": {"namespace_auth": {ROLE: ["produce", "consume"]}}}
    for path, record in (
        ("/admin", {}),
        ("/admin/policies", {}),
        ("/admin/policies/shop", {"adminRoles": ["admin"]}),
        ("/admin/policies/shop/orders", grants),
    ):
        await store.create(path, msgspec.json.encode(record))
    access = Access(store, Rules(super_users=frozenset()), now=time.monotonic)
    topic = TopicName("shop", "orders", "new")
    roles = (ROLE,)

    def check() -> None:
        at_once(access.check(roles, "produce", Target("shop", "orders", topic)))

    await access.check(roles, "produce", Target("shop", "orders", topic))
    print(f"| permission of a request | {least_us(check):.1f} |")
    await access.close()
    await store.close()


def at_once(call: Coroutine[Any, Any, object]) -> None:
    """Run a call that does not wait."""
    try:
        call.send(None)
    except StopIteration:
        return
    raise AssertionError("the call waits")


class Wire:
    """Stands for the transport of a connection: what the server writes goes to the client's end of TLS."""

    def __init__(self, to_client: ssl.MemoryBIO) -> None:
        self.write = to_client.write

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return (HOST, 1)

    def is_closing(self) -> bool:
        return False


class Answering(asyncio.Protocol):
    """Answers each read of the decrypted connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = transport.write  # type: ignore[attr-defined]

    def data_received(self, _data: bytes) -> None:
        self.write(bytes(ANSWER_SIZE))


async def served_us(files: TlsFiles, trusting: ssl.SSLContext, *, count: int = 300, rounds: int = 40) -> float:
    """Return the least processor time in microseconds of a request and its answer at the server's end of TLS."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    shared = ServerLimits(HttpSettings(), connections_max=16, stats=HttpStats(), clock=time.monotonic)
    connection = TlsConnection(files, shared, lambda _certificate: Answering(), set())
    connection.connection_made(cast(asyncio.Transport, Wire(to_client)))
    for _ in range(3):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        if to_server.pending:
            connection.data_received(to_server.read())
    found = []
    for _ in range(rounds):
        took = 0.0
        for _ in range(count):
            client.write(bytes(REQUEST_SIZE))
            data = to_server.read()
            began = time.process_time()
            connection.data_received(data)
            took += time.process_time() - began
            left = ANSWER_SIZE
            while left:
                left -= len(client.read(left))
        found.append(took / count * 1e6)
    connection.connection_lost(None)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="pairs of turns for each row (6)")
    parser.add_argument("--seconds", type=float, default=2, help="seconds of a turn (2)")
    parser.add_argument("--size", type=int, default=1024, help="payload bytes of a message (1024)")
    parser.add_argument("--batch", type=int, default=100, help="messages of a batched request (100)")
    parser.add_argument("--connections", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16])
    parser.add_argument("--control", action="store_true", help="secure neither broker: shows the error of measurement")
    parser.add_argument("--idle", type=int, default=500, help="connections whose memory is measured (500)")
    parser.add_argument("--parts", action="store_true", help="measure only the parts of a secured request")
    options = parser.parse_args()
    if options.parts:
        with tempfile.TemporaryDirectory() as folder:
            show_parts(Path(folder))
        return
    print(f"{options.size} B messages, {options.rounds} rounds of {options.seconds:g} s, {platform.platform()}\n")
    with tempfile.TemporaryDirectory() as folder, brokers(Path(folder), is_control=options.control) as sides:
        uvloop.run(memory(sides, options.idle))
        print(
            "\n| what | connections | messages a request | plain, messages/s | secured | speed (spread) "
            "| plain, us a message | secured | by CPU |"
        )
        print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
        uvloop.run(compare(sides, options))


if __name__ == "__main__":
    main()

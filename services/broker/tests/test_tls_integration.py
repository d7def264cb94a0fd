"""Services over https, as processes: calls are forwarded between brokers, and certificates are replaced under load."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_identity.tls import client_tls
from bindery_kit.process.runtime import DIE_WITH_PARENT
from bindery_simulation.certificates.authority import Authority, replace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
TOPICS = [f"/v1/topics/public/default/t{number}" for number in range(8)]
CLIENTS = 8


class World:
    """A cluster with TLS between brokers and bookies, and services with https beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old, self.new = Authority(folder, "old"), Authority(folder, "new")
        self.trusted = folder / "trusted.pem"
        replace(self.trusted, self.old.pem)
        self.certificate, self.key = self.old.issue("server")
        self.context = client_tls(ca_file=str(self.trusted)).context
        ledger = {"CERTIFICATE_FILE": str(self.certificate), "KEY_FILE": str(self.key), "REQUIRED": "true"}
        self.environment = {f"BOOKIE_TLS_{name}": value for name, value in ledger.items()} | {
            f"{program}_CA_FILE": str(self.trusted)
            for program in ("BROKER_CLIENT", "AUDITOR_CLIENT", "BINDERY_CLIENT", "BOOKIE_REPAIR")
        }
        self.cluster = ThrowawayCluster(bookies=3, environment=self.environment)
        self.brokers: list[str] = []
        self.bookie = self.auditor = ""

    def settings(self, service: str) -> dict[str, str]:
        return {
            **self.environment,
            f"{service}_ZOOKEEPER": self.cluster.zookeeper,
            f"{service}_HTTP_TLS_CERTIFICATE_FILE": str(self.certificate),
            f"{service}_HTTP_TLS_KEY_FILE": str(self.key),
        }

    def bindery(
        self, *arguments: str, stdin: str = "", ca_file: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        trust = [] if ca_file is None else ["--ca-file", ca_file]
        environment = {name: value for name, value in os.environ.items() if name != "BINDERY_HTTP_CA_FILE"}
        return subprocess.run(
            [sys.executable, "-m", "bindery", *arguments, *trust],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )

    def http(self, url: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, verify=self.context, timeout=TIMEOUT_S, trust_env=False)


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


@contextmanager
def process(world: World, module: str, environment: dict[str, str], url: str) -> Iterator[str]:
    """Run a service until the block ends, which begins once it is ready at `url`."""
    log = world.folder / f"{module}-{url.rpartition(':')[2]}.log"
    with log.open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", module],
            stdout=output,
            stderr=output,
            env={**os.environ, **environment, DIE_WITH_PARENT: str(os.getpid())},
        )
    try:
        until(lambda: is_ready(world, url), lambda: log.read_text()[-4000:])
        yield url
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def is_ready(world: World, url: str) -> bool:
    try:
        with httpx.Client(verify=world.context, trust_env=False) as client:
            return client.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool], why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("tls"))
    with ExitStack() as stack:
        stack.enter_context(world.cluster)
        for _ in range(2):
            port = free_port()
            settings = {
                **world.settings("BROKER"),
                "BROKER_PORT": str(port),
                "BROKER_PEERS_CA_FILE": str(world.trusted),
            }
            url = f"https://{HOST}:{port}"
            world.brokers.append(stack.enter_context(process(world, "bindery_broker.main", settings, url)))
        port = free_port()
        settings = world.settings("AUDITOR") | {"AUDITOR_PORT": str(port)}
        world.auditor = stack.enter_context(process(world, "bindery_auditor.main", settings, f"https://{HOST}:{port}"))
        port = free_port()
        settings = world.settings("BOOKIE") | {
            "BOOKIE_PORT": str(free_port()),
            "BOOKIE_HTTP_PORT": str(port),
            "BOOKIE_JOURNAL_DIR": str(world.folder / "journal"),
            "BOOKIE_LEDGER_DIR": str(world.folder / "ledgers"),
        }
        world.bookie = stack.enter_context(process(world, "bindery_bookie", settings, f"https://{HOST}:{port}"))
        yield world


def test_commands_reach_services_with_the_ca_file(world: World) -> None:
    trusted = str(world.trusted)
    for number, broker in enumerate(world.brokers):
        done = world.bindery("produce", "commands", "--url", broker, stdin=f"{number}\n", ca_file=trusted)
        assert (done.returncode, done.stdout) == (0, "1 message sent\n"), done.stderr
    done = world.bindery("consume", "commands", "--url", world.brokers[0], ca_file=trusted)
    assert done.stdout == "0\n1\n", done.stderr
    done = world.bindery("bookie", "state", "--url", world.bookie, ca_file=trusted)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_untrusted_certificate_is_reported_with_the_option(world: World) -> None:
    for arguments in (("topics", "list", "--url", world.brokers[0]), ("bookie", "state", "--url", world.bookie)):
        done = world.bindery(*arguments)
        assert done.returncode == 1
        assert "--ca-file" in done.stderr
        assert "BINDERY_HTTP_CA_FILE" in done.stderr
    in_clear = world.brokers[0].replace("https:", "http:")
    done = world.bindery("topics", "list", "--url", in_clear)
    assert done.returncode == 1
    assert "serves https only" in done.stderr
    missing = world.bindery("topics", "list", "--url", world.brokers[0], ca_file=str(world.folder / "missing"))
    assert missing.returncode == 2
    assert "--ca-file" in missing.stderr


async def test_a_broker_forwards_to_the_owner_over_https(world: World) -> None:
    async with world.http() as client:
        owners = set()
        for topic in TOPICS:
            answers = [await until_ok(client, "POST", f"{url}{topic}/messages", json=MESSAGE) for url in world.brokers]
            assert len({answer.json()["message_ids"][0] for answer in answers}) == 2
            stats = [(await until_ok(client, "GET", f"{url}{topic}")).json() for url in world.brokers]
            assert stats[0]["owner"] == stats[1]["owner"]
            owners.add(stats[0]["owner"])
        assert owners <= {world.cluster.url, *world.brokers}
        assert owners & set(world.brokers), "no broker with https owns a topic"


MESSAGE = {"payload": "x"}


async def until_ok(client: httpx.AsyncClient, method: str, url: str, **request: Any) -> httpx.Response:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answer = await client.request(method, url, **request)
        if answer.status_code == 200:
            return answer
        assert answer.status_code in (429, 503, 504), answer.text
        assert time.monotonic() < deadline, answer.text
        await asyncio.sleep(0.1)


def metrics(world: World, url: str) -> str:
    with httpx.Client(verify=world.context, trust_env=False) as client:
        return client.get(f"{url}/metrics").text


async def test_certificates_move_to_another_authority_under_load_without_a_failed_call(world: World) -> None:
    """Trust both, replace the certificates, trust the new one only. All the time there are new connections.

    No connection may fail. A broker may answer 503 while a bundle moves, as it does on a busy machine.
    """
    counts = [0] * CLIENTS
    done = asyncio.Event()

    async def call(number: int) -> None:
        while not done.is_set():
            async with world.http() as client:
                for _ in range(3):
                    url = f"{world.brokers[counts[number] % 2]}{TOPICS[number % len(TOPICS)]}/messages"
                    await until_ok(client, "POST", url, json=MESSAGE)
                    counts[number] += 1

    async def progress() -> None:
        before = list(counts)
        while any(now < then + 6 for now, then in zip(counts, before, strict=True)):
            await asyncio.sleep(0.05)

    async def served_by(url: str) -> bytes:
        _, writer = await asyncio.open_connection(
            HOST, int(url.rpartition(":")[2]), ssl=world.context, server_hostname=HOST
        )
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    async def move() -> None:
        await progress()
        services = [*world.brokers, world.auditor, world.bookie]
        before = [await served_by(url) for url in services]
        replace(world.trusted, world.old.pem + world.new.pem)
        await progress()
        world.new.issue("server")
        for url, old in zip(services, before, strict=True):
            while await served_by(url) == old:
                await asyncio.sleep(0.2)
        await progress()
        replace(world.trusted, world.new.pem)
        await progress()
        done.set()

    async with world.http() as client:
        for number in range(CLIENTS):
            for url in world.brokers:
                await until_ok(client, "POST", f"{url}{TOPICS[number % len(TOPICS)]}/messages", json=MESSAGE)
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(call(number))
        group.create_task(move())
    assert min(counts) >= 24


async def test_brokers_trust_bookies_with_new_certificates_without_a_restart(world: World) -> None:
    """All bookies restart one after another, with certificates that the authority at the start of the brokers did not
    sign."""
    for number in range(3):
        name = f"bookie-{number}"
        killed = world.cluster.kill(name)
        until(lambda name=name, killed=killed: is_back(world, name, killed))  # type: ignore[misc]
    async with world.http() as client:
        for topic in TOPICS:
            for url in world.brokers:
                await until_ok(client, "POST", f"{url}{topic}/messages", json=MESSAGE)


def is_back(world: World, name: str, killed: int) -> bool:
    if not world.cluster.has_restarted(name, since=killed):
        return False
    try:
        url = world.cluster.bookie_url(int(name.rpartition("-")[2]))
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    except (OSError, httpx.TransportError):
        return False


def test_bad_files_keep_the_old_certificate_and_are_reported(world: World) -> None:
    services = [*world.brokers, world.auditor, world.bookie]
    for url in services:
        page = metrics(world, url)
        assert 'bindery_tls_certificate_expiry_seconds{port="http"} 4733510400\n' in page
        assert 'bindery_tls_reload_failed{port="http"} 0\n' in page
    assert 'bindery_tls_certificate_expiry_seconds{port="ledger"}' in metrics(world, world.bookie)
    good = world.certificate.read_bytes()
    try:
        replace(world.certificate, b"not a certificate")
        for url in services:
            until(lambda url=url: 'bindery_tls_reload_failed{port="http"} 1\n' in metrics(world, url))  # type: ignore[misc]
    finally:
        replace(world.certificate, good)
    for url in services:
        until(lambda url=url: 'bindery_tls_reload_failed{port="http"} 0\n' in metrics(world, url))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"BROKER_HTTP_TLS_CERTIFICATE_FILE": "/missing/certificate"}, "/missing/certificate"),
        ({"BROKER_HTTP_TLS_KEY_FILE": "key"}, "needs http.tls.certificate_file"),
        ({"BROKER_PEERS_CA_FILE": "/missing/ca"}, "/missing/ca"),
    ],
)
def test_wrong_files_end_the_start_with_the_reason(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bindery_broker.main"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "BROKER_PORT": "0", **settings},
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stdout + done.stderr

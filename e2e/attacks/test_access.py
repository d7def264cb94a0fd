"""Ports that other machines can reach: who can change the cluster, with real processes.

The services listen on all addresses. The attacker has no token, or a token of something else, and tries each port. As
in the default chart, bookies and brokers are started with `--insecure`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from bindery.standalone.plan import BOOKIE_HTTP_PORT
from bindery.standalone.throwaway import ThrowawayCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
OPERATOR: Final = "the-token-of-an-operator"
CLIENT: Final = "the-token-of-a-client-of-bookies"
BOOKIES: Final = 2
ATTACKS: Final = (
    ("PUT", "/api/v1/autorecovery/status?enabled=false", None),
    ("PUT", "/api/v1/autorecovery/trigger_audit", None),
    ("PUT", "/api/v1/autorecovery/lost_bookie_recovery_delay", {"delay_seconds": 86400}),
    ("PUT", "/api/v1/autorecovery/decommission", {"bookie_src": "bookie-1", "delete_cookie": True}),
    ("PUT", "/api/v1/autorecovery/bookie", {"bookie_src": ["bookie-1"], "delete_cookie": True}),
    ("POST", "/v1/recovery/pause", {"reason": "an attack"}),
    ("DELETE", "/api/v1/ledger/delete?ledger_id=0", None),
)
"""Changes of the cluster, at a bookie or an auditor."""
OWN_ADDRESS: Final = "192.0.2.7"
WITH_ADDRESS: Final = """
import fcntl, os, socket, struct, sys

address, *command = sys.argv[1:]
with socket.socket() as sock:
    owner = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton(address))
    fcntl.ioctl(sock, 0x8916, owner)  # SIOCSIFADDR
    fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS: up
    sock.bind((address, 0))
os.execv(command[0], command)
"""
"""Give the interface of a network namespace an address that is not loopback, and run a command there."""
REACHABLE: Final = {
    "BOOKIE_HOST": "0.0.0.0",
    "BOOKIE_ADVERTISED_HOST": "127.0.0.1",
    "AUDITOR_HOST": "0.0.0.0",
}


def running(settings: dict[str, str], options: tuple[str, ...] = ()) -> Iterator[ThrowawayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**REACHABLE, **settings}.items():
            patch.setenv(name, value)
        cluster = ThrowawayCluster(bookies=BOOKIES, brokers=0, auditors=1, options=options)
        with cluster:
            yield cluster


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("secrets")
    found = {}
    for name, text in (("operators", OPERATOR), ("clients", CLIENT)):
        (directory / name).write_text(text + "\n")
        found[name] = str(directory / name)
    return found


@pytest.fixture(scope="module")
def default(files: dict[str, str]) -> Iterator[ThrowawayCluster]:
    """Only the auditor has tokens."""
    yield from running({"BOOKIE_INSECURE": "true", "AUDITOR_ADMIN_TOKEN_FILE": files["operators"]})


@pytest.fixture(scope="module")
def secured(files: dict[str, str]) -> Iterator[ThrowawayCluster]:
    """Bookies have tokens of clients and of operators, and no service has `--insecure`."""
    yield from running(
        {
            "BOOKIE_AUTH_PROVIDER": "token",
            "BOOKIE_AUTH_SECRETS_FILE": files["clients"],
            "BOOKIE_ADMIN_TOKEN_FILE": files["operators"],
            "AUDITOR_ADMIN_TOKEN_FILE": files["operators"],
            "AUDITOR_CLIENT_TOKEN_FILE": files["clients"],
        }
    )


def urls(cluster: ThrowawayCluster) -> list[str]:
    return [
        *(f"http://127.0.0.1:{BOOKIE_HTTP_PORT + cluster.port_offset + number}" for number in range(BOOKIES)),
        cluster.auditor_url(),
    ]


def ask(url: str, method: str, path: str, token: str | None = None, body: Any = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}".strip()}
    return httpx.request(method, url + path, headers=headers, json=body, timeout=30, trust_env=False)


def attack(cluster: ThrowawayCluster, token: str | None, *, url: str | None = None) -> list[int]:
    """Try each change at each port, or at `url`, and return the statuses. A path that a port does not serve is 404."""
    return [
        ask(one, method, path, token, body).status_code
        for one in ([url] if url else urls(cluster))
        for method, path, body in ATTACKS
    ]


def state(cluster: ThrowawayCluster) -> Any:
    return ask(cluster.auditor_url(), "GET", "/v1/recovery/status").json()


@pytest.mark.parametrize("token", [None, "", "wrong", CLIENT])
def test_without_a_token_of_an_operator_no_port_changes_the_cluster(
    default: ThrowawayCluster, token: str | None
) -> None:
    assert set(attack(default, token)) == {401, 404}
    assert state(default)["is_enabled"] is True
    bookies = ask(default.auditor_url(), "GET", "/v1/bookies").json()["bookies"]
    assert {one["intent"] for one in bookies} == {"active"}


def test_a_bookie_without_tokens_does_not_change_the_cluster_for_anybody(default: ThrowawayCluster) -> None:
    """It cannot compare the auditor's token, which would pass at the auditor."""
    for url in urls(default)[:BOOKIES]:
        assert set(attack(default, OPERATOR, url=url)) == {401, 404}
        detail = ask(url, "PUT", "/api/v1/autorecovery/status?enabled=false").json()["detail"]
        assert "BOOKIE_ADMIN_TOKEN_FILE" in detail
    assert state(default)["is_enabled"] is True


def test_the_auditor_accepts_the_token(default: ThrowawayCluster) -> None:
    assert ask(default.auditor_url(), "POST", "/v1/recovery/pause", OPERATOR, {"reason": "a test"}).status_code == 200
    assert state(default)["is_enabled"] is False
    assert set(attack(default, None)) == {401, 404}
    for url in urls(default):
        assert ask(url, "PUT", "/api/v1/autorecovery/status?enabled=true").status_code == 401
    assert state(default)["is_enabled"] is False
    assert ask(default.auditor_url(), "POST", "/v1/recovery/resume", OPERATOR).status_code == 200


@pytest.mark.parametrize("token", [None, "wrong", CLIENT])
def test_with_tokens_every_change_at_every_port_needs_the_one_of_an_operator(
    secured: ThrowawayCluster, token: str | None
) -> None:
    assert set(attack(secured, token)) == {401, 404}
    for url in urls(secured)[:BOOKIES]:
        answer = ask(url, "PUT", "/api/v1/bookie/state/readonly", token, {"readOnly": True})
        assert answer.status_code == 401
        assert ask(url, "PUT", "/api/v1/bookie/gc", token).status_code == 401
    assert state(secured)["is_enabled"] is True


def test_the_token_of_an_operator_is_accepted_at_every_port(secured: ThrowawayCluster, files: dict[str, str]) -> None:
    for url in urls(secured):
        for enabled in (False, True):
            path = f"/api/v1/autorecovery/status?enabled={str(enabled).lower()}"
            assert ask(url, "PUT", path, OPERATOR).json() == {"enabled": enabled}
            assert state(secured)["is_enabled"] is enabled
    bookie = urls(secured)[0]
    refused = bindery("bookie", "gc", "run", "--url", bookie)
    assert refused.returncode != 0
    assert "--token-file" in refused.stderr
    assert bindery("bookie", "gc", "run", "--url", bookie, "--token-file", files["operators"]).returncode == 0


def bindery(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BINDERY_")}
    return subprocess.run(
        [sys.executable, "-m", "bindery", *words], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.mark.parametrize(
    ("service", "ports", "remedy"),
    [
        ("bookie", ("--port", "--http-port"), "authenticate clients (--auth-provider), or pass --insecure"),
        ("broker", ("--port",), "configure authentication (--auth-tokens-keys-file), or pass --insecure"),
        ("auditor", ("--port",), "configure tokens (--admin-token-file), or pass --insecure"),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", OWN_ADDRESS])
def test_without_authentication_and_insecure_no_service_starts_on_such_an_address(
    service: str, ports: tuple[str, ...], remedy: str, host: str, tmp_path: Path
) -> None:
    free = [word for port in ports for word in (port, "0")]
    data = [f"--journal-dir={tmp_path}/j", f"--ledger-dir={tmp_path}/l"] if service == "bookie" else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(service.upper())}
    alone = ["unshare", "--map-root-user", "--net", sys.executable, "-c", WITH_ADDRESS, OWN_ADDRESS]
    command = [sys.executable, "-m", f"bindery_{service}", "--host", host, "--zookeeper", "127.0.0.1:1", *free, *data]
    done = subprocess.run(
        [*alone, *command],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    last = done.stderr.splitlines()[-1]
    assert f"refusing to listen on {host}, where other machines can connect without authentication" in last
    assert remedy in last

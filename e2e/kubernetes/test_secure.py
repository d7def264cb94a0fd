"""The secure form of the chart: it installs, `helm test` passes, and a pod without credentials gets nothing.

The pod without credentials runs in the namespace of the release, because network plugins that ignore policies exist.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bindery_e2e.cluster.images import VERSION, Images
from bindery_e2e.cluster.release import CHART, Release
from bindery_e2e.runs.session import installed

pytestmark = pytest.mark.timeout(900)  # the first one builds the images

OPEN = ("/livez", "/readyz", "/startupz", "/metrics")
"""Paths that need no credentials at any service."""
TRIED = [
    ("broker", "GET", "/v1/topics"),
    ("broker", "GET", "/v1/topics/public/default"),
    ("broker", "GET", "/v1/topics/public/default/a/messages?start=earliest"),
    ("broker", "POST", "/v1/topics/public/default/a/messages"),
    ("broker", "PUT", "/v1/topics/public/default/a"),
    ("broker", "DELETE", "/v1/topics/public/default/a"),
    ("broker", "GET", "/admin/v2/clusters"),
    ("broker", "GET", "/admin/v2/brokers/configuration"),
    ("broker", "GET", "/docs"),
    ("bookie", "GET", "/api/v1/ledger/read?ledger_id=0"),
    ("bookie", "GET", "/api/v1/bookie/sanity"),
    ("bookie", "PUT", "/api/v1/bookie/gc"),
    ("bookie", "PUT", "/api/v1/bookie/state/readonly"),
    ("bookie", "DELETE", "/api/v1/ledger/delete?ledger_id=0"),
    ("auditor", "GET", "/"),
    ("auditor", "GET", "/v1/recovery/status"),
    ("auditor", "GET", "/v1/bookies"),
    ("auditor", "POST", "/v1/recovery/pause"),
]
"""What the pod tries at each HTTP port, without credentials and with a token that no key signed."""
PORTS = {"broker": 8080, "bookie": 8000, "auditor": 8090}

PROGRAM = """
import json, ssl, sys, urllib.error, urllib.request
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for url, method, headers in json.load(sys.stdin):
    body = None if method in ("GET", "DELETE") else b"{}"
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, method=method, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    print(json.dumps([url, method, status]))
"""


@pytest.fixture(scope="module")
def release(images: Images, reports: Path) -> Iterator[Release]:
    with installed("bindery-e2e-secure", values=[CHART / "values-tls-auth.yaml"], folder=reports / "secure") as made:
        yield made


@pytest.fixture(scope="module")
def stranger(release: Release) -> str:
    """Name of a pod without credentials."""
    container: dict[str, Any] = {
        "name": "stranger",
        "image": f"bindery/toolbox:{VERSION}",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}
        },
        "containers": [container],
    }  # fmt: skip
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, "spec": spec}
    release.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    release.cluster.kubectl("wait", "--for=condition=Ready", "pod/stranger", "--timeout=60s", timeout_s=90)
    return "stranger"


def hosts(release: Release) -> dict[str, str]:
    services = release.cluster.kubectl("get", "services", "-o", "name").split()
    names = [name.removeprefix("service/") for name in services]
    found = {kind: next(name for name in names if name.endswith(f"-{kind}") or name == kind) for kind in PORTS}
    return {**found, "bookie": f"{found['bookie']}-0.{found['bookie']}"}


def statuses(release: Release, pod: str, calls: list[tuple[str, str, dict[str, str]]]) -> list[tuple[str, str, int]]:
    answer = release.cluster.exec(pod, "python", "-c", PROGRAM, stdin=json.dumps(calls), timeout_s=180)
    return [(url, method, status) for url, method, status in map(json.loads, answer.splitlines())]


def test_helm_test_passes_with_tls_and_tokens(release: Release) -> None:
    release.test()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer e30.e30.AAAA"}], ids=["none", "wrong"])
def test_a_pod_without_credentials_gets_nothing_over_http(
    release: Release, stranger: str, headers: dict[str, str]
) -> None:
    reached = hosts(release)
    calls = [(f"https://{reached[kind]}:{PORTS[kind]}{path}", method, headers) for kind, method, path in TRIED]
    found = statuses(release, stranger, calls)
    assert len(found) == len(calls)
    assert [one for one in found if one[2] != 401] == []


def test_clear_text_is_refused_at_every_http_port(release: Release, stranger: str) -> None:
    reached = hosts(release)
    calls: list[tuple[str, str, dict[str, str]]] = [
        (f"http://{reached[kind]}:{port}{path}", "GET", {}) for kind, port in PORTS.items() for path in OPEN
    ]
    found = statuses(release, stranger, calls)
    assert {status for _, _, status in found} == {400}

"""The secure form of the chart: certificates, authority and keys are replaced under traffic, `helm test` passes, and a
pod without credentials gets nothing.

The pod without credentials runs in the namespace of the release, because network plugins that ignore policies exist.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bindery_e2e.cluster.cluster import Pod
from bindery_e2e.cluster.conversation import Conversation
from bindery_e2e.cluster.images import VERSION, Images
from bindery_e2e.cluster.release import CHART, Release
from bindery_e2e.cluster.secrets import SERVICES, ReleaseSecrets
from bindery_e2e.runs.session import installed
from bindery_identity.authority import Authority, facts, new_private_key
from bindery_identity.keys import private_key
from bindery_identity.tokens import sign
from cryptography import x509

pytestmark = [pytest.mark.long_run(together=True), pytest.mark.timeout(900)]  # the first one builds the images

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
STEADY_CALLS, STRANGE_CALLS = (Path(__file__).parent / name for name in ("steady_calls.py", "strange_calls.py"))

CLIENT_PORTS = {"zookeeper": {2181}, "bookie": {3181, 8000}, "broker": {8080}, "auditor": {8090}, "toolbox": set[int]()}
"""Ports on which the pods of a component listen. The pod without credentials tries each of them."""
NEVER_OPEN = {"zookeeper": (2281, 2888, 3888, 8080)}
"""Ports of ZooKeeper that the chart does not open: TLS, servers (there is only one), and its HTTP server."""
REFUSALS = {
    "unreachable", "closed", "unauthorized", "no auth", "not allowed", "BadArgumentsError", "NoNodeError",
    "ReconfigDisabledError",
}  # fmt: skip
"""Outcomes of strange_calls.py with which nothing was read or changed. NoNodeError: the node was deleted meanwhile."""
KNOWN_GAPS = (
    re.compile("command (mntr|ruok|srvr)"),
    re.compile("(children|get|set|create|set the access list of) /(zookeeper|zookeeper/quota)?(/?strange)?"),
    re.compile("(children|get) /zookeeper/config"),
    re.compile("delete /[^/]+"),
)
"""What ZooKeeper lets everybody do (docs/threats.md): read figures, use `/` and its own nodes, delete empty trees."""
TREE = """
import json, os
from pathlib import Path
from kazoo.client import KazooClient
credentials = Path(os.environ["BINDERY_ZOOKEEPER_CREDENTIALS_FILE"]).read_text().split()[0]
client = KazooClient(os.environ["BINDERY_ZOOKEEPER"], auth_data=[("digest", credentials)])
client.start()
found, left = [], ["/"]
while left:
    found.append(left.pop())
    left += [found[-1].rstrip("/") + "/" + name for name in client.get_children(found[-1])]
print(json.dumps(found))
client.stop()
"""
"""Prints the paths of all nodes."""

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
    except (TimeoutError, urllib.error.URLError):
        status = 0  # a network policy blocks the port
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


class Rotation:
    """The ports and Secrets of a release while its keys and certificates are replaced, and clients call the broker."""

    def __init__(self, release: Release, talk: Conversation) -> None:
        self.release = release
        self.secrets = ReleaseSecrets(release.cluster)
        self.calls = 0
        self._talk = talk
        reached = hosts(release)
        # Clients accept `*.bindery-bookie.namespace.svc`, but no wildcard before a single label.
        domain = f"{reached['bookie'].partition('.')[2]}.{release.cluster.namespace}.svc"
        bookies = [f"{pod.name}.{domain}" for pod in release.cluster.pods("bookie")]
        self._question: dict[str, Any] = {
            "https": [
                f"https://{reached['broker']}:{PORTS['broker']}/v1/topics/public/default",
                f"https://{reached['auditor']}:{PORTS['auditor']}/v1/recovery/status",
                *(f"https://{bookie}:{PORTS['bookie']}/api/v1/ledger/read?ledger_id=0" for bookie in bookies),
            ],
            "ledger": [f"{bookie}:3181" for bookie in bookies],
        }
        self.count = 2 + 2 * len(bookies)
        """Number of ports."""

    def look(self, **tokens: str) -> dict[str, Any]:
        """Return the serial numbers of the ports, and which of them accept each token. Raises AssertionError if a call
        of a client has failed."""
        answer = self._talk.ask({**self._question, "tokens": tokens})
        assert answer["failures"] == []
        self.calls = answer["calls"]
        assert "error" not in answer, answer["error"]
        return answer

    def until_serving(self, **tokens: str) -> None:
        """Wait until each port serves the certificate of its Secret, while all of them accept the tokens."""

        def problem() -> str:
            found = self.look(**tokens)
            assert {name: len(ports) for name, ports in found["accepted"].items()} == dict.fromkeys(tokens, self.count)
            wanted = self.serials()
            old = [port for port, serial in found["serials"].items() if int(serial, 16) not in wanted]
            return f"old certificates at {old}" if old else ""

        self.release.cluster.until(problem, "all ports serve their new certificates", timeout_s=60, poll_s=0.3)

    def until_accepted(self, *, accepted: dict[str, str], refused: dict[str, str]) -> None:
        """Wait until all ports accept and refuse these tokens."""
        wanted = {**dict.fromkeys(accepted, self.count), **dict.fromkeys(refused, 0)}

        def problem() -> str:
            found = self.look(**accepted, **refused)["accepted"]
            counts = {name: len(ports) for name, ports in found.items()}
            return "" if counts == wanted else f"of {self.count} ports, these accept each token: {found}"

        self.release.cluster.until(problem, f"the ports accept {wanted}", timeout_s=60, poll_s=0.3)

    def serials(self) -> set[int]:
        """Serial numbers of the certificates in the Secrets."""
        return {serial_of(self.secrets.read(f"{service}-tls")["tls.crt"]) for service in SERVICES}

    def token(self, key: str) -> str:
        """A token of the role `admin`, signed by this key of the authority."""
        state = self.secrets.read("authority")
        return sign(private_key(state[key]), subject="admin", expires_at_s=int(time.time()) + 3600).decode()

    def age_certificates(self) -> None:
        """Replace the certificates by ones of which less than a third is left."""
        state, day_s = self.secrets.read("authority"), 86_400.0
        authority = Authority.load(state["ca.crt"], state["ca.key"])
        for service in SERVICES:
            found = facts(self.secrets.read(f"{service}-tls")["tls.crt"])
            key, now_s = new_private_key(), time.time() - 80 * day_s
            certificate = authority.issue(
                key, common_name=found.common_name, hosts=found.hosts, now_s=now_s, lifetime_s=90 * day_s
            )
            self.secrets.change(f"{service}-tls", {"tls.crt": certificate, "tls.key": key})

    def replace_until(self, stage: str, job: str, cron_job: str) -> None:
        """Run a job until the Secrets have this stage of the replacement; the job then waits for the pods."""
        self.secrets.start_job(job, cron_job)

        def problem() -> str:
            state = self.secrets.read("authority")
            found = state["stage"].decode() if state.get("settled_from") else "no settled stage"
            return "" if found == stage else found

        self.release.cluster.until(problem, f"the replacement has the stage {stage}", timeout_s=90, poll_s=0.5)
        self.secrets.end_job(job)

    def end_wait(self) -> None:
        """Let the next job continue at once, because all pods have the files already."""
        self.secrets.change("authority", {"settled_from": b"1"})

    def report(self, what: str, began: float) -> None:
        print(f"{time.monotonic() - began:5.1f} s, {self.calls:5} calls: {what}")


def serial_of(certificate: bytes) -> int:
    return int(x509.load_pem_x509_certificate(certificate).serial_number)


def test_certificates_keys_and_authority_are_replaced_under_traffic(release: Release) -> None:
    """No call fails, no pod restarts, and tokens of the removed key are refused. Then pods connect anew."""
    began, cluster = time.monotonic(), release.cluster
    before = {pod.name: (pod.uid, pod.restarts) for service in SERVICES for pod in cluster.pods(service)}
    (toolbox,) = cluster.pods("toolbox")
    with Conversation(cluster, toolbox.name, STEADY_CALLS, container="toolbox") as talk:
        rotation = Rotation(release, talk)
        secrets = rotation.secrets
        old_token = rotation.token("tokens.key")
        old_serials, old_authority = rotation.serials(), secrets.read("authority")["ca.crt"]
        rotation.until_serving(old=old_token)
        rotation.report("clients call", began)

        rotation.age_certificates()
        secrets.start_job("renew", "secrets")
        assert secrets.finish_job("renew").count("certificate renewed") == len(SERVICES)
        secrets.spread()
        rotation.until_serving(old=old_token)
        renewed_serials = rotation.serials()
        assert not renewed_serials & old_serials
        rotation.report("all ports serve renewed certificates", began)

        rotation.replace_until("announced", "rotate", "rotate")
        new_token = rotation.token("next-tokens.key")
        secrets.spread()
        rotation.until_accepted(accepted={"old": old_token, "new": new_token}, refused={})
        rotation.report("all ports accept the old key and the next one", began)

        rotation.end_wait()
        rotation.replace_until("signed", "sign", "secrets")
        assert secrets.read("authority")["ca.crt"] != old_authority
        secrets.spread()
        rotation.until_serving(old=old_token, new=new_token)
        assert not rotation.serials() & renewed_serials
        rotation.report("all ports serve certificates of the new authority", began)

        rotation.end_wait()
        secrets.start_job("complete", "secrets")
        secrets.finish_job("complete")
        secrets.spread()
        rotation.until_accepted(accepted={"new": new_token}, refused={"old": old_token})
        assert secrets.read("operator-tls")["ca.crt"] == secrets.read("authority")["ca.crt"]
        rotation.report("all ports refuse tokens of the old key", began)

        calls = rotation.calls
        cluster.until(
            lambda: "" if rotation.look() and rotation.calls > calls + 20 else "no calls",
            "the clients continue",
            timeout_s=60,
            poll_s=0.3,
        )
        rotation.report("no call has failed", began)
    after = {pod.name: (pod.uid, pod.restarts) for service in SERVICES for pod in cluster.pods(service)}
    assert after == before
    # Brokers keep connections to fewer bookies than an ensemble needs: the next test needs new ones, with new tokens.
    replaced = [pod.name for pod in cluster.pods("bookie")[:2]]
    for name in replaced:
        cluster.delete_pod(name)

    def problem() -> str:
        there = {pod.name: pod.uid for pod in cluster.pods("bookie")}
        old = [name for name in replaced if there.get(name) in (None, before[name][0])]
        return ", ".join(old + cluster.not_ready())

    cluster.until(problem, "two bookies are replaced", timeout_s=180)
    print(f"{time.monotonic() - began:5.1f} s: two bookies have begun anew")


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
    assert {status for url, _, status in found if reached["broker"] in url} == {401}
    assert [one for one in found if one[2] not in (0, 401)] == []


def test_clear_text_is_refused_at_every_http_port(release: Release, stranger: str) -> None:
    reached = hosts(release)
    calls: list[tuple[str, str, dict[str, str]]] = [
        (f"http://{reached[kind]}:{port}{path}", "GET", {}) for kind, port in PORTS.items() for path in OPEN
    ]
    found = statuses(release, stranger, calls)
    assert {status for url, _, status in found if reached["broker"] in url} == {400}
    assert {status for _, _, status in found} <= {0, 400}


def listening(release: Release, pod: Pod) -> set[int]:
    """Ports on which the processes of a pod listen, without those of loopback."""
    table = release.cluster.exec(pod.name, "cat", "/proc/net/tcp", "/proc/net/tcp6", container=pod.component)
    found = set()
    for line in table.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == "0A":
            address, port = words[1].split(":")
            if not address.endswith(("0100007F", "000000000000000000000001000000")):
                found.add(int(port, 16))
    return found


def test_pods_listen_on_no_other_ports(release: Release) -> None:
    """Otherwise, the tests of the pod without credentials would have to try them, too."""
    pods = [pod for component in CLIENT_PORTS for pod in release.cluster.pods(component)]
    assert {pod.component for pod in pods} == set(CLIENT_PORTS)
    with ThreadPoolExecutor(len(pods)) as threads:
        found = dict(
            zip([pod.name for pod in pods], threads.map(lambda pod: listening(release, pod), pods), strict=True)
        )
    assert found == {pod.name: CLIENT_PORTS[pod.component] for pod in pods}


def test_a_pod_without_credentials_gets_nothing_from_ledger_ports_and_zookeeper(
    release: Release, stranger: str
) -> None:
    """Ports that network policies block count as refused. The output lists the attempts and their outcomes."""
    nodes = json.loads(release.cluster.toolbox("python", "-c", TREE))
    (zookeeper,) = release.cluster.pods("zookeeper")
    plan = {
        "bookies": [f"{pod.ip}:3181" for pod in release.cluster.pods("bookie")],
        "zookeeper": f"{zookeeper.ip}:2181",
        "nodes": nodes,
        "closed": [f"{zookeeper.ip}:{port}" for port in NEVER_OPEN["zookeeper"]],
    }
    program = STRANGE_CALLS.read_text()
    answer = release.cluster.exec(stranger, "python", "-c", program, stdin=json.dumps(plan), timeout_s=300)
    tried = [(port, what, outcome) for port, what, outcome in map(json.loads, answer.splitlines())]
    for (port, what, outcome), count in Counter(
        (port, what.split(" /")[0].removesuffix(" of"), outcome) for port, what, outcome in tried
    ).items():
        print(f"{port:20} {what}{f' of {count} nodes' if count > 1 else ''}: {outcome}")
    assert {port for port, _, _ in tried} == {*plan["bookies"], plan["zookeeper"], *plan["closed"]}
    obtained = [what for _, what, outcome in tried if outcome not in REFUSALS]
    assert [what for what in obtained if not any(gap.fullmatch(what) for gap in KNOWN_GAPS)] == []

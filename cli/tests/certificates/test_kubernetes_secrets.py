"""Secrets on Kubernetes: what is created, kept and renewed, replacements in steps, and the API."""

import base64
import contextlib
import itertools
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from bindery.certificates.kubernetes import KubernetesSecrets, NotWritten, Plan, fill
from bindery.certificates.rotation import Data, Stage, stage
from bindery_core.errors import BadRequest, Unauthorized
from bindery_identity.authority import Authority, facts
from bindery_identity.keys import parse_keys
from bindery_identity.tokens import SignedTokens

START_S = 1_800_000_000.0
DAY_S = 86_400.0
PLAN = Plan(
    namespace="somewhere",
    authority="a-authority",
    days=90,
    certificates={"a-broker-tls": ["a-broker", "*.a-broker"], "a-operator-tls": []},
    credentials={"a-broker-credentials": "broker", "a-operator-credentials": "admin"},
)


class Stopped(Exception):
    """The job was ended while it waited, or before a write."""


class Memory:
    """Secrets in memory. `writes_left`: the job ends before the write after these; None: never."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.data: dict[str, Data] = {}
        self.versions: dict[str, int] = {}
        self.writes_left: int | None = None
        self.slept_s: list[float] = []
        self.seen: list[dict[str, Data]] = []
        """The state at each wait."""

    def read(self, name: str) -> tuple[Data, str]:
        return dict(self.data.get(name, {})), str(self.versions.get(name, 0))

    def write(self, name: str, data: Data, version: str) -> None:
        assert version == str(self.versions.get(name, 0))
        if self.writes_left == 0:
            raise Stopped
        if self.writes_left is not None:
            self.writes_left -= 1
        self.data[name], self.versions[name] = dict(data), self.versions.get(name, 0) + 1

    def sleep(self, seconds: float) -> None:
        self.seen.append({name: dict(data) for name, data in self.data.items()})
        self.slept_s.append(seconds)
        self.now_s += seconds

    def run(self, *, replace: bool = False, plan: Plan = PLAN) -> list[str]:
        said: list[str] = []
        fill(
            self, plan, clock=lambda: self.now_s, sleep=self.sleep, settle_s=100, replace=replace, report=said.append
        )  # fmt: skip
        return said

    def copy(self) -> dict[str, Data]:
        return {name: dict(data) for name, data in self.data.items()}


def verifies(keys: bytes, token: bytes, *, now_s: float) -> str | None:
    try:
        return SignedTokens(parse_keys(keys)).verify(token, now_s=now_s).subject
    except Unauthorized:
        return None


def trusts(authorities: bytes, certificate: bytes) -> bool:
    """Whether a client with these authorities accepts the certificate."""
    from cryptography import x509

    for one in x509.load_pem_x509_certificates(authorities):
        try:
            x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(one)
        except Exception:
            continue
        return True
    return False


def test_a_new_cluster_gets_everything_and_a_second_job_changes_nothing() -> None:
    secrets = Memory()
    assert len(secrets.run()) == 4
    broker, operator = secrets.data["a-broker-tls"], secrets.data["a-operator-tls"]
    state = secrets.data["a-authority"]
    assert set(broker) == {"ca.crt", "tls.crt", "tls.key"}
    assert set(operator) == {"ca.crt"}
    assert facts(broker["tls.crt"]).hosts == ("a-broker", "*.a-broker")
    assert Authority.load(state["ca.crt"], state["ca.key"]).has_issued(broker["tls.crt"], broker["tls.key"])
    ssl.create_default_context(cadata=operator["ca.crt"].decode())
    for name, role in PLAN.credentials.items():
        data = secrets.data[name]
        assert verifies(data["keys"], data["token"], now_s=START_S) == role
        assert data["zookeeper"].startswith(b"bindery:")
        assert not {"ca.key", "tokens.key"} & set(data)
    before = secrets.copy()
    assert secrets.run() == []
    assert secrets.data == before
    assert secrets.slept_s == []


def test_certificates_and_tokens_are_renewed_when_a_third_is_left() -> None:
    secrets = Memory()
    secrets.run()
    before = secrets.copy()
    secrets.now_s += 59 * DAY_S
    assert secrets.run() == []
    secrets.now_s += 2 * DAY_S
    assert len(secrets.run()) == 3
    after = secrets.data
    assert after["a-broker-tls"]["ca.crt"] == before["a-broker-tls"]["ca.crt"]
    assert facts(after["a-broker-tls"]["tls.crt"]).expires_at_s == secrets.now_s + 90 * DAY_S
    assert after["a-broker-credentials"]["token"] != before["a-broker-credentials"]["token"]
    assert after["a-broker-credentials"]["zookeeper"] == before["a-broker-credentials"]["zookeeper"]


def test_other_names_make_another_certificate() -> None:
    secrets = Memory()
    secrets.run()
    wider = {**PLAN.certificates, "a-broker-tls": ["a-broker", "broker.example.com"]}
    assert secrets.run(plan=PLAN._replace(certificates=wider)) == ["a-broker-tls: new certificate, for other names"]
    assert facts(secrets.data["a-broker-tls"]["tls.crt"]).hosts == ("a-broker", "broker.example.com")


def test_what_cannot_be_read_is_made_again() -> None:
    secrets = Memory()
    secrets.run()
    secrets.data["a-broker-tls"]["tls.crt"] = b"?"
    secrets.data["a-broker-credentials"]["token"] = b"?"
    assert len(secrets.run()) == 2
    assert facts(secrets.data["a-broker-tls"]["tls.crt"]).hosts == ("a-broker", "*.a-broker")


def test_a_replacement_never_leaves_members_that_refuse_one_another() -> None:
    """Pods get the files of a step one after the other: each must accept those that have the step before or after."""
    secrets = Memory()
    secrets.run()
    first = secrets.copy()
    secrets.run(replace=True)
    steps = [first, *secrets.seen, secrets.copy()]
    assert secrets.slept_s == [100, 100]
    assert [stage(step["a-authority"]) for step in steps] == [
        Stage.STABLE, Stage.ANNOUNCED, Stage.SIGNED, Stage.STABLE
    ]  # fmt: skip
    for before, after in itertools.pairwise(steps):
        for one, other in ((before, after), (after, before)):
            assert trusts(one["a-operator-tls"]["ca.crt"], other["a-broker-tls"]["tls.crt"])
            keys, token = one["a-broker-credentials"]["keys"], other["a-operator-credentials"]["token"]
            assert verifies(keys, token, now_s=secrets.now_s) == "admin"
    last = steps[-1]
    assert not trusts(last["a-operator-tls"]["ca.crt"], first["a-broker-tls"]["tls.crt"])
    old = first["a-operator-credentials"]["token"]
    assert verifies(last["a-broker-credentials"]["keys"], old, now_s=secrets.now_s) is None
    assert set(last["a-authority"]) == set(first["a-authority"]) | {"settled_from"}


@pytest.mark.parametrize("writes", range(17))
def test_a_job_that_ended_is_completed_by_the_next_and_waits_again(writes: int) -> None:
    secrets = Memory()
    secrets.run()
    secrets.writes_left = writes
    with contextlib.suppress(Stopped):
        secrets.run(replace=True)
    secrets.writes_left = None
    state = secrets.data["a-authority"]
    is_incomplete = stage(state) is not Stage.STABLE and not state.get("settled_from")
    secrets.now_s += DAY_S
    waits = len(secrets.slept_s)
    secrets.run()
    assert stage(secrets.data["a-authority"]) is Stage.STABLE
    if is_incomplete:
        assert len(secrets.slept_s) > waits, "some pods may not have the files of the step yet"
    data = secrets.data
    assert trusts(data["a-operator-tls"]["ca.crt"], data["a-broker-tls"]["tls.crt"])
    for name, role in PLAN.credentials.items():
        assert verifies(data[name]["keys"], data[name]["token"], now_s=secrets.now_s) == role


def test_an_authority_near_its_end_is_replaced() -> None:
    secrets = Memory()
    secrets.run()
    expires_at_s = facts(secrets.data["a-authority"]["ca.crt"]).expires_at_s
    secrets.now_s = expires_at_s - 30 * DAY_S
    secrets.run()
    assert secrets.slept_s == [100, 100]
    assert facts(secrets.data["a-authority"]["ca.crt"]).expires_at_s > expires_at_s


def test_a_part_of_the_authority_is_not_completed() -> None:
    secrets = Memory()
    secrets.run()
    del secrets.data["a-authority"]["ca.key"]
    with pytest.raises(BadRequest, match="incomplete"):
        secrets.run()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"namespace": "a"}'])
def test_a_plan_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="plan"):
        Plan.parse(text)


class Api(BaseHTTPRequestHandler):
    """The Kubernetes API: Secrets with versions, and permissions."""

    secrets: dict[str, Any]

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        assert self.path.startswith("/api/v1/namespaces/somewhere/secrets/")
        assert self.headers["Authorization"] == "Bearer t"
        name = self.path.rpartition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = self.secrets.get(name)
        code = 403 if name == "foreign" else 404 if found is None else 200
        if code == 200 and self.command == "PUT":
            new = json.loads(body)
            if new["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                code = 409
            else:
                new["metadata"]["resourceVersion"] += "0"
                found = self.secrets[name] = new
        answer = json.dumps(found if code == 200 else {"kind": "Status"}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[tuple[str, dict[str, Any]]]:
    secrets: dict[str, Any] = {
        "empty": {"metadata": {"name": "empty", "resourceVersion": "1", "labels": {"a": "b"}}, "type": "Opaque"}
    }
    handler = type("Handler", (Api,), {"secrets": secrets})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", secrets
        finally:
            server.shutdown()
            thread.join()


def test_secrets_keep_their_labels_and_are_not_overwritten(api: tuple[str, dict[str, Any]]) -> None:
    url, stored = api
    mine, other = (KubernetesSecrets(url, "somewhere", token="t") for _ in range(2))
    (found, version), (_, same) = mine.read("empty"), other.read("empty")
    assert (found, version) == ({}, "1")
    mine.write("empty", {"a": b"\x00b"}, version)
    assert stored["empty"]["data"] == {"a": base64.b64encode(b"\x00b").decode()}
    assert stored["empty"]["metadata"]["labels"] == {"a": "b"}
    assert mine.read("empty") == ({"a": b"\x00b"}, "10")
    with pytest.raises(NotWritten, match="another job"):
        other.write("empty", {"a": b"c"}, same)


@pytest.mark.parametrize(("name", "advice"), [("foreign", "Role"), ("missing", "upgrade the release")])
def test_refusals_say_what_to_do(api: tuple[str, dict[str, Any]], name: str, advice: str) -> None:
    with pytest.raises(NotWritten, match=advice):
        KubernetesSecrets(api[0], "somewhere", token="t").read(name)


def test_outside_of_a_pod_the_api_must_be_named() -> None:
    with pytest.raises(BadRequest, match="--api"):
        KubernetesSecrets.of_pod({}, "somewhere")

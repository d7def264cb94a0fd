"""Fill the Secrets of a release on Kubernetes: certificates, keys, tokens and passwords, and renew them.

The Secrets exist already, and the account of the job may read and update these only. What is usable is kept, so that a
job can be repeated at any time; the rules are those of `bindery_identity.cluster_secrets`. The Secret of the authority
is written first: after a crash, the next job completes the others from it.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import httpx
from bindery_core.errors import BadRequest, BinderyError, Unauthorized
from bindery_identity.authority import Authority, facts, new_private_key
from bindery_identity.cluster_secrets import outdated_token
from bindery_identity.keys import parse_keys, private_key
from bindery_identity.tls import client_tls
from bindery_identity.tokens import SignedTokens, sign

from bindery.certificates.rotation import (
    Data,
    Stage,
    advanced,
    created,
    stage,
    trusted_authorities,
    trusted_keys,
)

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Files with which a pod authenticates to the Kubernetes API."""
TIMEOUT_S: Final = 15.0
CERTIFICATE_KEYS: Final = ("tls.crt", "tls.key")
_DAY_S: Final = 86_400


class NotWritten(BinderyError):
    """The Kubernetes API refused a request or did not answer; the job may be repeated."""

    code = "kubernetes_refused"


class Plan(NamedTuple):
    """What a release needs. `certificates`: Secret -> DNS names; none: only the CA. `credentials`: Secret -> role."""

    namespace: str
    authority: str
    days: int
    certificates: Mapping[str, Sequence[str]]
    credentials: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Raises BadRequest."""
        try:
            found = json.loads(text)
            return cls(
                namespace=str(found["namespace"]),
                authority=str(found["authority"]),
                days=int(found["days"]),
                certificates={one["secret"]: list(one["names"]) for one in found["certificates"]},
                credentials={one["secret"]: str(one["role"]) for one in found["credentials"]},
            )
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequest(
                "the plan is not what the chart writes: a JSON object with namespace, authority, days, certificates "
                "and credentials; see BINDERY_SECRETS_PLAN of the job",
                reason=str(error),
            ) from error


class Secrets(Protocol):
    """Where the Secrets are."""

    def read(self, name: str) -> tuple[Data, str]:
        """Return the data of a Secret and its version. Raises NotWritten."""
        ...

    def write(self, name: str, data: Data, version: str) -> None:
        """Replace the data, if the Secret still has that version. Raises NotWritten."""
        ...


class KubernetesSecrets:
    """The Secrets of a namespace, through the Kubernetes API."""

    def __init__(self, url: str, namespace: str, *, token: str = "", ca_file: str = "") -> None:
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        verify: Any = client_tls(ca_file=ca_file).context if url.startswith("https:") else True
        self._http = httpx.Client(base_url=url, headers=headers, verify=verify, timeout=TIMEOUT_S, trust_env=False)
        self._found: dict[str, dict[str, Any]] = {}

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], namespace: str) -> "KubernetesSecrets":
        """Use the account of this pod. Raises BadRequest outside of a pod."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            token = (ACCOUNT / "token").read_text().strip()
        except OSError:
            token = ""
        if not host or not token:
            raise BadRequest("this is no pod with an account; name the API with --api, as `kubectl proxy` shows it")
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", namespace, token=token, ca_file=str(ACCOUNT / "ca.crt"))

    def read(self, name: str) -> tuple[Data, str]:
        found = self._call("GET", name)
        self._found[name] = found
        data = {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        return data, str(found["metadata"]["resourceVersion"])

    def write(self, name: str, data: Data, version: str) -> None:
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        found = self._found[name]
        body = {**found, "data": encoded, "metadata": {**found["metadata"], "resourceVersion": version}}
        self._found[name] = self._call("PUT", name, body)

    def _call(self, method: str, name: str, body: Any = None) -> dict[str, Any]:
        try:
            answer = self._http.request(method, f"{self._path}/{name}", json=body)
        except httpx.HTTPError as error:
            raise NotWritten(f"the Kubernetes API does not answer: {error}; repeat the job", secret=name) from error
        if answer.status_code == 200:
            return dict(answer.json())
        advice = {
            403: "check the Role and the account of the job",
            404: "the chart creates the Secret; upgrade the release again",
            409: "another job has changed it; repeat the job",
        }.get(answer.status_code, "repeat the job")
        raise NotWritten(
            f"the Kubernetes API refused to {'read' if method == 'GET' else 'update'} a Secret; {advice}",
            secret=name,
            status=answer.status_code,
        )


def fill(
    where: Secrets,
    plan: Plan,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    settle_s: float,
    replace: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Fill and renew the Secrets. A replacement of the authority and of keys that has begun is completed; it takes two
    times `settle_s`. `replace`: begin one. Raises BadRequest, NotWritten."""
    state, version = where.read(plan.authority)
    wanted = created(state, now_s=clock())
    while True:
        at = stage(wanted)
        wanted = advanced(wanted, now_s=clock(), settle_s=settle_s, replace=replace)
        if stage(wanted) is not at:
            report(f"replacement of authority and keys: {stage(wanted)}")
            replace = False
        if wanted != state:
            where.write(plan.authority, wanted, version)
            state, version = where.read(plan.authority)
        for name, change in _changes(where, plan, state, now_s=clock()):
            report(f"{name}: {change}")
        if stage(state) is Stage.STABLE:
            return
        if not state.get("settled_from"):
            wanted = {**state, "settled_from": str(int(clock())).encode()}
            where.write(plan.authority, wanted, version)
            state, version = where.read(plan.authority)
        wanted = dict(state)
        sleep(max(1.0, float(state["settled_from"]) + settle_s - clock()))


def _changes(where: Secrets, plan: Plan, state: Data, *, now_s: float) -> list[tuple[str, str]]:
    """Write the Secrets of services and operators; return those that have changed, and why."""
    done = []
    authority = Authority.load(state["ca.crt"], state["ca.key"])
    for name, hosts in plan.certificates.items():
        found, version = where.read(name)
        data: Data = {"ca.crt": trusted_authorities(state)}
        why = "the trusted authorities have changed" if found.get("ca.crt") != data["ca.crt"] else ""
        if hosts:
            data |= {key: found[key] for key in CERTIFICATE_KEYS if key in found}
            if outdated := _outdated(authority, data, hosts, now_s):
                key = new_private_key()
                data["tls.key"] = key
                data["tls.crt"] = authority.issue(
                    key, common_name=hosts[0], hosts=hosts, now_s=now_s, lifetime_s=plan.days * _DAY_S
                )
                why = outdated
        if data != found:
            where.write(name, data, version)
            done.append((name, why or "completed"))
    signer = private_key(state["tokens.key"])
    verifier = SignedTokens(parse_keys(trusted_keys({"tokens.key": state["tokens.key"]})))
    for name, role in plan.credentials.items():
        found, version = where.read(name)
        data = {"keys": trusted_keys(state), "zookeeper": state["zookeeper"], "token": found.get("token", b"")}
        why = "the keys have changed"
        if not data["token"] or (outdated := outdated_token(verifier, data["token"], role, now_s)):
            why = "new token" if not data["token"] else f"new token: {outdated}"
            data["token"] = sign(
                signer, subject=role, issued_at_s=int(now_s), expires_at_s=int(now_s) + plan.days * _DAY_S
            )
        if data != found:
            where.write(name, data, version)
            done.append((name, why))
    return done


def _outdated(authority: Authority, data: Data, hosts: Sequence[str], now_s: float) -> str:
    """Return why a certificate must be replaced; empty if it need not be."""
    try:
        if not all(key in data for key in CERTIFICATE_KEYS):
            return "new certificate"
        if not authority.has_issued(data["tls.crt"], data["tls.key"]):
            return "new certificate, of the new authority"
        found = facts(data["tls.crt"])
    except (BadRequest, Unauthorized):
        return "new certificate, because the old one cannot be read"
    if set(found.hosts) != {host.lower() for host in hosts}:
        return "new certificate, for other names"
    return "certificate renewed" if found.is_near_its_end(now_s) else ""

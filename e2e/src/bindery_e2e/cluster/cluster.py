"""A Bindery release in a Kubernetes namespace: what runs where, who leads, and ways to harm it that any cluster has.

Reading and deleting go through the official client, `exec` through kubectl. Everything blocks: callers in an event
loop put it into threads. Services are asked through the API server's proxy, so that no port needs to be reachable.

How a process is killed or stopped: Kubernetes has no verb for it, and no signal of SIGKILL's kind reaches PID 1 from
inside its own PID namespace, which rules out `exec` and `kubectl debug --target` into an ordinary pod. So the releases
under test set `shareProcessNamespace` (allowed at the restricted level): PID 1 is then the sandbox's own, and the
service's processes are signalled from the service's container by its own user. It works on every runtime.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from bindery_e2e.cluster.commands import CommandFailed, Runner, json_lines, run

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
SERVICES: Final = ("zookeeper", "bookie", "broker", "auditor")
API_TIMEOUT_S: Final = 15.0
EXEC_TIMEOUT_S: Final = 60.0
PORTS: Final = {"bookie": 8000, "broker": 8080, "auditor": 8090}
RESTRICTED: Final = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/warn": "restricted",
}

_NO_SHARED_NAMESPACE: Final = 99
SIGNAL_SCRIPT: Final = (
    "case $(tr '\\0' ' ' </proc/1/cmdline) in *pause*) ;; *) exit 99 ;; esac; "
    "for d in /proc/[0-9]*; do p=${d#/proc/}; "
    '[ "$p" = 1 ] || [ "$p" = $$ ] || kill -SIGNAL "$p" 2>/dev/null; done; true'
)
ROLES_SCRIPT: Final = """
import json, socket, sys
roles = {}
for name, address in json.loads(sys.argv[1]).items():
    text = b""
    try:
        with socket.create_connection((address, 2181), 2) as link:
            link.sendall(b"srvr")
            while part := link.recv(4096):
                text += part
    except OSError:
        pass
    modes = [line[6:] for line in text.decode().splitlines() if line.startswith("Mode: ")]
    roles[name] = modes[0] if modes else "silent"
print(json.dumps(roles))
"""


class ClusterError(Exception):
    """The cluster is not as it has to be for what was asked; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod's status says."""

    name: str
    component: str
    node: str
    ip: str
    uid: str
    phase: str
    is_ready: bool
    is_going: bool
    """Being deleted."""
    restarts: int
    waits_for: str
    """Why a container of it waits, such as CrashLoopBackOff; empty: none does."""
    claims: tuple[str, ...]
    image: str


def pod_of(found: Any) -> Pod:
    """`found`: a V1Pod."""
    status, spec = found.status, found.spec
    containers = list(status.container_statuses or ())
    conditions = {one.type: one.status for one in status.conditions or ()}
    waiting = [one.state.waiting.reason or "" for one in containers if one.state and one.state.waiting]
    claims = [one.persistent_volume_claim.claim_name for one in spec.volumes or () if one.persistent_volume_claim]
    return Pod(
        name=found.metadata.name,
        component=(found.metadata.labels or {}).get(COMPONENT_LABEL, ""),
        node=spec.node_name or "",
        ip=status.pod_ip or "",
        uid=found.metadata.uid,
        phase=status.phase or "",
        is_ready=conditions.get("Ready") == "True",
        is_going=found.metadata.deletion_timestamp is not None,
        restarts=sum(one.restart_count for one in containers),
        waits_for=waiting[0] if waiting else "",
        claims=tuple(claims),
        image=spec.containers[0].image,
    )


def control_plane_nodes(nodes: Iterable[Any], api_addresses: Iterable[str]) -> set[str]:
    """Names of the nodes that carry the control plane: by their label, or by serving the API themselves.

    `nodes`: V1Nodes; `api_addresses`: endpoints of the service `kubernetes`.
    """
    found, addresses = set(), set(api_addresses)
    for node in nodes:
        labels = node.metadata.labels or {}
        own = {one.address for one in node.status.addresses or ()}
        if "node-role.kubernetes.io/control-plane" in labels or own & addresses:
            found.add(node.metadata.name)
    return found


class Cluster:
    """One release in one namespace. Methods raise ClusterError, CommandFailed or the client's ApiException."""

    def __init__(
        self,
        core: Any,
        apps: Any,
        *,
        namespace: str,
        release: str = "bindery",
        runner: Runner = run,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`core`, `apps`: CoreV1Api and AppsV1Api, or what looks like them."""
        self.core = core
        self.apps = apps
        self.namespace = namespace
        self.release = release
        self._run = runner
        self._clock = clock
        self._sleep = sleep

    @classmethod
    def connect(cls, namespace: str, *, release: str = "bindery") -> "Cluster":
        """By KUBECONFIG and its current context."""
        settings = client.Configuration()
        settings.safe_chars_for_path_param = "/"  # a path behind a pod's proxy is several segments
        config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        api = client.ApiClient(settings)
        return cls(client.CoreV1Api(api), client.AppsV1Api(api), namespace=namespace, release=release)

    # --- what there is --------------------------------------------------------------------------------------------

    def pods(self, component: str | None = None) -> list[Pod]:
        """Those of the release by name, jobs and tests left out unless asked for."""
        selector = f"{INSTANCE_LABEL}={self.release}" + (f",{COMPONENT_LABEL}={component}" if component else "")
        found = self.core.list_namespaced_pod(
            self.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S
        ).items
        pods = [pod_of(one) for one in found]
        if component is None:
            pods = [pod for pod in pods if pod.component in (*SERVICES, "toolbox")]
        return sorted(pods, key=lambda pod: pod.name)

    def pod(self, name: str) -> Pod | None:
        try:
            return pod_of(self.core.read_namespaced_pod(name, self.namespace, _request_timeout=API_TIMEOUT_S))
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def last_words(self, component: str) -> dict[str, tuple[str, list[str]]]:
        """Pod -> (termination message, last lines of its logs) of the component's containers that ended with an error.

        The lines: of the container that is, and of the one before it. Which of them ended may change at any moment.
        """
        selector = f"{INSTANCE_LABEL}={self.release},{COMPONENT_LABEL}={component}"
        found: dict[str, tuple[str, list[str]]] = {}
        for pod in self.core.list_namespaced_pod(
            self.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S
        ).items:
            for container in pod.status.container_statuses or ():
                ended = container.state.terminated or (container.last_state and container.last_state.terminated)
                if ended and ended.exit_code:
                    logs = ["logs", pod.metadata.name, "--tail=1"]
                    lines = [self.kubectl(*logs, *which, check=False).strip() for which in ([], ["--previous"])]
                    found[pod.metadata.name] = (ended.message or "", lines)
        return found

    def not_ready(self) -> list[str]:
        """`name: why` of each pod that is not ready or on its way out, and of workloads that lack pods."""
        pods = self.pods()
        found = [
            f"{pod.name}: {'is being deleted' if pod.is_going else pod.waits_for or pod.phase or 'unknown'}"
            for pod in pods
            if pod.is_going or not pod.is_ready
        ]
        there = {component: sum(pod.component == component for pod in pods) for component in (*SERVICES, "toolbox")}
        for component, wanted in self.wanted().items():
            if there.get(component, 0) < wanted:
                found.append(f"{component}: {there.get(component, 0)} of {wanted} pods")
        return found

    def wanted(self) -> dict[str, int]:
        """Component -> replicas that its workload asks for."""
        selector = f"{INSTANCE_LABEL}={self.release}"
        found: dict[str, int] = {}
        for listing in (self.apps.list_namespaced_stateful_set, self.apps.list_namespaced_deployment):
            for one in listing(self.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S).items:
                found[one.metadata.labels.get(COMPONENT_LABEL, "")] = one.spec.replicas
        return found

    def workload(self, component: str) -> str:
        """`statefulset/name` or `deployment/name`, as kubectl takes it."""
        kind = "statefulset" if component in ("zookeeper", "bookie") else "deployment"
        return f"{kind}/{self.fullname}-{component}"

    @property
    def fullname(self) -> str:
        return self.release if "bindery" in self.release else f"{self.release}-bindery"

    def safe_nodes(self) -> list[str]:
        """Nodes that may be harmed: all but those of the control plane."""
        nodes = self.core.list_node(_request_timeout=API_TIMEOUT_S).items
        subsets = self.core.read_namespaced_endpoints(
            "kubernetes", "default", _request_timeout=API_TIMEOUT_S
        ).subsets  # fmt: skip
        api = [address.ip for subset in subsets or () for address in subset.addresses or ()]
        forbidden = control_plane_nodes(nodes, api)
        return sorted(node.metadata.name for node in nodes if node.metadata.name not in forbidden)

    def node_addresses(self) -> dict[str, str]:
        """Node -> InternalIP, those of the control plane first: they are never harmed."""
        safe = set(self.safe_nodes())
        nodes = self.core.list_node(_request_timeout=API_TIMEOUT_S).items
        ordered = sorted(nodes, key=lambda node: (node.metadata.name in safe, node.metadata.name))
        return {
            node.metadata.name: one.address
            for node in ordered
            for one in node.status.addresses or ()
            if one.type == "InternalIP"
        }

    # --- harm -----------------------------------------------------------------------------------------------------

    def delete_pod(self, name: str, *, grace_s: int | None = None) -> None:
        """`grace_s` 0: at once and without preStop; None: as the pod says."""
        options = {} if grace_s is None else {"grace_period_seconds": grace_s}
        self.core.delete_namespaced_pod(name, self.namespace, _request_timeout=API_TIMEOUT_S, **options)

    def delete_claim(self, name: str) -> None:
        """Returns at once; the claim goes when no pod uses it any more."""
        self.core.delete_namespaced_persistent_volume_claim(name, self.namespace, _request_timeout=API_TIMEOUT_S)

    def claims(self) -> dict[str, str]:
        """Claim -> uid."""
        found = self.core.list_namespaced_persistent_volume_claim(self.namespace, _request_timeout=API_TIMEOUT_S)
        return {one.metadata.name: one.metadata.uid for one in found.items}

    def signal(self, pod: Pod, name: str) -> None:
        """`name`: KILL, STOP or CONT, to every process of the pod but the sandbox's own."""
        script = SIGNAL_SCRIPT.replace("SIGNAL", name)
        try:
            self.exec(pod.name, "sh", "-c", script, container=pod.component)
        except CommandFailed as error:
            if f"exit code {_NO_SHARED_NAMESPACE}" in str(error):
                raise ClusterError(
                    f"{pod.name} has a process namespace of its own, where PID 1 takes no {name}: "
                    "install with defaults.shareProcessNamespace=true"
                ) from error
            if name != "KILL":  # a kill may end the exec's own container under it
                raise

    # --- asking ---------------------------------------------------------------------------------------------------

    def kubectl(self, *words: str, timeout_s: float = 60, stdin: str | None = None, check: bool = True) -> str:
        return self._run(["kubectl", "-n", self.namespace, *words], timeout_s=timeout_s, stdin=stdin, check=check)

    def exec(
        self, pod: str, *words: str, container: str | None = None, stdin: str | None = None,
        timeout_s: float = EXEC_TIMEOUT_S, check: bool = True,
    ) -> str:  # fmt: skip
        options = ["-i"] if stdin is not None else []
        if container:
            options += ["-c", container]
        return self.kubectl("exec", *options, pod, "--", *words, timeout_s=timeout_s, stdin=stdin, check=check)

    def toolbox(self, *words: str, stdin: str | None = None, timeout_s: float = 120, check: bool = True) -> str:
        """A command in the toolbox. Raises ClusterError while no toolbox runs."""
        pods = [pod for pod in self.pods("toolbox") if pod.is_ready and not pod.is_going]
        if not pods:
            raise ClusterError("no toolbox is ready; it runs the verbs of `bindery` inside the cluster")
        return self.exec(
            pods[0].name, *words, container="toolbox", stdin=stdin, timeout_s=timeout_s, check=check
        )  # fmt: skip

    def bindery(self, *words: str, timeout_s: float = 120) -> list[dict[str, Any]]:
        """What `bindery WORDS --json` prints."""
        return json_lines(self.toolbox("bindery", *words, "--json", timeout_s=timeout_s))

    def http(self, pod: Pod, path: str, *, timeout_s: float = API_TIMEOUT_S) -> str:
        """GET of a service's HTTP port, through the API server. Raises ClusterError for anything but 200."""
        try:
            return str(
                self.core.connect_get_namespaced_pod_proxy_with_path(
                    f"{pod.name}:{PORTS[pod.component]}", self.namespace, path.lstrip("/"),
                    _request_timeout=timeout_s, _preload_content=False,
                ).data.decode()
            )  # fmt: skip
        except (ApiException, HTTPError) as error:
            raise ClusterError(f"{pod.name}: GET {path}: {str(error)[:300]}") from error

    def http_json(self, pod: Pod, path: str) -> dict[str, Any]:
        found = json.loads(self.http(pod, path))
        assert isinstance(found, dict)
        return found

    def metric(self, component: str, name: str) -> float:
        """Sum of a metric over the component's ready pods. Raises ClusterError where none has it."""
        total, seen = 0.0, False
        for pod in self.pods(component):
            if pod.is_ready and not pod.is_going:
                for line in self.http(pod, "/metrics").splitlines():
                    if line.startswith((f"{name} ", f"{name}{{")):
                        total, seen = total + float(line.rsplit(" ", 1)[1]), True
        if not seen:
            raise ClusterError(f"no ready {component} has a metric {name}")
        return total

    # --- who leads ------------------------------------------------------------------------------------------------

    def zookeeper_roles(self) -> dict[str, str]:
        """Pod -> leader, follower, standalone or silent."""
        addresses = {pod.name: pod.ip for pod in self.pods("zookeeper") if pod.ip}
        found = json.loads(self.toolbox("python", "-c", ROLES_SCRIPT, json.dumps(addresses)))
        assert isinstance(found, dict)
        return found

    def zookeeper_leader(self) -> Pod:
        return self._one("zookeeper", self.zookeeper_roles(), ("leader", "standalone"))

    def zookeeper_follower(self, lot: float) -> Pod:
        """`lot` in [0, 1) chooses among them."""
        names = sorted(name for name, role in self.zookeeper_roles().items() if role == "follower")
        if not names:
            raise ClusterError("no ZooKeeper follows; this needs three of them")
        return self._named(names[int(lot * len(names))])

    def auditor_status(self) -> tuple[Pod, dict[str, Any]]:
        """The leading auditor and its /v1/recovery/status. Raises ClusterError while none leads."""
        problems = []
        for pod in self.pods("auditor"):
            if pod.is_ready and not pod.is_going:
                try:
                    status = self.http_json(pod, "/v1/recovery/status")
                except ClusterError as error:
                    problems.append(str(error))
                    continue
                if status["this"]["is_leader"]:
                    return pod, status
        raise ClusterError("no auditor leads" + "".join(f"; {problem}" for problem in problems))

    def topic_owner(self, topic: str) -> Pod:
        """`topic`: tenant/namespace/name. The broker that has it open."""
        brokers = [pod for pod in self.pods("broker") if pod.is_ready and not pod.is_going]
        if not brokers:
            raise ClusterError("no broker is ready")
        owner = str(self.http_json(brokers[0], f"/v1/topics/{topic}")["owner"])
        for pod in brokers:
            if owner == f"http://{pod.ip}:{PORTS['broker']}":
                return pod
        raise ClusterError(f"the owner of {topic} is {owner}, which is no ready broker's address")

    def _one(self, component: str, roles: Mapping[str, str], wanted: Sequence[str]) -> Pod:
        for name, role in roles.items():
            if role in wanted:
                return self._named(name)
        raise ClusterError(f"no {component} is {' or '.join(wanted)}: {dict(roles)}")

    def _named(self, name: str) -> Pod:
        pod = self.pod(name)
        if pod is None:
            raise ClusterError(f"pod {name} has just gone")
        return pod

    # --- waiting --------------------------------------------------------------------------------------------------

    def until(
        self, problem: Callable[[], str], what: str, *, timeout_s: float, poll_s: float = 1.0
    ) -> float:  # fmt: skip
        """Wait until `problem()` is empty; the seconds it took. Raises ClusterError with the last problem.

        While it waits an answer that cannot be had is a problem like others.
        """
        began = self._clock()
        while True:
            try:
                left = problem()
            except (ClusterError, CommandFailed, ApiException, HTTPError) as error:
                left = f"{type(error).__name__}: {str(error)[:500]}"
            if not left:
                return self._clock() - began
            if self._clock() - began > timeout_s:
                raise ClusterError(f"not within {timeout_s:.0f} s: {what}; last: {left}")
            self._sleep(poll_s)

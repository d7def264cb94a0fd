"""Access a Bindery release in a Kubernetes namespace: its pods, their roles, and faults that every cluster allows.

Reads and deletions use the official client, `exec` uses kubectl. All calls block, so callers in an event loop use
threads. HTTP requests to services go through the API server's proxy, so no service port has to be reachable.

Killing and stopping processes: Kubernetes has no operation for it. PID 1 of a PID namespace receives neither SIGKILL
nor SIGSTOP from inside that namespace, so `exec` and `kubectl debug --target` cannot send them to an ordinary pod. The
releases under test therefore set `shareProcessNamespace`, which the restricted level allows. PID 1 is then the
sandbox's process, and a shell in the service's container can signal the service's processes with its own user. This
works on every container runtime.
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
"""Shell script that sends SIGNAL to all processes of a pod except PID 1 and the shell itself.

Exit code 99: PID 1 is not the sandbox's process, so the pod does not share its process namespace.
"""
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
"""Python script that prints pod -> role of each ZooKeeper server as JSON. Its argument is pod -> address as JSON."""


class ClusterError(Exception):
    """The state of the cluster does not allow the operation; the message has the state that was found."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod and the parts of its status that tests use."""

    name: str
    component: str
    node: str
    ip: str
    uid: str
    phase: str
    is_ready: bool
    is_going: bool
    """Whether the pod is being deleted."""
    restarts: int
    waits_for: str
    """Reason why a container waits, such as CrashLoopBackOff; empty: none waits."""
    claims: tuple[str, ...]
    image: str


def pod_of(found: Any) -> Pod:
    """Convert a V1Pod."""
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
    """Names of the nodes of the control plane: those with its label, and those with an address of the API server.

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
        """`core`, `apps`: CoreV1Api and AppsV1Api, or objects with the same methods."""
        self.core = core
        self.apps = apps
        self.namespace = namespace
        self.release = release
        self._run = runner
        self._clock = clock
        self._sleep = sleep

    @classmethod
    def connect(cls, namespace: str, *, release: str = "bindery") -> "Cluster":
        """Connect with KUBECONFIG and its current context."""
        settings = client.Configuration()
        settings.safe_chars_for_path_param = "/"  # a path behind a pod's proxy is several segments
        config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        api = client.ApiClient(settings)
        return cls(client.CoreV1Api(api), client.AppsV1Api(api), namespace=namespace, release=release)

    # --- pods and nodes -----------------------------------------------------------------------------------------------

    def pods(self, component: str | None = None) -> list[Pod]:
        """Pods of the release, sorted by name. Without `component`, pods of jobs and tests are left out."""
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
        """Pod -> (termination message, last log lines) of the component's containers that ended with an error.

        The lines are those of the current and of the previous container, because either may be the one that ended.
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
        """`name: reason` of each pod that is not ready or being deleted, and of each workload with too few pods."""
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
        """Component -> replicas that its workload requests."""
        selector = f"{INSTANCE_LABEL}={self.release}"
        found: dict[str, int] = {}
        for listing in (self.apps.list_namespaced_stateful_set, self.apps.list_namespaced_deployment):
            for one in listing(self.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S).items:
                found[one.metadata.labels.get(COMPONENT_LABEL, "")] = one.spec.replicas
        return found

    def workload(self, component: str) -> str:
        """`statefulset/name` or `deployment/name`, an argument of kubectl."""
        kind = "statefulset" if component in ("zookeeper", "bookie") else "deployment"
        return f"{kind}/{self.fullname}-{component}"

    @property
    def fullname(self) -> str:
        return self.release if "bindery" in self.release else f"{self.release}-bindery"

    def safe_nodes(self) -> list[str]:
        """Nodes that faults may target: all but those of the control plane."""
        nodes = self.core.list_node(_request_timeout=API_TIMEOUT_S).items
        subsets = self.core.read_namespaced_endpoints("kubernetes", "default", _request_timeout=API_TIMEOUT_S).subsets
        api = [address.ip for subset in subsets or () for address in subset.addresses or ()]
        forbidden = control_plane_nodes(nodes, api)
        return sorted(node.metadata.name for node in nodes if node.metadata.name not in forbidden)

    def node_addresses(self) -> dict[str, str]:
        """Node -> InternalIP. Nodes of the control plane come first, because no fault targets them."""
        safe = set(self.safe_nodes())
        nodes = self.core.list_node(_request_timeout=API_TIMEOUT_S).items
        ordered = sorted(nodes, key=lambda node: (node.metadata.name in safe, node.metadata.name))
        return {
            node.metadata.name: one.address
            for node in ordered
            for one in node.status.addresses or ()
            if one.type == "InternalIP"
        }

    # --- faults -------------------------------------------------------------------------------------------------------

    def delete_pod(self, name: str, *, grace_s: int | None = None) -> None:
        """Delete a pod. `grace_s`: 0: delete at once, without preStop; None: use the grace period of the pod."""
        options = {} if grace_s is None else {"grace_period_seconds": grace_s}
        self.core.delete_namespaced_pod(name, self.namespace, _request_timeout=API_TIMEOUT_S, **options)

    def delete_claim(self, name: str) -> None:
        """Request the deletion. Kubernetes deletes the claim when no pod uses it any more."""
        self.core.delete_namespaced_persistent_volume_claim(name, self.namespace, _request_timeout=API_TIMEOUT_S)

    def claims(self) -> dict[str, str]:
        """Claim -> uid."""
        found = self.core.list_namespaced_persistent_volume_claim(self.namespace, _request_timeout=API_TIMEOUT_S)
        return {one.metadata.name: one.metadata.uid for one in found.items}

    def signal(self, pod: Pod, name: str, *, timeout_s: float = EXEC_TIMEOUT_S) -> None:
        """Send a signal to every process of the pod except the sandbox's. `name`: KILL, STOP or CONT."""
        script = SIGNAL_SCRIPT.replace("SIGNAL", name)
        try:
            self.exec(pod.name, "sh", "-c", script, container=pod.component, timeout_s=timeout_s)
        except CommandFailed as error:
            if f"exit code {_NO_SHARED_NAMESPACE}" in str(error):
                raise ClusterError(
                    f"{pod.name} has a process namespace of its own, where PID 1 takes no {name}: "
                    "install with defaults.shareProcessNamespace=true"
                ) from error
            if name != "KILL":  # SIGKILL may also end the container that runs this command
                raise

    # --- requests -----------------------------------------------------------------------------------------------------

    def kubectl(self, *words: str, timeout_s: float = 60, stdin: str | None = None, check: bool = True) -> str:
        return self._run(["kubectl", "-n", self.namespace, *words], timeout_s=timeout_s, stdin=stdin, check=check)

    def exec(
        self,
        pod: str,
        *words: str,
        container: str | None = None,
        stdin: str | None = None,
        timeout_s: float = EXEC_TIMEOUT_S,
        check: bool = True,
    ) -> str:
        options = ["-i"] if stdin is not None else []
        if container:
            options += ["-c", container]
        return self.kubectl("exec", *options, pod, "--", *words, timeout_s=timeout_s, stdin=stdin, check=check)

    def toolbox(self, *words: str, stdin: str | None = None, timeout_s: float = 120, check: bool = True) -> str:
        """Run a command in the toolbox and return its output. Raises ClusterError while no toolbox is ready."""
        pods = [pod for pod in self.pods("toolbox") if pod.is_ready and not pod.is_going]
        if not pods:
            raise ClusterError("no toolbox is ready; it runs the verbs of `bindery` inside the cluster")
        return self.exec(pods[0].name, *words, container="toolbox", stdin=stdin, timeout_s=timeout_s, check=check)

    def bindery(self, *words: str, timeout_s: float = 120) -> list[dict[str, Any]]:
        """Run `bindery WORDS --json` in the toolbox and return the JSON objects that it prints."""
        return json_lines(self.toolbox("bindery", *words, "--json", timeout_s=timeout_s))

    def http(self, pod: Pod, path: str, *, timeout_s: float = API_TIMEOUT_S) -> str:
        """GET `path` from a service's HTTP port through the API server.

        Raises ClusterError for a status other than 200.
        """
        try:
            return str(
                self.core.connect_get_namespaced_pod_proxy_with_path(
                    f"{pod.name}:{PORTS[pod.component]}",
                    self.namespace,
                    path.lstrip("/"),
                    _request_timeout=timeout_s,
                    _preload_content=False,
                ).data.decode()
            )
        except (ApiException, HTTPError) as error:
            raise ClusterError(f"{pod.name}: GET {path}: {str(error)[:300]}") from error

    def http_json(self, pod: Pod, path: str) -> dict[str, Any]:
        found = json.loads(self.http(pod, path))
        assert isinstance(found, dict)
        return found

    def metric(self, component: str, name: str) -> float:
        """Sum of a metric over the component's ready pods. Raises ClusterError if no pod has it."""
        total, seen = 0.0, False
        for pod in self.pods(component):
            if pod.is_ready and not pod.is_going:
                for line in self.http(pod, "/metrics").splitlines():
                    if line.startswith((f"{name} ", f"{name}{{")):
                        total, seen = total + float(line.rsplit(" ", 1)[1]), True
        if not seen:
            raise ClusterError(f"no ready {component} has a metric {name}")
        return total

    # --- roles --------------------------------------------------------------------------------------------------------

    def zookeeper_roles(self) -> dict[str, str]:
        """Pod -> leader, follower, standalone or silent."""
        addresses = {pod.name: pod.ip for pod in self.pods("zookeeper") if pod.ip}
        found = json.loads(self.toolbox("python", "-c", ROLES_SCRIPT, json.dumps(addresses)))
        assert isinstance(found, dict)
        return found

    def zookeeper_leader(self) -> Pod:
        return self._one("zookeeper", self.zookeeper_roles(), ("leader", "standalone"))

    def zookeeper_follower(self, draw: float) -> Pod:
        """The follower that `draw`, a random number in [0, 1), selects."""
        names = sorted(name for name, role in self.zookeeper_roles().items() if role == "follower")
        if not names:
            raise ClusterError("no ZooKeeper follows; this needs three of them")
        return self._named(names[int(draw * len(names))])

    def auditor_status(self) -> tuple[Pod, dict[str, Any]]:
        """The leader among the auditors and its /v1/recovery/status. Raises ClusterError while there is no leader."""
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
        """The broker that owns `topic` (tenant/namespace/name)."""
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
            raise ClusterError(f"pod {name} was deleted a moment ago")
        return pod

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until(self, problem: Callable[[], str], what: str, *, timeout_s: float, poll_s: float = 1.0) -> float:
        """Wait until `problem()` is empty, and return the seconds waited.

        Raises ClusterError with the last problem at the timeout. Errors of requests to the cluster count as problems.
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

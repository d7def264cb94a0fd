"""What the account of the audit's driver can do in a real Kubernetes: executors, and nothing else.

The objects are created in a namespace of their own; no pod is scheduled that a test needs to run.
"""

import copy
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from rendering import Object, documents, named, of_kind, template

pytestmark = pytest.mark.kubernetes

WAIT_S = 60.0
"""Seconds until a new policy applies."""
EXECUTORS: Object = {
    "audit.enabled": True,
    "audit.executors.enabled": True,
    "audit.executors.admissionPolicy.enabled": True,
    "audit.extraVolumes": [{"name": "access", "secret": {"secretName": "audit-access"}}],
    "audit.env": [{"name": "MINE", "valueFrom": {"secretKeyRef": {"name": "audit-variables", "key": "a"}}}],
    "imagePullSecrets": [{"name": "registry"}],
}


def kubectl(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=120, check=False)


def applied(objects: list[Object]) -> None:
    done = kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects))
    assert done.returncode == 0, done.stderr


class Driver:
    """Requests with the account of a driver."""

    def __init__(self, namespace: str, objects: list[Object]) -> None:
        self.namespace = namespace
        self._options = ("-n", namespace, "--as", f"system:serviceaccount:{namespace}:bindery-audit")
        made = named(objects, "ConfigMap", "bindery-audit-executors")
        self._template = yaml.safe_load(made["data"]["executor.yaml"])

    def ask(self, *words: str, given: str | None = None) -> str:
        """Return the error of a request; empty if it was accepted."""
        done = kubectl(*self._options, *words, given=given)
        return "" if done.returncode == 0 else done.stderr

    def executor(self) -> Any:
        """A pod as Spark makes it of the template."""
        pod = copy.deepcopy(self._template)
        pod["metadata"]["name"] = f"executor-{secrets.token_hex(3)}"
        pod["metadata"]["labels"] |= {"spark-role": "executor", "spark-app-selector": "spark-1"}
        pod["spec"]["volumes"].append({"name": "spark-local-dir-1", "emptyDir": {}})
        (container,) = pod["spec"]["containers"]
        container["env"].append({"name": "_SPARK_AUTH_SECRET", "value": "x"})
        container["env"].append(
            {"name": "SPARK_EXECUTOR_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        )
        return pod

    def create(self, pod: Any, *, is_kept: bool = False) -> str:
        options = () if is_kept else ("--dry-run=server",)
        return self.ask("create", *options, "-f", "-", given=json.dumps(pod))


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    namespace = f"chart-test-{secrets.token_hex(3)}"
    done = template(EXECUTORS, namespace=namespace)
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ConfigMap")
    wide = of_kind(objects, "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    assert len(wide) == 2
    made = Driver(namespace, objects)
    applied([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}])
    try:
        applied([*of_kind(objects, *kinds), *wide])
        other = made.executor()
        other["spec"]["serviceAccountName"] = "bindery-audit"
        until = time.monotonic() + WAIT_S
        while not made.create(other):
            assert time.monotonic() < until, "the policy does not apply"
            time.sleep(0.5)
        yield made
    finally:
        for one in wide:
            kubectl("delete", one["kind"], one["metadata"]["name"])
        kubectl("delete", "namespace", namespace, "--wait=false")


def test_the_policy_has_no_expression_that_kubernetes_warns_of(driver: Driver) -> None:
    found = json.loads(
        kubectl("get", "validatingadmissionpolicy", f"{driver.namespace}-bindery-audit-executors", "-o", "json").stdout
    )
    assert not found.get("status", {}).get("typeChecking", {}).get("expressionWarnings"), found["status"]


def test_the_driver_creates_executors_as_spark_does(driver: Driver) -> None:
    assert driver.create(driver.executor()) == ""


def volume(**source: Any) -> Callable[[Any], None]:
    return lambda pod: pod["spec"]["volumes"].append({"name": "more", **source})


def container(**fields: Any) -> Callable[[Any], None]:
    return lambda pod: pod["spec"]["containers"][0].update(fields)


def spec(**fields: Any) -> Callable[[Any], None]:
    return lambda pod: pod["spec"].update(fields)


def more(key: str, **fields: Any) -> Callable[[Any], None]:
    return lambda pod: (
        pod["spec"]
        .setdefault(key, [])
        .append({"name": "more", "image": pod["spec"]["containers"][0]["image"], **fields})
    )


SECRET = {"secretName": "bindery-access"}
KEY = {"secretKeyRef": {"name": "bindery-access", "key": "token"}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (spec(serviceAccountName="bindery-audit"), "an account of their own"),
        (spec(serviceAccountName="bindery-bookie"), "an account of their own"),
        (spec(automountServiceAccountToken=True), "without a token"),
        (lambda pod: pod["spec"].pop("automountServiceAccountToken"), "without a token"),
        (volume(secret=SECRET), "only the volumes"),
        (volume(projected={"sources": [{"secret": {"name": "bindery-access"}}]}), "only the volumes"),
        (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}), "only the volumes"),
        (volume(configMap={"name": "other"}), "only the volumes"),
        (volume(hostPath={"path": "/"}), "only the volumes"),
        (volume(persistentVolumeClaim={"claimName": "data-bindery-zookeeper-0"}), "only the volumes"),
        (volume(csi={"driver": "secrets-store.csi.k8s.io"}), "only the volumes"),
        (container(env=[{"name": "A", "valueFrom": KEY}]), "only the Secrets"),
        (container(envFrom=[{"secretRef": {"name": "bindery-access"}}]), "only the Secrets"),
        (more("containers", env=[{"name": "A", "valueFrom": KEY}]), "only the Secrets"),
        (more("initContainers", env=[{"name": "A", "valueFrom": KEY}]), "only the Secrets"),
        (more("initContainers", envFrom=[{"secretRef": {"name": "bindery-access"}}]), "only the Secrets"),
        (container(image="evil.example/x"), "only the images"),
        (more("initContainers", image="evil.example/x"), "only the images"),
        (spec(imagePullSecrets=[{"name": "other"}]), "only the images"),
        (container(securityContext={"privileged": True}), "no privileges"),
        (container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), "no privileges"),
        (more("initContainers", securityContext={"privileged": True}), "no privileges"),
        (spec(hostNetwork=True), "do not use the host"),
        (spec(hostPID=True), "do not use the host"),
        (spec(hostIPC=True), "do not use the host"),
        (lambda pod: pod["metadata"]["labels"].update({"app.kubernetes.io/component": "bookie"}), "executors only"),
        (lambda pod: pod["metadata"].pop("labels"), "executors only"),
    ],
    ids=range(27),
)
def test_a_pod_that_is_no_executor_is_refused(driver: Driver, change: Callable[[Any], None], told: str) -> None:
    pod = driver.executor()
    change(pod)
    said = driver.create(pod)
    assert "ValidatingAdmissionPolicy" in said
    assert told in said


def test_the_driver_deletes_executors_only(driver: Driver) -> None:
    bookie = driver.executor()
    bookie["metadata"].update(name="some-bookie", namespace=driver.namespace)
    bookie["metadata"]["labels"]["app.kubernetes.io/component"] = "bookie"
    applied([bookie])
    pods = [driver.executor() for _ in range(2)]
    for pod in pods:
        assert driver.create(pod, is_kept=True) == ""
    assert "may create and delete pods of executors only" in driver.ask("delete", "pod", "some-bookie", "--wait=false")
    assert driver.ask("delete", "pod", pods[0]["metadata"]["name"], "--wait=false") == ""
    assert driver.ask("delete", "pod", "-l", "spark-role=executor,app.kubernetes.io/component=audit-executor",
                      "--wait=false") == ""  # fmt: skip
    assert kubectl("get", "pod", "some-bookie", "-n", driver.namespace).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("patch", "pod", "x", "-p", '{"spec":{"containers":[{"name":"a","image":"evil.example/x"}]}}'),
        ("label", "pod", "x", "a=b"),
        ("get", "secrets"),
        ("get", "configmaps"),
        ("create", "configmap", "x"),
        ("create", "token", "bindery-bookie"),
        ("exec", "x", "--", "true"),
        ("get", "pods", "-A"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_the_role_of_the_driver_permits_nothing_else(driver: Driver, words: tuple[str, ...]) -> None:
    pod = driver.executor()
    pod["metadata"].update(name="x", namespace=driver.namespace)
    applied([pod])
    assert "cannot" in driver.ask(*words)


def test_the_account_of_executors_may_do_nothing(driver: Driver) -> None:
    account = f"system:serviceaccount:{driver.namespace}:bindery-audit-executor"
    for verb, kind in (("create", "pods"), ("get", "pods"), ("get", "secrets"), ("create", "pods/exec")):
        done = kubectl("auth", "can-i", verb, kind, "-n", driver.namespace, "--as", account)
        assert done.stdout.strip() == "no", f"{verb} {kind}"

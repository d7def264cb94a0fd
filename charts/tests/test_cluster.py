"""Validate the chart with a real Kubernetes: every manifest of every preset, and upgrades that must be refused.

All requests use --dry-run=server, except for a namespace that enforces the Pod Security level `restricted`, and for
StatefulSets of an existing release, whose pods stay pending.
"""

import json
import secrets
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from rendering import (
    CHART,
    PRESETS,
    Object,
    helm,
    named,
    of_kind,
    pod_templates,
    preset_options,
    render,
    render_preset,
)

pytestmark = pytest.mark.kubernetes

LEVEL = "pod-security.kubernetes.io"


def kubectl(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"chart-test-{secrets.token_hex(3)}"
    labels = {f"{LEVEL}/{mode}": "restricted" for mode in ("enforce", "warn")}
    made = kubectl(
        "apply",
        "-f",
        "-",
        given=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}),
    )
    assert made.returncode == 0, f"no Kubernetes answers; KUBECONFIG names one: {made.stderr}"
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def try_out(objects: list[Any], namespace: str) -> subprocess.CompletedProcess[str]:
    for one in objects:
        one["metadata"]["namespace"] = namespace
    return kubectl("apply", "--dry-run=server", "-f", "-", given=yaml.safe_dump_all(objects))


def copies(objects: list[Object]) -> list[Object]:
    return [dict(one, metadata=dict(one["metadata"])) for one in objects]


def make_accounts(objects: list[Object], namespace: str) -> None:
    """Create the service accounts, because Kubernetes refuses pods without one even in a dry run."""
    accounts = copies(of_kind(objects, "ServiceAccount"))
    for one in accounts:
        one["metadata"]["namespace"] = namespace
    done = kubectl("apply", "-f", "-", given=yaml.safe_dump_all(accounts))
    assert done.returncode == 0, done.stderr


def as_pods(objects: list[Object]) -> list[Object]:
    """A pod of each template, because the level refuses pods and only warns for workloads."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-try"},
            "spec": {
                **{key: value for key, value in template["spec"].items() if key != "serviceAccountName"},
                "volumes": [
                    *template["spec"]["volumes"],
                    *({"name": claim, "emptyDir": {}} for claim in claims_of(objects, name)),
                ],
            },
        }
        for name, template in pod_templates(objects)
    ]


def claims_of(objects: list[Object], name: str) -> list[str]:
    return [
        claim["metadata"]["name"]
        for one in of_kind(objects, "StatefulSet")
        if one["metadata"]["name"] == name
        for claim in one["spec"].get("volumeClaimTemplates", ())
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_kubernetes_accepts_every_manifest_at_the_level_restricted(preset: str, namespace: str) -> None:
    objects = render_preset(preset)
    make_accounts(objects, namespace)
    done = try_out(copies(objects), namespace)
    assert done.returncode == 0, done.stderr
    assert "PodSecurity" not in done.stderr
    assert done.stdout.count("(server dry run)") == len(objects)
    pods = as_pods(objects)
    done = try_out(pods, namespace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(pods)


AUDIT = {"audit.enabled": True, "networkPolicy.enabled": True}


@pytest.mark.parametrize("preset", ["none", "restricted"])
@pytest.mark.parametrize("more", [{}, {"audit.executors.enabled": True}, {"audit.apply": True}], ids=str)
def test_kubernetes_accepts_audits_and_their_executors(more: Object, preset: str, namespace: str) -> None:
    objects = render({**AUDIT, **more}, preset=preset)
    make_accounts(objects, namespace)
    done = try_out(copies(objects), namespace)
    assert done.returncode == 0, done.stderr
    assert "PodSecurity" not in done.stderr
    assert done.stdout.count("(server dry run)") == len(objects)
    assert "cronjob.batch/bindery-audit created" in done.stdout
    templates = [
        one["data"]["executor.yaml"] for one in of_kind(objects, "ConfigMap") if "executor.yaml" in one["data"]
    ]
    assert len(templates) == ("audit.executors.enabled" in more)
    executors = [dict(yaml.safe_load(text), metadata={"name": "executor-try"}) for text in templates]
    pods = [one for one in as_pods(objects) if "audit" in one["metadata"]["name"]] + executors
    done = try_out(pods, namespace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(pods)


def test_the_level_refuses_a_pod_that_violates_it(namespace: str) -> None:
    (pod, *_) = as_pods(render_preset("none"))
    pod["spec"]["securityContext"] = {}
    done = try_out([pod], namespace)
    assert done.returncode != 0
    assert "violates PodSecurity" in done.stderr


@pytest.fixture
def installed(namespace: str) -> str:
    """A namespace with the StatefulSets of a release without values. Their pods are never scheduled."""
    objects = copies(of_kind(render_preset("none"), "StatefulSet"))
    for one in objects:
        one["metadata"]["namespace"] = namespace
        template = one["spec"]["template"]
        spec = {**template["spec"], "schedulerName": "nobody"}
        one["spec"] = {**one["spec"], "template": {**template, "spec": spec}}
    done = kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects))
    assert done.returncode == 0, done.stderr
    return namespace


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("zookeeper.replicas=3", "zookeeper.replicas was 1 and cannot become 3: servers without data could outvote"),
        ("fullnameOverride=other", "this release's bookies are called bindery-bookie, and would now be called other"),
        ("bookie.persistence.common.enabled=true", "set up with the volume claims journal and ledgers and cannot"),
        ("bookie.persistence.enabled=false", "cannot change to none"),
        (
            "bookie.persistence.ledgers.size=8Gi",
            'the size of bookie.persistence\'s claim "ledgers" was 4Gi and is now 8Gi',
        ),
        ("bookie.persistence.journal.storageClass=fast", 'claim "journal" was "" and is now "fast"'),
        (
            "bookie.podManagementPolicy=OrderedReady",
            "podManagementPolicy of bindery-bookie was Parallel and cannot become",
        ),
        (
            "fullnameOverride=bindery,nameOverride=store",
            'was installed with the name "bindery", which its selector and its pods carry',
        ),
        (
            "bookie.persistence.ledgers.accessModes={ReadWriteOncePod}",
            'accessModes of bookie.persistence\'s claim "ledgers" were ["ReadWriteOnce"] and are now',
        ),
        (
            "zookeeper.persistence.annotations.backup=daily",
            'annotations of zookeeper.persistence\'s claim "data" were {} and are now {"backup":"daily"}',
        ),
        ("zookeeper.chroot=/x", 'zookeeper.chroot was "" and cannot become "/x": the metadata of all ledgers is there'),
        ("zookeeper.persistence.size=4Gi", 'the size of zookeeper.persistence\'s claim "data" was 2Gi and is now 4Gi'),
    ],
)
def test_upgrades_that_would_lose_data_are_refused(installed: str, settings: str, words: str) -> None:
    done = helm("install", "bindery", str(CHART), "-n", installed, "--dry-run=server", "--set", settings)
    assert done.returncode != 0
    assert words in done.stderr


def test_equal_sizes_in_other_units_are_accepted(installed: str) -> None:
    done = helm(
        "install", "bindery", str(CHART), "-n", installed, "--dry-run=server",
        "--set", "bookie.persistence.ledgers.size=4096Mi,zookeeper.persistence.size=2048Mi",
        "--set", "bookie.persistence.ledgers.storageClass=null,bookie.persistence.journal.labels=null",
    )  # fmt: skip
    assert "These values cannot work" not in done.stderr


def test_existing_claims_of_another_number_of_servers_are_refused(namespace: str) -> None:
    (claim,) = named(render_preset("none"), "StatefulSet", "bindery-zookeeper")["spec"]["volumeClaimTemplates"]
    left = {**claim, "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data-bindery-zookeeper-1", "namespace": namespace}}  # fmt: skip
    assert kubectl("apply", "-f", "-", given=json.dumps(left)).returncode == 0
    done = helm("install", "bindery", str(CHART), "-n", namespace, "--dry-run=server", *preset_options("ha"))
    assert "of 1 servers exist, and zookeeper.replicas is 3" in done.stderr
    done = helm("install", "bindery", str(CHART), "-n", namespace, "--dry-run=server")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            "bookie.persistence.enabled=false",
            "! bookie.persistence.enabled is false: a bookie's entries are gone with its pod",
        ),
        ("zookeeper.persistence.enabled=false", "! zookeeper.persistence.enabled is false"),
        (
            "bookie.persistentVolumeClaimRetentionPolicy.whenScaled=Delete",
            "! bookie.persistentVolumeClaimRetentionPolicy",
        ),
        ("broker.config.ledger.ackQuorum=1", "! broker.config.ledger.ackQuorum is 1"),
        ("bookie.replicas=3", "! bookie.replicas equals ensembleSize (3)"),
        ("broker.service.type=LoadBalancer", "! broker.service.type is LoadBalancer"),
        ("broker.ingress.enabled=true,broker.ingress.hosts={a.example}", "! broker.ingress.enabled"),
        (
            "audit.enabled=true,audit.executors.enabled=true",
            "! audit.executors.enabled: the driver's account can create",
        ),
        ("upgradeGate.force=true", "! upgradeGate.force is true"),
        ("upgradeGate.enabled=false", "! upgradeGate.enabled is false"),
    ],
)
def test_the_notes_warn_of_risky_values_and_of_nothing_else(namespace: str, settings: str, words: str) -> None:
    safe = "networkPolicy.enabled=true"
    done = helm("install", "bindery", str(CHART), "-n", namespace, "--dry-run=server", "--set", f"{safe},{settings}")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.rpartition("\nNOTES:\n")[2]
    assert words in notes
    assert notes.count("  ! ") == 1
    assert f"kubectl -n {namespace} port-forward svc/bindery-broker 8080:8080" in notes

"""The values of each workload have their effect, and the parts of the chart fit together."""

import re
from typing import Any

import pytest
from rendering import (
    Object,
    by_component,
    environment,
    is_hook,
    main_container,
    named,
    of_kind,
    pod_templates,
    render,
    render_preset,
)

BLOCKS = {
    "zookeeper": "zookeeper",
    "bookie": "bookie",
    "broker": "broker",
    "auditor": "auditor",
    "toolbox": "toolbox",
    "init": "init",
    "gate": "upgradeGate",
    "test": "helmTest",
}
"""Component -> its block of values."""

SPREAD = [{"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}]
AFFINITY = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
IN_SPEC: Object = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": AFFINITY,
    "topologySpreadConstraints": SPREAD,
    "priorityClassName": "high",
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["192.0.2.1"]},
    "terminationGracePeriodSeconds": 77,
    "automountServiceAccountToken": True,
    "shareProcessNamespace": True,
    "initContainers": [{"name": "first", "image": "a:1"}],
}
"""Keys that are copied into the pod's spec unchanged."""


@pytest.mark.parametrize("component", BLOCKS)
def test_a_value_of_a_workload_is_in_its_pods_and_in_no_others(component: str) -> None:
    values = {f"{BLOCKS[component]}.{key}": value for key, value in IN_SPEC.items()}
    templates = by_component(render(values))
    for key, value in IN_SPEC.items():
        assert templates[component]["spec"][key] == value, key
    for other in set(BLOCKS) - {component}:
        assert templates[other]["spec"].get("priorityClassName") is None


def test_a_value_of_the_defaults_is_in_every_pod_unless_a_workload_overrides_it() -> None:
    values = {f"defaults.{key}": value for key, value in IN_SPEC.items() if key != "terminationGracePeriodSeconds"}
    templates = by_component(render({**values, "broker.priorityClassName": "higher"}))
    for component, template in templates.items():
        assert template["spec"]["tolerations"] == IN_SPEC["tolerations"], component
        assert template["spec"]["priorityClassName"] == ("higher" if component == "broker" else "high"), component


@pytest.mark.parametrize("component", BLOCKS)
def test_containers_take_environment_volumes_sidecars_contexts_and_images(component: str) -> None:
    block = BLOCKS[component]
    digest = "sha256:" + "0" * 64
    template = by_component(
        render(
            {
                f"{block}.env": [{"name": "EXTRA", "value": "1"}],
                f"{block}.extraEnvFrom": [{"secretRef": {"name": "s"}}],
                f"{block}.extraVolumes": [{"name": "certificates", "secret": {"secretName": "c"}}],
                f"{block}.extraVolumeMounts": [{"name": "certificates", "mountPath": "/certificates"}],
                f"{block}.sidecars": [{"name": "beside", "image": "b:1"}],
                f"{block}.podAnnotations": {"note": "x"},
                f"{block}.podLabels": {"team": "y", "app.kubernetes.io/component": "other"},
                f"{block}.podSecurityContext.fsGroup": 5,
                f"{block}.containerSecurityContext.runAsUser": 6,
                f"{block}.resources.limits.cpu": "2",
                f"{block}.image": {"repository": "own/image", "tag": "9", "digest": digest, "pullPolicy": "Always"},
                "global.imageRegistry": "registry.example/mirror/",
                "imagePullSecrets": [{"name": "pull"}],
            }
        )
    )[component]
    container = main_container(template)
    assert environment(template)["EXTRA"] == "1"
    assert container["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert {"name": "certificates", "mountPath": "/certificates"} in container["volumeMounts"]
    assert {"name": "certificates", "secret": {"secretName": "c"}} in template["spec"]["volumes"]
    assert template["spec"]["containers"][1] == {"name": "beside", "image": "b:1"}
    assert template["metadata"]["annotations"]["note"] == "x"
    assert template["metadata"]["labels"]["team"] == "y"
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == component, "selectors hang on it"
    assert template["spec"]["securityContext"]["fsGroup"] == 5
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True, "maps are merged"
    assert container["securityContext"]["runAsUser"] == 6
    assert container["resources"]["limits"]["cpu"] == "2"
    assert container["image"] == f"registry.example/mirror/own/image@{digest}"
    assert container["imagePullPolicy"] == "Always"
    assert template["spec"]["imagePullSecrets"] == [{"name": "pull"}]


@pytest.mark.parametrize("component", BLOCKS)
def test_anything_else_is_merged_over_the_pod_template_last(component: str) -> None:
    merge = {
        "metadata": {"annotations": {"late": "1"}},
        "spec": {"runtimeClassName": "gvisor", "priorityClassName": "z"},
    }
    values = {f"{BLOCKS[component]}.podTemplate.merge": merge, f"{BLOCKS[component]}.priorityClassName": "a"}
    template = by_component(render(values))[component]
    assert template["metadata"]["annotations"]["late"] == "1"
    assert template["spec"]["runtimeClassName"] == "gvisor"
    assert template["spec"]["priorityClassName"] == "z"


def test_the_tag_of_our_images_is_one_value_and_zookeeper_keeps_its_own() -> None:
    for component, template in by_component(render({"global.imageTag": "0.1.1"})).items():
        tag = main_container(template)["image"].rpartition(":")[2]
        assert tag == ("3.9" if component == "zookeeper" else "0.1.1"), component


def test_jobs_and_tests_run_the_toolboxs_image_by_default() -> None:
    digest = "sha256:" + "0" * 64
    theirs = {"repository": "own/toolbox", "tag": "9", "pullPolicy": "Always"}
    for values, image in (
        ({"toolbox.image": theirs}, "own/toolbox:9"),
        ({"toolbox.image": theirs, "toolbox.enabled": False}, "own/toolbox:9"),
        ({"toolbox.image": {**theirs, "digest": digest}}, f"own/toolbox@{digest}"),
        ({"toolbox.image": theirs, "global.imageRegistry": "r.example"}, "r.example/own/toolbox:9"),
    ):
        templates = by_component(render(values))
        for component in ("init", "gate", "test"):
            container = main_container(templates[component])
            assert (container["image"], container["imagePullPolicy"]) == (image, "Always"), component
    other = "sha256:" + "1" * 64
    init: dict[str, Object] = {
        "own/toolbox:8": {"init.image.tag": "8"},
        f"own/toolbox@{digest}": {"init.image.repository": "own/toolbox"},
        f"own/toolbox@{other}": {"init.image.digest": other},
        # A tag or a digest of the toolbox does not apply to another image.
        "other:7": {"init.image.repository": "other", "global.imageTag": "7"},
        "other:8": {"init.image.repository": "other", "init.image.tag": "8"},
        f"other@{other}": {"init.image.repository": "other", "init.image.digest": other},
    }
    for image, values in init.items():
        templates = by_component(render({"toolbox.image": {**theirs, "digest": digest}, **values}))
        assert main_container(templates["init"])["image"] == image
        assert main_container(templates["gate"])["image"] == f"own/toolbox@{digest}"


def test_values_can_change_or_disable_a_probe() -> None:
    values: dict[str, Any] = {
        "bookie.startupProbe.failureThreshold": 7,
        "bookie.livenessProbe": {"exec": {"command": ["true"]}},
        "bookie.readinessProbe.enabled": False,
    }
    container = main_container(by_component(render(values))["bookie"])
    assert container["startupProbe"]["failureThreshold"] == 7
    assert container["startupProbe"]["httpGet"]["path"] == "/startupz"
    assert container["livenessProbe"]["exec"] == {"command": ["true"]}
    assert "httpGet" not in container["livenessProbe"]
    assert "readinessProbe" not in container


def test_a_variable_of_the_operator_replaces_the_charts_at_the_same_position() -> None:
    ours = main_container(by_component(render_preset("none"))["bookie"])["env"]
    values = {"bookie.env": [{"name": "BOOKIE_HOST", "value": "::"}]}
    theirs = main_container(by_component(render(values))["bookie"])["env"]
    assert [one["name"] for one in theirs] == [one["name"] for one in ours]
    assert {"name": "BOOKIE_HOST", "value": "::"} in theirs


def test_update_strategy_pod_management_labels_and_annotations_are_on_the_objects() -> None:
    values = {
        "bookie.updateStrategy": {"type": "OnDelete"},
        "bookie.podManagementPolicy": "OrderedReady",
        "broker.updateStrategy": {"type": "Recreate"},
        "broker.labels": {"team": "a"},
        "broker.annotations": {"note": "b"},
        "commonLabels": {"cost": "c"},
        "commonAnnotations": {"owner": "d"},
    }
    objects = render(values)
    bookie, broker = named(objects, "StatefulSet", "bindery-bookie"), named(objects, "Deployment", "bindery-broker")
    assert bookie["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert bookie["spec"]["podManagementPolicy"] == "OrderedReady"
    assert broker["spec"]["strategy"] == {"type": "Recreate"}
    assert broker["metadata"]["labels"]["team"] == "a"
    assert broker["metadata"]["annotations"]["note"] == "b"
    for one in objects:
        assert one["metadata"]["labels"]["cost"] == "c", one["metadata"]["name"]
        assert one["metadata"]["annotations"]["owner"] == "d", one["metadata"]["name"]
    for _, template in pod_templates(objects):
        assert template["metadata"]["labels"]["cost"] == "c"
    for one in of_kind(objects, "StatefulSet", "Deployment"):
        assert "cost" not in one["spec"]["selector"]["matchLabels"]


def test_existing_accounts_can_be_used() -> None:
    objects = render({"defaults.serviceAccount.create": False, "broker.serviceAccount.name": "mine"})
    assert of_kind(objects, "ServiceAccount") == []
    templates = by_component(objects)
    assert templates["broker"]["spec"]["serviceAccountName"] == "mine"
    assert templates["bookie"]["spec"]["serviceAccountName"] == "default"


def test_the_identity_of_a_bookie_depends_on_nothing_that_may_change() -> None:
    for values in ({}, {"clusterDomain": "other.example"}):
        set_in = environment(by_component(render(values))["bookie"])
        assert set_in["BOOKIE_BOOKIE_ID"] == "$(POD_NAME).bindery-bookie"
    assert set_in["BOOKIE_ADVERTISED_HOST"] == "$(POD_NAME).bindery-bookie.$(POD_NAMESPACE).svc.other.example"


def test_names_follow_the_release_and_the_overrides() -> None:
    def names(release: str, values: Object | None = None) -> set[str]:
        return {one["metadata"]["name"] for one in of_kind(render(values, release=release), "StatefulSet")}

    assert names("bindery") == {"bindery-bookie", "bindery-zookeeper"}
    assert names("prod") == {"prod-bindery-bookie", "prod-bindery-zookeeper"}
    assert names("prod", {"nameOverride": "store"}) == {"prod-store-bookie", "prod-store-zookeeper"}
    assert names("prod", {"fullnameOverride": "x"}) == {"x-bookie", "x-zookeeper"}


def test_storage_without_claims_is_bounded_and_may_be_memory() -> None:
    values = {
        "bookie.persistence.enabled": False,
        "bookie.persistence.journal.medium": "Memory",
        "bookie.persistence.journal.size": "32Mi",
        "zookeeper.persistence.enabled": False,
    }
    objects = render(values)
    volumes = {volume["name"]: volume for volume in by_component(objects)["bookie"]["spec"]["volumes"]}
    assert volumes["journal"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Mi"}
    assert volumes["ledgers"]["emptyDir"] == {"sizeLimit": "4Gi"}
    for one in of_kind(objects, "StatefulSet"):
        assert "volumeClaimTemplates" not in one["spec"]


def test_an_existing_zookeeper_replaces_the_charts() -> None:
    objects = render({"zookeeper.enabled": False, "zookeeper.external.servers": ["zk-0:2181", "zk-1:2181"]})
    assert not [one for one in objects if one["metadata"]["labels"]["app.kubernetes.io/component"] == "zookeeper"]
    templates = by_component(objects)
    for component, variable in {
        "bookie": "BOOKIE_ZOOKEEPER",
        "broker": "BROKER_ZOOKEEPER",
        "auditor": "AUDITOR_ZOOKEEPER",
        "toolbox": "BINDERY_ZOOKEEPER",
        "init": "BINDERY_ZOOKEEPER",
        "gate": "BINDERY_ZOOKEEPER",
    }.items():
        assert environment(templates[component])[variable] == "zk-0:2181,zk-1:2181"


def test_a_single_server_has_no_peers_and_a_changed_configuration_restarts_it() -> None:
    def parts(values: Object) -> tuple[str, str]:
        objects = render(values)
        template = named(objects, "StatefulSet", "bindery-zookeeper")["spec"]["template"]
        return named(objects, "ConfigMap", "bindery-zookeeper")["data"]["zoo.cfg"], template["metadata"]["annotations"][
            "checksum/config"
        ]

    alone, before = parts({})
    assert "server." not in alone
    assert "clientPort=2181\n" in alone
    other, after = parts({"zookeeper.config": {"tickTime": 3000, "maxClientCnxns": 0}})
    assert "tickTime=3000\n" in other
    assert "maxClientCnxns=0\n" in other
    assert before != after


def test_the_metadata_job_is_no_hook_and_has_another_name_if_its_template_changes() -> None:
    def job(values: Object) -> Object:
        (found,) = [one for one in of_kind(render(values), "Job") if "-init-" in one["metadata"]["name"]]
        return found

    first, same, other = job({}), job({"bookie.replicas": 5}), job({"init.resources.requests.cpu": "60m"})
    assert re.fullmatch(r"bindery-init-[0-9a-f]{8}", first["metadata"]["name"])
    assert first["metadata"]["name"] == same["metadata"]["name"] != other["metadata"]["name"]
    assert not is_hook(first)
    assert first["spec"]["ttlSecondsAfterFinished"] == 600


def test_the_gate_runs_before_upgrades_and_has_the_new_number_of_bookies() -> None:
    job = named(render({"bookie.replicas": 6, "upgradeGate.force": True}), "Job", "bindery-gate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    assert "hook-failed" not in job["metadata"]["annotations"]["helm.sh/hook-delete-policy"], "its log is the reason"
    assert job["spec"]["backoffLimit"] == 0
    assert main_container(job["spec"]["template"])["args"] == [
        "recovery",
        "gate",
        "--bookies=6",
        "--id-template=bindery-bookie-{}.bindery-bookie",
        "--wait=60s",
        "--force",
    ]
    assert job["metadata"]["annotations"]["helm.sh/hook-output-log-policy"] == "hook-failed", "helm prints the reason"
    account = named(render(), "ServiceAccount", "bindery-gate")
    assert account["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade,pre-rollback", (
        "an earlier release may not have it"
    )
    assert "hook-succeeded" in account["metadata"]["annotations"]["helm.sh/hook-delete-policy"], (
        "nothing is left behind"
    )


def test_the_gate_of_a_rollback_only_checks_bookies_that_are_removed() -> None:
    """Helm runs the hooks of the target revision, whose number of bookies is the right one."""
    job = named(render({"bookie.replicas": 6, "upgradeGate.force": True}), "Job", "bindery-rollback-gate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-rollback"
    assert "hook-failed" not in job["metadata"]["annotations"]["helm.sh/hook-delete-policy"], "its log is the reason"
    assert job["metadata"]["annotations"]["helm.sh/hook-output-log-policy"] == "hook-failed", "helm prints the reason"
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 180)
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "bindery-gate"
    assert main_container(job["spec"]["template"])["args"] == [
        "recovery",
        "gate",
        "--bookies=6",
        "--id-template=bindery-bookie-{}.bindery-bookie",
        "--wait=60s",
        "--only-drained",
    ]


def test_the_gate_of_a_rollback_reads_the_present_number_of_bookies() -> None:
    """It reads the ConfigMap of the current revision, which the target revision has not replaced yet."""
    objects = render({"bookie.replicas": 6, "fullnameOverride": "x"})
    counted = named(objects, "ConfigMap", "x-bookie")
    assert counted["data"] == {"replicas": "6"}
    assert not is_hook(counted), "a hook's would be the older revision's"
    template = named(objects, "Job", "x-rollback-gate")["spec"]["template"]
    (now,) = [one for one in main_container(template)["env"] if one["name"] == "BINDERY_BOOKIES_NOW"]
    assert now["valueFrom"] == {"configMapKeyRef": {"name": "x-bookie", "key": "replicas", "optional": True}}
    assert "BINDERY_BOOKIES_NOW" not in str(named(objects, "Job", "x-gate"))
    off = render({"upgradeGate.enabled": False})
    assert not [one for one in of_kind(off, "ConfigMap") if one["metadata"]["name"] == "bindery-bookie"]


def test_with_autoscaling_the_chart_does_not_set_the_number_of_brokers() -> None:
    objects = render({"broker.autoscaling.enabled": True})
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "bindery-broker"}
    assert "replicas" not in named(objects, "Deployment", "bindery-broker")["spec"]
    assert of_kind(render_preset("none"), "HorizontalPodAutoscaler") == []


def test_an_ingress_routes_to_the_broker() -> None:
    values = {
        "broker.ingress.enabled": True,
        "broker.ingress.hosts": ["a.example"],
        "broker.ingress.className": "nginx",
    }
    (ingress,) = of_kind(render(values), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "a.example"
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "bindery-broker", "port": {"name": "http"}}
    assert ingress["spec"]["ingressClassName"] == "nginx"


def test_policies_admit_the_required_clients() -> None:
    peer = {"podSelector": {"matchLabels": {"app": "spark"}}}
    objects = render({"networkPolicy.enabled": True, "networkPolicy.allowLedgerClients": [peer]})
    ledger, http = named(objects, "NetworkPolicy", "bindery-bookie")["spec"]["ingress"]
    assert ledger["ports"] == [{"port": "ledger", "protocol": "TCP"}]
    own, other = ledger["from"]
    assert other == peer
    (expression,) = own["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == {"broker", "auditor", "toolbox", "bookie", "test", "audit", "audit-executor"}
    assert peer not in http["from"]
    (broker,) = named(objects, "NetworkPolicy", "bindery-broker")["spec"]["ingress"]
    assert "from" not in broker, "everybody may use the broker"
    assert named(objects, "NetworkPolicy", "bindery-toolbox")["spec"]["ingress"] == []
    closed = render({"networkPolicy.enabled": True, "networkPolicy.allowBrokerClients": [peer]})
    (broker,) = named(closed, "NetworkPolicy", "bindery-broker")["spec"]["ingress"]
    assert peer in broker["from"]


def test_the_status_of_every_pod_has_the_reason_of_a_failure() -> None:
    for name, template in pod_templates(render_preset("none")):
        assert main_container(template)["terminationMessagePolicy"] == "FallbackToLogsOnError", name


def test_the_startup_probe_allows_more_than_the_wait_for_zookeeper() -> None:
    for timeout, at_least in ((90, 180), (600, 690), ("200.5", 290)):
        values = {f"{name}.config.zookeeperConnectTimeoutS": timeout for name in ("broker", "auditor")}
        templates = by_component(render(values))
        for name in ("broker", "auditor"):
            probe = main_container(templates[name])["startupProbe"]
            assert probe["failureThreshold"] * probe["periodSeconds"] >= at_least, (name, timeout)


def test_parts_can_be_disabled() -> None:
    off = {f"{name}.enabled": False for name in ("toolbox", "init", "upgradeGate", "helmTest")}
    left = {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in render(off)}
    assert left == {"zookeeper", "bookie", "broker", "auditor"}
    budgets = {f"{name}.pdb.enabled": False for name in ("zookeeper", "bookie", "broker", "auditor")}
    assert of_kind(render(budgets), "PodDisruptionBudget") == []


def test_binderys_programs_run_without_a_shell() -> None:
    for name, template in pod_templates(render_preset("none")):
        container = main_container(template)
        words = [*container.get("command", ()), *container.get("args", ())]
        assert not {"sh", "bash", "/bin/sh", "/bin/bash", "-c"} & set(words), name

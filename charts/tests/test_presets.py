"""Rules for all objects of each preset."""

from collections import Counter

import pytest
from rendering import (
    CHART,
    KUBERNETES,
    PRESETS,
    by_component,
    component,
    helm,
    is_hook,
    main_container,
    named,
    of_kind,
    pod_templates,
    preset_options,
    quantity,
    render,
    render_preset,
)

STABLE = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")
EVERYWHERE = (*STABLE, "app.kubernetes.io/version", "app.kubernetes.io/part-of", "app.kubernetes.io/managed-by")
MIB = 2**20


@pytest.mark.parametrize("preset", PRESETS)
def test_helm_lint_reports_nothing(preset: str) -> None:
    done = helm("lint", str(CHART), "--strict", "--kube-version", KUBERNETES, *preset_options(preset))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


@pytest.mark.parametrize("preset", PRESETS)
def test_no_two_objects_share_kind_and_name(preset: str) -> None:
    names = Counter((one["kind"], one["metadata"]["name"]) for one in render_preset(preset))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_object_carries_the_standard_labels(preset: str) -> None:
    for one in render_preset(preset):
        labels = one["metadata"]["labels"]
        assert set(EVERYWHERE) <= set(labels), one["metadata"]["name"]
        assert labels["helm.sh/chart"] == "bindery-0.1.0"
        assert one["metadata"].get("namespace") == (None if one["kind"].startswith("Cluster") else "somewhere")


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_scoped_to_the_cluster(preset: str) -> None:
    kinds = {one["kind"] for one in render_preset(preset)}
    scoped = {kind for kind in kinds if kind.startswith("Cluster") or kind in ("Namespace", "PriorityClass")}
    assert scoped == ({"ClusterRole", "ClusterRoleBinding"} if preset == "ha" else set()), "bookies read their nodes"
    # Without the jobs that create credentials, no pod uses the Kubernetes API.
    assert bool({"Role", "RoleBinding", "Secret"} & kinds) is (preset == "tls-auth")


@pytest.mark.parametrize("preset", PRESETS)
def test_selectors_have_the_three_labels_that_never_change_and_match_pods(preset: str) -> None:
    objects = render_preset(preset)
    pods = [template["metadata"]["labels"] for _, template in pod_templates(objects)]
    for one in of_kind(objects, "StatefulSet", "Deployment", "PodDisruptionBudget"):
        wanted = one["spec"]["selector"]["matchLabels"]
        assert set(wanted) == set(STABLE), one["metadata"]["name"]
        assert any(wanted.items() <= labels.items() for labels in pods), one["metadata"]["name"]
    for one in of_kind(objects, "Service"):
        assert set(one["spec"]["selector"]) == set(STABLE)


@pytest.mark.parametrize("preset", PRESETS)
def test_services_refer_to_ports_of_a_container(preset: str) -> None:
    objects = render_preset(preset)
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        (template,) = [one for _, one in pod_templates(objects) if selector <= one["metadata"]["labels"].items()]
        ports = {port["name"] for port in main_container(template)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports, service["metadata"]["name"]


@pytest.mark.parametrize("preset", PRESETS)
def test_accounts_volumes_and_claims_of_pods_exist(preset: str) -> None:
    objects = render_preset(preset)
    accounts = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    maps = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
    claims = {
        one["metadata"]["name"]: {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        for one in of_kind(objects, "StatefulSet")
    }
    for name, template in pod_templates(objects):
        spec = template["spec"]
        assert spec["serviceAccountName"] in accounts, name
        volumes = {volume["name"] for volume in spec["volumes"]} | claims.get(name, set())
        containers = [main_container(template), *spec.get("initContainers", ())]
        assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes, name
        assert {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume} <= maps, name


@pytest.mark.parametrize("preset", PRESETS)
def test_every_pod_passes_the_pod_security_level_restricted(preset: str) -> None:
    for name, template in pod_templates(render_preset(preset)):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is (component(template) == "secrets"), name
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


@pytest.mark.parametrize("preset", PRESETS)
def test_every_container_has_requests_and_no_image_has_the_tag_latest(preset: str) -> None:
    for name, template in pod_templates(render_preset(preset)):
        container = main_container(template)
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
        assert "memory" in container["resources"]["limits"], name
        assert container["image"].rpartition(":")[2] in ("0.1.0", "3.9"), name
        assert container["imagePullPolicy"] == "IfNotPresent", name


@pytest.mark.parametrize("preset", PRESETS)
def test_no_variable_is_set_twice_and_all_refer_to_earlier_ones(preset: str) -> None:
    for name, template in pod_templates(render_preset(preset)):
        known: list[str] = []
        for variable in main_container(template)["env"]:
            value = variable.get("value", "")
            assert isinstance(value, str), (name, variable)
            assert all(part.split(")")[0] in known for part in value.split("$(")[1:]), (name, variable)
            known.append(variable["name"])
        assert len(known) == len(set(known)), name


@pytest.mark.parametrize("preset", PRESETS)
def test_services_have_three_different_probes(preset: str) -> None:
    templates = by_component(render_preset(preset))
    for name in ("bookie", "broker", "auditor"):
        container = main_container(templates[name])
        paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
        assert paths == ["/startupz", "/livez", "/readyz"], name
    bookie = main_container(templates["bookie"])["startupProbe"]
    assert bookie["periodSeconds"] * bookie["failureThreshold"] >= 1800, "a journal of some GiB takes its time"
    zookeeper = main_container(templates["zookeeper"])
    assert "tcpSocket" in zookeeper["livenessProbe"], "a server without majority must not be restarted"
    assert zookeeper["readinessProbe"]["exec"]["command"] == ["/probe/serving"]


@pytest.mark.parametrize("preset", PRESETS)
def test_bookies_enter_maintenance_before_they_stop(preset: str) -> None:
    template = by_component(render_preset(preset))["bookie"]
    hook = main_container(template)["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["bindery-bookie-prestop"]
    assert template["spec"]["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize("preset", PRESETS)
def test_claims_outlive_the_statefulset(preset: str) -> None:
    for one in of_kind(render_preset(preset), "StatefulSet"):
        policy = one["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert policy == {"whenDeleted": "Retain", "whenScaled": "Retain"}, one["metadata"]["name"]


@pytest.mark.parametrize("preset", PRESETS)
def test_disruption_budgets_leave_a_majority_and_readable_entries(preset: str) -> None:
    objects = render_preset(preset)
    zookeeper = named(objects, "StatefulSet", "bindery-zookeeper")["spec"]["replicas"]
    budgets = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["maxUnavailable"]
        for one in of_kind(objects, "PodDisruptionBudget")
    }
    assert set(budgets) == {"zookeeper", "bookie", "broker", "auditor"}
    assert budgets["bookie"] == 1
    assert budgets["zookeeper"] == max(1, (zookeeper - 1) // 2)


def test_without_values_all_pods_request_at_most_one_cpu_and_1228_mib() -> None:
    cpus = memory = 0.0
    for one in render_preset("none"):
        if one["kind"] not in ("StatefulSet", "Deployment", "Job") or is_hook(one):
            continue
        for container in one["spec"]["template"]["spec"]["containers"]:
            requests, pods = container["resources"]["requests"], one["spec"].get("replicas", 1)
            cpus += pods * quantity(requests["cpu"])
            memory += pods * quantity(requests["memory"])
    assert cpus <= 1.0
    assert memory <= 1228 * MIB


def test_without_values_there_are_four_bookies_and_one_of_the_others() -> None:
    objects = render_preset("none")
    replicas = {
        component(one["spec"]["template"]): one["spec"]["replicas"]
        for one in of_kind(objects, "StatefulSet", "Deployment")
    }
    assert replicas == {"zookeeper": 1, "bookie": 4, "broker": 1, "auditor": 1, "toolbox": 1}
    claims = named(objects, "StatefulSet", "bindery-bookie")["spec"]["volumeClaimTemplates"]
    assert [claim["metadata"]["name"] for claim in claims] == ["journal", "ledgers"]
    affinity = by_component(objects)["bookie"]["spec"]["affinity"]["podAntiAffinity"]
    assert set(affinity) == {"preferredDuringSchedulingIgnoredDuringExecution"}
    (spread,) = by_component(objects)["bookie"]["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"


def test_kind_and_minikube_need_one_claim_per_bookie_and_a_node_port_of_the_broker() -> None:
    for preset in ("kind", "minikube"):
        objects = render_preset(preset)
        claims = named(objects, "StatefulSet", "bindery-bookie")["spec"]["volumeClaimTemplates"]
        assert [claim["metadata"]["name"] for claim in claims] == ["data"]
        assert named(objects, "Service", "bindery-broker")["spec"]["type"] == "NodePort"


def test_ha_spreads_over_nodes_and_zones_and_survives_the_loss_of_one() -> None:
    objects = render_preset("ha")
    replicas = {
        component(one["spec"]["template"]): one["spec"]["replicas"]
        for one in of_kind(objects, "StatefulSet", "Deployment")
    }
    assert replicas == {"zookeeper": 3, "bookie": 5, "broker": 3, "auditor": 2, "toolbox": 1}
    for name in ("zookeeper", "bookie", "broker", "auditor"):
        affinity = by_component(objects)[name]["spec"]["affinity"]["podAntiAffinity"]
        assert set(affinity) == {"requiredDuringSchedulingIgnoredDuringExecution"}, name
        (spread,) = by_component(objects)[name]["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        is_hard = name in ("zookeeper", "bookie")
        assert spread["whenUnsatisfiable"] == ("DoNotSchedule" if is_hard else "ScheduleAnyway"), name
    assert {one["metadata"]["name"] for one in of_kind(objects, "NetworkPolicy")} == {
        f"bindery-{name}" for name in ("zookeeper", "bookie", "broker", "auditor", "toolbox", "backup")
    }
    servers = named(objects, "ConfigMap", "bindery-zookeeper")["data"]["zoo.cfg"]
    for number in (1, 2, 3):
        host = f"bindery-zookeeper-{number}.bindery-zookeeper-headless.somewhere.svc.cluster.local"
        assert f"server.{number}={host}:2888:3888;2181\n" in servers


def test_ha_takes_the_rack_of_a_bookie_from_its_node_with_the_least_privilege() -> None:
    objects = render_preset("ha")
    (role,) = of_kind(objects, "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    (binding,) = of_kind(objects, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "somewhere-bindery-bookie-node-reader"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "bindery-bookie", "namespace": "somewhere"}]
    spec = by_component(objects)["bookie"]["spec"]
    (init,) = spec["initContainers"]
    assert init["command"] == ["bindery-bookie-rack", "/run/bindery/rack/rack", "topology.kubernetes.io/zone"]
    (bookie,) = spec["containers"]
    assert {"name": "BOOKIE_RACK_FILE", "value": "/run/bindery/rack/rack"} in bookie["env"]
    assert init["image"] == bookie["image"]
    assert spec["automountServiceAccountToken"] is False
    assert "node-reader" in {mount["name"] for mount in init["volumeMounts"]}
    assert "node-reader" not in {mount["name"] for mount in bookie["volumeMounts"]}, "the bookie has no token"
    assert next(one for one in bookie["volumeMounts"] if one["name"] == "rack")["readOnly"] is True
    others = [one for one in by_component(objects).values() if one is not by_component(objects)["bookie"]]
    assert not any("initContainers" in one["spec"] for one in others)


def test_the_racks_may_be_left_to_operators_and_have_another_label() -> None:
    objects = render({"bookie.rack.nodeLabel": "example.com/room"}, preset="ha")
    (init,) = by_component(objects)["bookie"]["spec"]["initContainers"]
    assert init["command"][-1] == "example.com/room"
    objects = render({"bookie.rack.fromNode": False}, preset="ha")
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    assert "initContainers" not in by_component(objects)["bookie"]["spec"]
    assert "node-reader" not in str(objects)


def test_restricted_limits_cpu_memory_and_scratch_space_of_every_container() -> None:
    for name, template in pod_templates(render_preset("restricted")):
        for container in template["spec"]["containers"]:
            assert set(container["resources"]["limits"]) == {"cpu", "memory", "ephemeral-storage"}, name
            assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["requests"]), name
            assert container["securityContext"]["privileged"] is False, name

"""Objects of the operator, a chroot of ZooKeeper, routes of the Gateway API, and the replacement of brokers."""

from typing import Any

import pytest
from rendering import Object, by_component, environment, named, of_kind, pod_templates, refusal, render, render_preset

MAP: Object = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "mine"},
    "data": {"a": "{{ not replaced }}"},
}
TEXT = """
# a comment
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "bindery.fullname" . }}-mine
  namespace: {{ .Release.Namespace }}
---
apiVersion: v1
kind: Secret
metadata:
  name: second
"""


# --- objects of the operator ------------------------------------------------------------------------------------------


def test_maps_are_objects_as_they_are_and_texts_are_templates() -> None:
    objects = render({"extraManifests": [MAP, TEXT]})
    assert named(objects, "ConfigMap", "mine") == MAP
    assert named(objects, "ConfigMap", "bindery-mine")["metadata"]["namespace"] == "somewhere"
    assert named(objects, "Secret", "second")
    assert len(objects) == len(render_preset("none")) + 3


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("kind: ConfigMap", "document 2 of extraManifests has no apiVersion, metadata.name"),
        ({**MAP, "metadata": {}}, "document 2 of extraManifests has no metadata.name"),
        ("just text", "document 2 of extraManifests is not a map in YAML"),
        ({"kind": "ConfigMap"}, "at '/extraManifests/1'"),
        (7, "at '/extraManifests/1'"),
        ("{{ .Values.nothing.there }}", "nil pointer"),
    ],
    ids=str,
)
def test_what_is_no_object_is_refused(manifest: Any, words: str) -> None:
    assert words in refusal({"extraManifests": [MAP, manifest]})


# --- chroot -----------------------------------------------------------------------------------------------------------


def test_every_pod_that_uses_zookeeper_has_the_chroot() -> None:
    audit = {"audit.enabled": True, "audit.executors.enabled": True, "backup.enabled": True}
    objects = render({"zookeeper.chroot": "/shared/messaging", **audit})
    found = {}
    for name, template in pod_templates(objects):
        for variable, value in environment(template).items():
            if variable.endswith("_ZOOKEEPER"):
                found[name] = value
    assert len(found) >= 10
    assert set(found.values()) == {"bindery-zookeeper:2181/shared/messaging"}
    theirs = {"zookeeper.enabled": False, "zookeeper.external.servers": ["a:1", "b:2"], "zookeeper.chroot": "/x"}
    policies = {"networkPolicy.enabled": True, "networkPolicy.restrictEgress": True}
    objects = render({**theirs, **policies})
    assert environment(by_component(objects)["broker"])["BROKER_ZOOKEEPER"] == "a:1,b:2/x"
    egress = named(objects, "NetworkPolicy", "bindery-broker")["spec"]["egress"]
    assert [1, 2] in [[port["port"] for port in rule["ports"]] for rule in egress]


@pytest.mark.parametrize("chroot", ["x", "/", "/x/", "/x//y", "/zookeeper", "/zookeeper/x", "/..", "/a,b:1", "/a b"])
def test_an_invalid_chroot_is_refused(chroot: str) -> None:
    assert "at '/zookeeper/chroot'" in refusal({"zookeeper.chroot": chroot})


# --- routes -----------------------------------------------------------------------------------------------------------

ROUTE = {
    "broker.httpRoute.enabled": True,
    "broker.httpRoute.parentRefs": [{"name": "gate", "namespace": "gateways"}],
    "broker.httpRoute.hosts": ["bindery.example.org"],
}


def test_a_route_leads_to_the_broker_and_ends_no_stream() -> None:
    objects = render({**ROUTE, "broker.service.port": 80})
    (route,) = of_kind(objects, "HTTPRoute")
    streams, others = route["spec"]["rules"]
    assert route["spec"]["parentRefs"] == ROUTE["broker.httpRoute.parentRefs"]
    assert route["spec"]["hostnames"] == ["bindery.example.org"]
    assert (streams["timeouts"], others["timeouts"]) == ({"request": "0s"}, {"request": "60s"})
    assert streams["backendRefs"] == others["backendRefs"] == [{"name": "bindery-broker", "port": 80}]
    assert [match.get("headers", [{}])[0].get("value") for match in streams["matches"]] == [None, "text/event-stream"]
    hosts = environment(by_component(objects)["broker"])["BROKER_HTTP_HOSTS"]
    assert "bindery.example.org" in hosts.split(",")
    plan = environment(by_component(render(ROUTE, preset="tls-auth"))["secrets"])["BINDERY_SECRETS_PLAN"]
    assert "bindery.example.org" in plan


def test_timeouts_can_be_left_to_the_gateway_and_a_route_needs_one() -> None:
    (route,) = of_kind(render({**ROUTE, "broker.httpRoute.timeouts": {"request": "", "stream": ""}}), "HTTPRoute")
    assert not [rule for rule in route["spec"]["rules"] if "timeouts" in rule]
    assert of_kind(render_preset("none"), "HTTPRoute") == []
    assert "broker.httpRoute.parentRefs is empty" in refusal({**ROUTE, "broker.httpRoute.parentRefs": []})
    assert "at '/broker/httpRoute/timeouts/request'" in refusal({**ROUTE, "broker.httpRoute.timeouts.request": "1 min"})


# --- brokers ----------------------------------------------------------------------------------------------------------


def test_a_new_broker_is_ready_before_an_old_one_stops() -> None:
    for preset in ("none", "ha"):
        spec = named(render_preset(preset), "Deployment", "bindery-broker")["spec"]
        assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        assert spec["minReadySeconds"] == 5
    own = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    spec = named(render({"broker.updateStrategy": own}), "Deployment", "bindery-broker")["spec"]
    assert spec["strategy"] == own
    stuck = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}
    assert "no broker could be replaced" in refusal({"broker.updateStrategy": stuck})


def test_brokers_of_the_production_preset_are_spread_and_a_broken_one_blocks_no_drain() -> None:
    objects = render_preset("ha")
    assert named(objects, "Deployment", "bindery-broker")["spec"]["replicas"] >= 3
    (spread,) = by_component(objects)["broker"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["matchLabelKeys"]) == ("topology.kubernetes.io/zone", ["pod-template-hash"])
    assert "matchLabelKeys" not in str(by_component(objects)["bookie"]), "a StatefulSet has no such label"
    policies = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"].get("unhealthyPodEvictionPolicy")
        for one in of_kind(objects, "PodDisruptionBudget")
    }
    assert policies == {"broker": "AlwaysAllow", "auditor": "AlwaysAllow", "bookie": None, "zookeeper": None}


def test_brokers_are_removed_slower_than_they_stop_and_added_in_steps() -> None:
    objects = render({"broker.autoscaling.enabled": True})
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    down, up = (scaler["spec"]["behavior"][name] for name in ("scaleDown", "scaleUp"))
    (policy,) = down["policies"]
    grace = by_component(objects)["broker"]["spec"]["terminationGracePeriodSeconds"]
    assert policy["value"] == 1
    assert policy["periodSeconds"] > grace, "the topics of one broker have moved before the next one stops"
    assert down["stabilizationWindowSeconds"] >= 300
    assert up["policies"] == [{"type": "Pods", "value": 2, "periodSeconds": 60}]

"""The secure form: each pod has the files that its settings name, TLS is used by everything that connects, the jobs may
change their own Secrets only, and network policies allow the same connections at both ends."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from bindery.certificates.kubernetes import Plan, fill
from rendering import (
    NAMESPACE,
    Object,
    by_component,
    component,
    environment,
    main_container,
    named,
    of_kind,
    pod_templates,
    refusal,
    render,
    render_preset,
)

SERVICES = ("bookie", "broker", "auditor")
TOOLS = ("toolbox", "init", "gate", "test")
SECURE = "/etc/bindery/secure"
SECURITY: Object = {"security.enabled": True}
TLS: Object = {"certificateFile": "/tls/tls.crt", "keyFile": "/tls/tls.key"}


@cache
def preset() -> dict[str, Object]:
    return by_component(render_preset("tls-auth"))


@cache
def with_executors() -> list[Object]:
    return render({"audit.enabled": True, "audit.executors.enabled": True}, preset="tls-auth")


# --- TLS of what connects ---------------------------------------------------------------------------------------------


def schemes(template: Object) -> set[str]:
    container = main_container(template)
    return {container[f"{kind}Probe"]["httpGet"].get("scheme", "HTTP") for kind in ("startup", "liveness", "readiness")}


@pytest.mark.parametrize("service", SERVICES)
def test_the_probes_of_a_port_with_tls_use_https(service: str) -> None:
    templates = by_component(render({f"{service}.config.http.tls": TLS}))
    assert {name: schemes(templates[name]) for name in SERVICES} == {
        name: {"HTTPS" if name == service else "HTTP"} for name in SERVICES
    }
    scheme = "https" if service == "broker" else "http"
    assert environment(templates["broker"])["BROKER_ADVERTISED_URL"] == f"{scheme}://$(POD_IP):8080"
    for name in TOOLS:
        assert environment(templates[name])["BINDERY_URL"] == f"{scheme}://bindery-broker:8080", name


def test_a_certificate_may_be_named_in_the_environment() -> None:
    env = [{"name": "BROKER_HTTP_TLS_CERTIFICATE_FILE", "value": "/tls/tls.crt"}]
    assert schemes(by_component(render({"broker.env": env}))["broker"]) == {"HTTPS"}


def test_probes_that_could_not_connect_are_refused() -> None:
    tls = {**TLS, "caFile": "/tls/ca.crt", "clientCertificates": "required"}
    assert "Kubernetes has no certificate for the probes" in refusal({"auditor.config.http.tls": tls})
    own = {f"auditor.{kind}Probe": {"exec": {"command": ["true"]}} for kind in ("startup", "liveness", "readiness")}
    assert schemes_of_exec(by_component(render({"auditor.config.http.tls": tls, **own}))["auditor"])


def schemes_of_exec(template: Object) -> bool:
    return "exec" in main_container(template)["livenessProbe"]


def test_a_broker_that_authenticates_is_not_insecure() -> None:
    def is_insecure(**auth: str) -> bool:
        values = {f"broker.config.auth.{key}": value for key, value in auth.items()}
        return "BROKER_INSECURE" in environment(by_component(render(values))["broker"])

    assert not is_insecure(tokensKeysFile="/keys")
    assert is_insecure(tokensKeysFile="/keys", anonymousRole="guest")
    assert is_insecure(certificateRole="none")


def test_prometheus_scrapes_with_https() -> None:
    monitor = {"metrics.podMonitor.enabled": True}
    (endpoint,) = named(render(monitor, preset="tls-auth"), "PodMonitor", "bindery")["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "ca": {"secret": {"name": "bindery-operator-tls", "key": "ca.crt"}},
        "serverName": f"metrics.bindery.{NAMESPACE}",
    }
    one = {**monitor, "bookie.config.http.tls": TLS}
    assert "metrics.podMonitor.tlsConfig is empty" in refusal(one)
    trusted = {**one, "metrics.podMonitor.tlsConfig": {"serverName": "a"}}
    (endpoint,) = named(render(trusted), "PodMonitor", "bindery")["spec"]["podMetricsEndpoints"]
    assert "scheme" not in endpoint
    assert endpoint["relabelings"][-1]["regex"] == "bookie"
    assert endpoint["relabelings"][-1]["targetLabel"] == "__scheme__"


# --- the preset -------------------------------------------------------------------------------------------------------


def test_every_port_of_the_preset_has_tls_and_authentication() -> None:
    for name in SERVICES:
        assert schemes(preset()[name]) == {"HTTPS"}, name
        assert f"{name.upper()}_INSECURE" not in environment(preset()[name]), name
        assert environment(preset()[name])[f"{name.upper()}_AUDIT_LOG_FILE"] == "-", name
    bookie, broker, auditor = (environment(preset()[name]) for name in SERVICES)
    assert (bookie["BOOKIE_TLS_REQUIRED"], bookie["BOOKIE_AUTH_PROVIDER"]) == ("true", "token")
    assert bookie["BOOKIE_AUTH_ADMIN_ROLES"] == "admin"
    assert broker["BROKER_AUTHORIZATION_ENABLED"] == "true"
    assert broker["BROKER_AUTHORIZATION_SUPER_USER_ROLES"] == "broker,admin"
    assert broker["BROKER_AUTH_PROXY_ROLES"] == "broker"
    assert (auditor["AUDITOR_ADMIN_READER_ROLES"], auditor["AUDITOR_ADMIN_OPERATOR_ROLES"]) == ("admin", "admin")


def test_every_file_that_a_setting_names_is_in_the_pod() -> None:
    templates = by_component(with_executors())
    for name in (*SERVICES, *TOOLS, "audit"):
        files = {
            value.removeprefix(f"{SECURE}/")
            for value in environment(templates[name]).values()
            if value.startswith(SECURE)
        }
        (volume,) = [one for one in templates[name]["spec"]["volumes"] if one["name"] == "secure"]
        items = {item["path"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}
        assert files, name
        assert files <= items, name
        mounts = {mount["name"]: mount for mount in main_container(templates[name])["volumeMounts"]}
        assert mounts["secure"] == {"name": "secure", "mountPath": SECURE, "readOnly": True}, name
        assert volume["projected"]["defaultMode"] == 0o440, name


def test_jobs_the_toolbox_and_tests_have_credentials_of_all_services() -> None:
    templates = by_component(with_executors())
    for name in (*TOOLS, "audit"):
        found = environment(templates[name])
        for variable in (
            "BINDERY_HTTP_CA_FILE",
            "BINDERY_CLIENT_CA_FILE",
            "BINDERY_CLIENT_TOKEN_FILE",
            "BINDERY_TOKEN_FILE",
            "BINDERY_BOOKIE_TOKEN_FILE",
            "BINDERY_ZOOKEEPER_CREDENTIALS_FILE",
        ):
            assert found[variable].startswith(f"{SECURE}/"), (name, variable)
        assert found["BINDERY_ZOOKEEPER_NEW_NODES"] == "creator", name
    hook = next(one for name, one in pod_templates(with_executors()) if name == "bindery-test-prestop")
    assert environment(hook)["BOOKIE_ZOOKEEPER_ACCESS_CREDENTIALS_FILE"] == f"{SECURE}/zookeeper"
    executor = named(with_executors(), "ConfigMap", "bindery-audit-executors")["data"]["executor.yaml"]
    assert "bindery-operator-credentials" in executor


def test_without_the_secure_form_no_pod_has_its_files() -> None:
    assert SECURE not in str(render_preset("none"))


def test_settings_override_the_secure_form_also_with_false() -> None:
    values = {"broker.config.authorization.enabled": False, "auditor.config.auditLog.file": "/audit/log"}
    templates = by_component(render(values, preset="tls-auth"))
    assert environment(templates["broker"])["BROKER_AUTHORIZATION_ENABLED"] == "false"
    assert environment(templates["auditor"])["AUDITOR_AUDIT_LOG_FILE"] == "/audit/log"
    assert environment(templates["bookie"])["BOOKIE_AUDIT_LOG_FILE"] == "-"


class Made:
    """Secrets in memory, as the job of a rendering fills them."""

    def __init__(self, objects: list[Object]) -> None:
        self.data: dict[str, dict[str, bytes]] = {
            one["metadata"]["name"]: {} for one in of_kind(objects, "Secret") if "data" not in one
        }
        self.plan = Plan.parse(environment(by_component(objects)["secrets"])["BINDERY_SECRETS_PLAN"])
        fill(self, self.plan, clock=lambda: 1.8e9, sleep=lambda _: None, settle_s=0, report=lambda _: None)

    def read(self, name: str) -> tuple[dict[str, bytes], str]:
        return dict(self.data[name]), ""

    def write(self, name: str, data: dict[str, bytes], version: str) -> None:
        self.data[name] = dict(data)


def test_the_job_fills_every_key_that_pods_mount() -> None:
    made = Made(with_executors())
    for name, template in pod_templates(with_executors()):
        for volume in template["spec"]["volumes"]:
            for source in volume.get("projected", {}).get("sources", ()):
                data = made.data[source["secret"]["name"]]
                assert all(data[item["key"]] for item in source["secret"]["items"]), name


def test_certificates_contain_the_names_under_which_services_are_reached() -> None:
    made = Made(render_preset("tls-auth"))
    peers = environment(preset()["broker"])["BROKER_PEERS_SERVER_NAME"]
    for service, hosts in (
        ("bookie", [f"*.bindery-bookie.{NAMESPACE}.svc.cluster.local"]),
        ("broker", ["bindery-broker", f"bindery-broker.{NAMESPACE}.svc", "localhost", peers]),
        ("auditor", ["bindery-auditor", f"bindery-auditor.{NAMESPACE}.svc.cluster.local"]),
    ):
        names = made.plan.certificates[f"bindery-{service}-tls"]
        assert {*hosts, f"metrics.bindery.{NAMESPACE}"} <= set(names), service
    assert environment(preset()["bookie"])["BOOKIE_ADVERTISED_HOST"].endswith(
        ".bindery-bookie.$(POD_NAMESPACE).svc.cluster.local"
    )
    for other in ("bookie", "auditor"):
        assert peers not in made.plan.certificates[f"bindery-{other}-tls"], "brokers accept it as another broker"


def test_roles_of_tokens_are_those_that_the_services_know() -> None:
    roles = Made(render_preset("tls-auth")).plan.credentials
    assert roles == {
        "bindery-bookie-credentials": "bookie",
        "bindery-broker-credentials": "broker",
        "bindery-auditor-credentials": "auditor",
        "bindery-operator-credentials": "admin",
    }
    assert environment(preset()["bookie"])["BOOKIE_AUTH_CLIENT_ROLES"] == "broker,auditor,bookie,admin"


# --- the jobs ---------------------------------------------------------------------------------------------------------


def test_the_jobs_may_change_their_own_secrets_only() -> None:
    objects = render_preset("tls-auth")
    (rule,) = named(objects, "Role", "bindery-secrets")["rules"]
    secrets = {one["metadata"]["name"]: one for one in of_kind(objects, "Secret")}
    assert rule["verbs"] == ["get", "update"]
    assert rule["resources"] == ["secrets"]
    assert set(rule["resourceNames"]) == set(secrets)
    for one in secrets.values():
        assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert not {"data", "stringData"} & set(one), "an upgrade would replace it"
    used = {template["spec"]["serviceAccountName"] for _, template in pod_templates(objects)}
    (subject,) = named(objects, "RoleBinding", "bindery-secrets")["subjects"]
    assert subject["name"] == "bindery-secrets"
    assert "bindery-secrets" in used
    for name, template in pod_templates(objects):
        own = component(template) == "secrets"
        assert (template["spec"]["serviceAccountName"] == "bindery-secrets") is own, name
        assert "authority" not in str(template["spec"]["volumes"]), name


def test_the_renewal_is_scheduled_and_a_replacement_is_not() -> None:
    objects = render({"secretsJob.schedule": "1 2 * * *", "secretsJob.settleSeconds": 90}, preset="tls-auth")
    renewal, rotation = (named(objects, "CronJob", f"bindery-{name}")["spec"] for name in ("secrets", "rotate"))
    assert (renewal["schedule"], renewal["suspend"], rotation["suspend"]) == ("1 2 * * *", False, True)
    command = ["certificates", "kubernetes", "--settle=90"]
    assert renewal["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"] == command
    assert rotation["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"] == [*command, "--rotate"]


def test_cert_manager_makes_the_certificates_and_the_job_the_tokens() -> None:
    objects = render({"security.certificates.source": "certManager"}, preset="tls-auth")
    found = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Certificate")}
    assert set(found) == {"bindery-authority", *(f"bindery-{name}-tls" for name in (*SERVICES, "operator"))}
    assert len(of_kind(objects, "Issuer")) == 2
    plan = Made(objects).plan
    assert plan.certificates == {}
    assert len(plan.credentials) == 4
    written = {one["secretName"] for one in found.values()}
    assert not {one["metadata"]["name"] for one in of_kind(objects, "Secret")} & written, "cert-manager creates them"
    ours = Plan.parse(environment(preset()["secrets"])["BINDERY_SECRETS_PLAN"]).certificates
    for service in SERVICES:
        assert found[f"bindery-{service}-tls"]["dnsNames"] == ours[f"bindery-{service}-tls"]
    issuer = {"security.certificates.issuer.name": "mine", "security.certificates.issuer.kind": "ClusterIssuer"}
    theirs = render({"security.certificates.source": "certManager", **issuer}, preset="tls-auth")
    assert of_kind(theirs, "Issuer") == []
    assert {one["spec"]["issuerRef"]["name"] for one in of_kind(theirs, "Certificate")} == {"mine"}


def test_existing_secrets_need_no_job() -> None:
    sources = {f"security.{kind}.source": "secrets" for kind in ("certificates", "credentials")}
    said = refusal(sources, preset="tls-auth")
    assert said.count("secretNames") == 8
    own = {
        f"security.{kind}.secretNames.{identity}": f"my-{kind}-{identity}"
        for kind in ("certificates", "credentials")
        for identity in (*SERVICES, "operator")
    }
    objects = render({**sources, **own}, preset="tls-auth")
    assert of_kind(objects, "Role", "Secret", "RoleBinding") == []
    assert "secrets" not in by_component(objects)
    (volume,) = [one for one in by_component(objects)["bookie"]["spec"]["volumes"] if one["name"] == "secure"]
    assert [one["secret"]["name"] for one in volume["projected"]["sources"]] == [
        "my-certificates-bookie", "my-credentials-bookie"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"security.superUserRoles": []}, "security.superUserRoles is empty"),
        ({"security.superUserRoles": ["bookie"]}, 'contains "bookie"'),
        ({"adminToken.secretName": "a"}, "adminToken.secretName and bookie.config.admin are both set"),
    ],
    ids=str,
)
def test_values_that_contradict_the_secure_form_are_refused(values: Object, words: str) -> None:
    assert words in refusal({**SECURITY, **values})


# --- network policies -------------------------------------------------------------------------------------------------


def connections(objects: list[Object], direction: str) -> Iterator[tuple[str, str, int]]:
    """(from, to, port) between pods of the release that the policies of one direction allow."""
    policies = {one["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: one["spec"]
                for one in of_kind(objects, "NetworkPolicy")}  # fmt: skip
    templates = by_component(objects)
    numbers = {
        name: {port["name"]: port["containerPort"] for port in main_container(one).get("ports", ())}
        for name, one in templates.items()
    }
    for name, spec in policies.items():
        for rule in spec.get(direction, ()):
            for peer in rule.get("from" if direction == "ingress" else "to", ()):
                for other in selected(peer, set(policies)):
                    for port in rule["ports"]:
                        source, target = (other, name) if direction == "ingress" else (name, other)
                        number = numbers.get(target, {}).get(port["port"], port["port"])
                        yield source, target, number


def selected(peer: Any, names: set[str]) -> set[str]:
    expressions = peer["podSelector"].get("matchExpressions", ())
    key = "app.kubernetes.io/component"
    if key in peer["podSelector"].get("matchLabels", {}):
        return {peer["podSelector"]["matchLabels"][key]}
    for one in expressions:
        assert (one["key"], one["operator"]) == (key, "In")
        return set(one["values"]) & names
    return names


def test_each_outgoing_connection_is_accepted_at_its_target() -> None:
    """The brokers' port is open to all unless clients are named."""
    objects = with_executors()
    outgoing, incoming = set(connections(objects, "egress")), set(connections(objects, "ingress"))
    assert {one for one in outgoing if one[1] != "broker"} - incoming == set()
    for needed in (
        ("broker", "bookie", 3181),
        ("broker", "broker", 8080),
        ("bookie", "bookie", 3181),
        ("auditor", "bookie", 3181),
        ("test", "broker", 8080),
        ("init", "zookeeper", 2181),
        ("gate", "zookeeper", 2181),
        ("audit", "bookie", 8000),
        ("audit-executor", "audit", 7078),
        ("zookeeper", "zookeeper", 3888),
    ):
        assert needed in outgoing, needed
    for refused in (("bookie", "broker", 8080), ("zookeeper", "bookie", 3181), ("secrets", "zookeeper", 2181)):
        assert refused not in outgoing, refused


def test_every_pod_has_a_policy_in_both_directions() -> None:
    objects = with_executors()
    policies = {
        one["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: one["spec"]
        for one in of_kind(objects, "NetworkPolicy")
    }
    assert set(by_component(objects)) <= set(policies)
    for name, spec in policies.items():
        assert spec["policyTypes"] == ["Ingress", "Egress"], name
        assert spec["egress"], name
    api = [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]
    users = {name for name, spec in policies.items() if {"ports": api} in spec["egress"]}
    assert users == {"secrets", "audit"}


def test_outgoing_connections_can_be_widened_and_narrowed() -> None:
    rule = {"ports": [{"port": 443, "protocol": "TCP"}], "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
    dns = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]
    values = {
        "networkPolicy.extraEgress": [rule],
        "networkPolicy.dnsServers": dns,
        "zookeeper.enabled": False,
        "zookeeper.external.servers": ["a.example.com:2281"],
    }
    for one in of_kind(render(values, preset="tls-auth"), "NetworkPolicy"):
        egress = one["spec"]["egress"]
        assert rule in egress
        assert [found["to"] for found in egress if found["ports"][0]["port"] == 53] == [dns]
    broker = named(render(values, preset="tls-auth"), "NetworkPolicy", "bindery-broker")["spec"]["egress"]
    assert {"ports": [{"port": 2281, "protocol": "TCP"}]} in broker


def test_the_plan_has_no_secrets() -> None:
    plan = environment(preset()["secrets"])["BINDERY_SECRETS_PLAN"]
    assert set(json.loads(plan)) == {"namespace", "authority", "days", "certificates", "credentials"}

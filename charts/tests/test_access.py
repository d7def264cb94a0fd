"""Authentication: the guide's example reaches every program, a workload without credentials is refused, tokens of
operators reach those who check and send them, and the notes tell what is open."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import (
    CHART,
    ROOT,
    Object,
    by_component,
    documents,
    environment,
    helm,
    main_container,
    pod_templates,
    refusal,
    render,
    render_preset,
    template,
)

TOKEN: Object = {"bookie.config.auth.provider": "token"}
TLS: Object = {"bookie.config.tls.required": True, "bookie.config.tls.caFile": "/ca"}
CERTIFICATE: Object = {"bookie.config.auth.provider": "certificate", "bookie.config.tls.caFile": "/ca"}
ACCESS = "/etc/bindery/access"


def shown(*keys: str) -> Object:
    return {f"{service}.config.client.{key}": "/file" for service in ("broker", "auditor") for key in keys}


@pytest.mark.parametrize(
    ("asked", "keys", "why"),
    [
        (TOKEN, ("tokenFile",), "auth.provider is token"),
        (TLS, ("caFile",), "tls.required is true"),
        (CERTIFICATE, ("caFile", "certificateFile"), "auth.provider is certificate"),
        ({**TOKEN, **TLS}, ("caFile", "tokenFile"), "auth.provider is token"),
    ],
    ids=("token", "tls", "certificate", "token and tls"),
)
def test_a_workload_without_credentials_is_named(asked: Object, keys: tuple[str, ...], why: str) -> None:
    said = refusal(asked)
    assert said.count("\n- ") == 2 * len(keys)
    assert f"bookie.config.{why} and broker.config.client." in said
    for key in keys:
        for service in ("broker", "auditor"):
            assert f"{service}.config.client.{key} is empty: bookies would refuse it; set it to a file" in said
        rest = refusal({**asked, **shown(*(set(keys) - {key})), f"broker.config.client.{key}": "/file"})
        assert rest.count("\n- ") == 1
        assert f"auditor.config.client.{key} is empty" in rest
    done = template({**asked, **shown(*keys)})
    assert done.returncode == 0, done.stderr


def test_credentials_may_come_from_a_variable() -> None:
    env = [{"name": "AUDITOR_CLIENT_TOKEN_FILE", "value": "/file"}]
    done = template({**TOKEN, "broker.config.client.tokenFile": "/file", "auditor.env": env})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", ["auditor", "defaults"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("extraEnvFrom", [{"configMapRef": {"name": "client"}}]), ("podTemplate.merge", {"spec": {"hostname": "a"}})],
)
def test_a_workload_with_variables_from_elsewhere_is_not_refused(block: str, key: str, value: Any) -> None:
    own = {} if block == "defaults" else {"broker.config.client.tokenFile": "/file"}
    done = template({**TOKEN, **own, f"{block}.{key}": value})
    assert done.returncode == 0, done.stderr
    if block != "defaults":
        assert "broker.config.client.tokenFile is empty" in refusal({**TOKEN, f"{block}.{key}": value})


@pytest.mark.parametrize(
    "values",
    [
        {"bookie.env": [{"name": "BOOKIE_TLS_CA_FILE", "value": "/ca"}]},
        {"bookie.env": [{"name": "BOOKIE_REPAIR_CA_FILE", "value": "/ca"}]},
        {"bookie.extraEnvFrom": [{"secretRef": {"name": "trust"}}]},
        {"bookie.podTemplate.merge": {"spec": {"hostname": "a"}}},
    ],
    ids=("tls", "repair", "extraEnvFrom", "podTemplate.merge"),
)
def test_the_trusted_authority_of_a_bookie_may_come_from_its_environment(values: Object) -> None:
    done = template({"bookie.config.tls.required": True, **shown("caFile"), **values})
    assert done.returncode == 0, done.stderr


def test_bookies_that_require_tls_must_trust_one_another() -> None:
    said = refusal({"bookie.config.tls.required": True, **shown("caFile")})
    assert "bookie.config.tls.caFile and bookie.config.repair.caFile are empty" in said
    done = template({"bookie.config.tls.required": True, "bookie.config.repair.caFile": "/ca", **shown("caFile")})
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The values of the guide's example."""
    (found,) = re.findall(r"```yaml\n(# access\.yaml.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("values") / "access.yaml"
    path.write_text(found)
    return path


@pytest.fixture(scope="module")
def objects(example: Path) -> list[Any]:
    audit = "audit.enabled=true,audit.executors.enabled=true"
    done = helm("template", "bindery", str(CHART), "--kube-version=1.34.0", "--values", str(example), "--set", audit)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def test_the_guides_example_configures_every_program(objects: list[Any]) -> None:
    templates = {name: one for name, one in pod_templates(objects) if "-reports" not in name}
    bookie = environment(templates["bindery-bookie"])
    assert (bookie["BOOKIE_AUTH_PROVIDER"], bookie["BOOKIE_TLS_REQUIRED"]) == ("token", "true")
    for name, variable, file in (
        ("bindery-bookie", "BOOKIE_AUTH_SECRETS_FILE", "token"),
        ("bindery-bookie", "BOOKIE_TLS_CA_FILE", "ca.crt"),
        ("bindery-broker", "BROKER_CLIENT_TOKEN_FILE", "token"),
        ("bindery-broker", "BROKER_CLIENT_CA_FILE", "ca.crt"),
        ("bindery-auditor", "AUDITOR_CLIENT_TOKEN_FILE", "token"),
        ("bindery-auditor", "AUDITOR_CLIENT_CA_FILE", "ca.crt"),
        ("bindery-toolbox", "BINDERY_CLIENT_TOKEN_FILE", "token"),
        ("bindery-test-roundtrip", "BINDERY_CLIENT_CA_FILE", "ca.crt"),
        ("bindery-audit", "BINDERY_CLIENT_TOKEN_FILE", "token"),
    ):
        assert environment(templates[name])[variable] == f"{ACCESS}/{file}", (name, variable)


def test_each_file_that_the_example_names_is_mounted(objects: list[Any]) -> None:
    (made,) = [one for one in objects if one["kind"] == "ConfigMap" and "executor.yaml" in one["data"]]
    executor = yaml.safe_load(made["data"]["executor.yaml"])
    users = [(name, one) for name, one in pod_templates(objects) if f"{ACCESS}/" in str(one)]
    assert len(users) >= 7
    for name, one in [*users, ("executor", executor)]:
        container = main_container(one)
        named = {
            value for value in environment(one).values() if value.startswith("/etc/bindery/") and "spark" not in value
        }
        assert named, name
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        secrets = {volume["name"] for volume in one["spec"]["volumes"] if "secret" in volume}
        assert {mounts[str(Path(file).parent)] for file in named} <= secrets, name


# --- tokens of operators ----------------------------------------------------------------------------------------------

ADMIN = {"adminToken.secretName": "operators", "adminToken.key": "all"}
USERS = {
    "bookie": "BOOKIE_ADMIN_TOKEN_FILE",
    "auditor": "AUDITOR_ADMIN_TOKEN_FILE",
    "toolbox": "BINDERY_BOOKIE_TOKEN_FILE",
}
"""Workload -> the variable with its file of tokens."""


@pytest.mark.parametrize(
    "more",
    [{}, {"bookie.persistence.enabled": False}, {"bookie.persistence.common.enabled": True}, {"audit.enabled": True}],
    ids=str,
)
def test_tokens_of_operators_reach_bookies_auditors_and_the_toolbox_and_nobody_else(more: Object) -> None:
    templates = by_component(render({**ADMIN, **more}))
    for component, one in templates.items():
        secrets = [volume["secret"] for volume in one["spec"]["volumes"] if "secret" in volume]
        variables = {name: value for name, value in environment(one).items() if name.endswith("_TOKEN_FILE")}
        if component in USERS:
            assert secrets == [{"secretName": "operators", "items": [{"key": "all", "path": "token"}]}], component
            assert variables == {USERS[component]: "/etc/bindery/admin/token"}, component
            mounts = {mount["mountPath"]: mount for mount in main_container(one)["volumeMounts"]}
            assert mounts["/etc/bindery/admin"] == {
                "mountPath": "/etc/bindery/admin", "name": "admin-token", "readOnly": True
            }  # fmt: skip
        else:
            assert (secrets, variables) == ([], {}), component


def test_by_default_there_are_no_tokens_of_operators() -> None:
    for name, one in pod_templates(render_preset("none")):
        assert "/etc/bindery/admin" not in str(one), name


def test_the_toolbox_may_send_another_token() -> None:
    mine = [{"name": "BINDERY_BOOKIE_TOKEN_FILE", "value": "/mine"}]
    assert environment(by_component(render({**ADMIN, "toolbox.env": mine}))["toolbox"])[mine[0]["name"]] == "/mine"


@pytest.mark.parametrize("service", ["bookie", "auditor"])
@pytest.mark.parametrize("key", ["tokenFile", "keysFile", "audience"])
def test_tokens_of_operators_have_one_source(service: str, key: str) -> None:
    said = refusal({**ADMIN, f"{service}.config.admin.{key}": "x"})
    assert f"adminToken.secretName and {service}.config.admin are both set" in said
    assert template({f"{service}.config.admin.{key}": "x"}).returncode == 0


def insecure(values: Object) -> set[str]:
    """The services that may listen where other machines can connect without authentication."""
    found = by_component(render(values))
    return {name for name in ("bookie", "broker", "auditor") if f"{name.upper()}_INSECURE" in environment(found[name])}


def test_a_service_with_authentication_does_not_start_without_it() -> None:
    assert insecure({}) == {"bookie", "broker", "auditor"}
    assert insecure(ADMIN) == {"bookie", "broker"}
    assert insecure({"auditor.config.admin.keysFile": "/keys"}) == {"bookie", "broker"}
    assert insecure({"auditor.config.admin.audience": "x"}) == {"bookie", "broker", "auditor"}
    assert insecure({**TOKEN, **shown("tokenFile")}) == {"broker", "auditor"}
    assert insecure({**CERTIFICATE, **shown("caFile", "certificateFile")}) == {"broker", "auditor"}
    assert insecure({"bookie.config.auth.provider": "none"}) == {"bookie", "broker", "auditor"}


# --- the notes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chart_with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with the notes about access in a ConfigMap, because `helm template` does not render notes."""
    path = tmp_path_factory.mktemp("chart") / "bindery"
    shutil.copytree(CHART, path)
    (path / "templates" / "shown.yaml").write_text(
        "kind: ConfigMap\nmetadata: {name: shown}\ndata:\n"
        '  notes: |\n    {{- include "bindery.notes.access" . | nindent 4 }}\n'
    )
    assert '{{- include "bindery.notes.access" . }}' in (CHART / "templates" / "NOTES.txt").read_text()
    return path


def notes(chart: Path, *options: str) -> str:
    done = helm(
        "template", "mine", str(chart), "-n", "there", "--kube-version=1.34.0", "-s", "templates/shown.yaml", *options
    )
    assert done.returncode == 0, done.stderr
    (made,) = documents(done.stdout)
    return str(made["data"]["notes"])


def test_the_notes_of_the_defaults_tell_what_is_open_and_how_to_close_it(chart_with_notes: Path) -> None:
    said = notes(chart_with_notes)
    assert "every pod of the Kubernetes cluster can connect to every port, and may without credentials:" in said
    for open_port in (
        "port 8080 of brokers: read, write and delete",
        "port 3181 of bookies: read and write",
        "port 8000 of bookies: read entries; make",
        "port 2181 of ZooKeeper: read, change and delete",
    ):
        assert f"  - {open_port}" in said
    assert "The HTTP of bookies and auditors refuses changes of the whole cluster" in said
    assert "bookie.config.auth.provider" in said


def test_the_values_in_the_notes_close_what_they_say(chart_with_notes: Path) -> None:
    """The command of the notes is run: with its values, the notes list less, and have no command left."""
    (command,) = re.findall(
        r"helm upgrade mine charts/bindery -n there --reset-then-reuse-values (.*)", notes(chart_with_notes)
    )
    import shlex

    said = notes(chart_with_notes, *shlex.split(command))
    assert "those that networkPolicy.allow... names, may without credentials:" in said
    assert "every client of brokers" not in said
    for closed in (
        "helm upgrade",
        "kubectl",
        "refuses changes of the whole cluster",
        "port 8000 of bookies: read entries",
    ):
        assert closed not in said
    secured = {**TOKEN, **shown("tokenFile")}
    options = [word for key, value in secured.items() for word in ("--set", f"{key}={value}")]
    said = notes(chart_with_notes, *shlex.split(command), *options)
    assert "port 3181" not in said
    assert "To close this" not in said
    assert "port 8080 of brokers" in said, "brokers cannot authenticate clients"


def test_the_notes_of_the_secure_form_list_only_what_it_leaves_open(chart_with_notes: Path) -> None:
    said = notes(chart_with_notes, "--set", "security.enabled=true")
    for closed in ("8090", "port 3181", "port 8080", "refuses changes", "every ledger"):
        assert closed not in said
    assert "  - port 8000 of bookies: read the state of ledgers and bookies" in said
    assert "  - ZooKeeper: create nodes at the top" in said

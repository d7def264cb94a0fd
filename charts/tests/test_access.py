"""Authentication to bookies: the guide's example reaches every program, and a workload without credentials is
refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import (
    CHART,
    ROOT,
    Object,
    documents,
    environment,
    helm,
    main_container,
    pod_templates,
    refusal,
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

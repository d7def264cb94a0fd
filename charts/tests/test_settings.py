"""The chart's `config` blocks are the services' settings: the same names, read back by the services themselves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from bindery_kit.http.origin import HostPolicy
from rendering import CHART, NAMESPACE, ROOT, by_component, environment, render

PREFIXES = {"bookie": "BOOKIE_", "broker": "BROKER_", "auditor": "AUDITOR_"}


def samples(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A valid value for each setting of a `config` schema."""
    for name, inner in schema["properties"].items():
        if inner["type"] == "object":
            yield from samples(inner, (*path, name))
        else:
            yield (*path, name), sample(inner)


def sample(schema: dict[str, Any]) -> Any:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "enum" in schema:
        return schema["enum"][0]
    if "boolean" in kinds:
        return True
    if "integer" in kinds or "number" in kinds:
        return schema.get("minimum", schema.get("maximum", 1))
    return "text"


def test_the_schema_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "chart_schema.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", PREFIXES)
def test_every_setting_becomes_the_variable_that_the_service_reads(service: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"][service]["properties"]["config"]
    wanted = dict(samples(schema))
    assert len(wanted) > 20
    # Quorums and memory keep their defaults, because other values would contradict one another.
    kept = {"ensembleSize", "writeQuorum", "ackQuorum", "memorySizeMax", "inFlightBytesMax"}
    values = {".".join((service, "config", *path)): value for path, value in wanted.items() if path[-1] not in kept}
    # Bookies that require TLS need clients with a trusted authority.
    trusted = {f"{client}.config.client.caFile": "text" for client in ("broker", "auditor")}
    set_in = environment(by_component(render({**trusted, **values}))[service])
    for path, value in wanted.items():
        if path[-1] in kept:
            continue
        name = PREFIXES[service] + "_".join(snake(part) for part in path).upper()
        text = {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
        if path == ("http", "hosts"):  # after the names in the cluster
            assert set_in[name].endswith(f",{text}"), name
        else:
            assert set_in[name] == text, name


def snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def test_sizes_with_units_become_bytes() -> None:
    values = {"bookie.config.storage.writeCacheSizeMax": "1.5Mi", "bookie.config.server.readsSizeMax": 67108864}
    set_in = environment(by_component(render(values))["bookie"])
    assert set_in["BOOKIE_STORAGE_WRITE_CACHE_SIZE_MAX"] == "1572864"
    assert set_in["BOOKIE_SERVER_READS_SIZE_MAX"] == "67108864"


@pytest.mark.parametrize("service", PREFIXES)
def test_a_service_knows_the_host_names_under_which_it_is_reached(service: str) -> None:
    values = {"clusterDomain": "example.internal", f"{service}.config.http.hosts": "console.example.com"}
    if service == "broker":
        values |= {"broker.ingress.enabled": True, "broker.ingress.hosts": ["a.example.com", "*.b.example.com"]}
    set_in = environment(by_component(render(values))[service])
    hosts = set_in[f"{PREFIXES[service]}HTTP_HOSTS"].split(",")
    name = f"bindery-{service}"
    assert hosts[:2] == [name, f"{name}.{NAMESPACE}"]
    assert hosts[2:6] == [f"*.{name}", f"*.{name}.{NAMESPACE}", "*.svc", "*.svc.example.internal"]
    assert hosts[6:] == (["a.example.com", "*.b.example.com"] if service == "broker" else []) + ["console.example.com"]
    policy = HostPolicy(bound="0.0.0.0", hosts=",".join(hosts))
    for host in (
        f"{name}-0.{name}.{NAMESPACE}.svc.example.internal",
        f"{name}-0.{name}",
        f"{name}.{NAMESPACE}",
        "10.0.0.7",
    ):
        assert policy.allows(host), host
    assert not policy.allows("evil.example.com")

"""The chart's `config` blocks are the services' settings: the same names, read back by the services themselves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rendering import CHART, ROOT, by_component, environment, render

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
        assert set_in[name] == text, name


def snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def test_sizes_with_units_become_bytes() -> None:
    values = {"bookie.config.storage.writeCacheSizeMax": "1.5Mi", "bookie.config.server.readsSizeMax": 67108864}
    set_in = environment(by_component(render(values))["bookie"])
    assert set_in["BOOKIE_STORAGE_WRITE_CACHE_SIZE_MAX"] == "1572864"
    assert set_in["BOOKIE_SERVER_READS_SIZE_MAX"] == "67108864"

"""skaffold.yaml: its paths, targets and values exist. charts/tests/test_skaffold_images.py checks the pods' images."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {"bindery/bookie", "bindery/broker", "bindery/auditor", "bindery/toolbox", "bindery/spark"}
CONTEXT_KEYS = {"image", "context", "docker"}


@pytest.fixture(scope="module")
def config() -> Any:
    return yaml.safe_load((ROOT / "skaffold.yaml").read_text())


@pytest.fixture(scope="module")
def release(config: Any) -> Any:
    (only,) = config["deploy"]["helm"]["releases"]
    return only


def test_the_api_version_is_supported_by_skaffold_2(config: Any) -> None:
    assert re.fullmatch(r"skaffold/v4beta\d+", config["apiVersion"])
    assert config["kind"] == "Config"


def test_every_image_is_built_from_a_target_that_exists(config: Any) -> None:
    artifacts = config["build"]["artifacts"]
    assert {artifact["image"] for artifact in artifacts} == IMAGES
    for artifact in artifacts:
        assert set(artifact) == CONTEXT_KEYS
        dockerfile = ROOT / artifact["context"] / artifact["docker"]["dockerfile"]
        stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile.read_text(), re.MULTILINE)
        assert artifact["docker"]["target"] in stages
        assert artifact["docker"]["target"] == artifact["image"].removeprefix("bindery/")


def test_the_chart_has_every_value_that_is_set(release: Any) -> None:
    chart = ROOT / release["chartPath"]
    assert (chart / "Chart.yaml").is_file()
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for key in release["setValueTemplates"]:
        workload, *path = key.split(".")
        assert workload in values, key
        node = values["defaults"]  # the values that each workload may have
        for part in path:
            assert part in node, key
            node = node[part]


def test_forwarded_ports_are_those_of_the_charts_services(config: Any, release: Any) -> None:
    names = {entry["resourceName"] for entry in config["portForward"]}
    assert names == {f"{release['name']}-broker", f"{release['name']}-auditor"}
    assert {entry["port"] for entry in config["portForward"]} == {8080, 8090}

"""Every pod of the chart runs the images that Skaffold sets."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from rendering import ROOT, render

FACTS = {"REPO": "{registry}/{image}", "TAG": "t1", "DIGEST": "sha256:" + "0" * 64}


def handed_over(config: Any, *, pushed: bool) -> dict[str, str]:
    """Chart value -> the value that Skaffold sets for images with the tag t1; images not pushed have no digest."""
    (release,) = config["deploy"]["helm"]["releases"]
    images = [artifact["image"] for artifact in config["build"]["artifacts"]]
    names = {image.replace("/", "_").replace("-", "_"): image for image in images}
    given = {}
    for key, template in release["setValueTemplates"].items():
        match = re.fullmatch(r"\{\{\.IMAGE_(REPO|TAG|DIGEST)_(\w+)\}\}", template)
        assert match is not None, template
        fact = FACTS[match[1]].format(registry="registry.test", image=names[match[2]])
        given[key] = "" if match[1] == "DIGEST" and not pushed else fact
    return given


def images_in(node: Any) -> Iterator[str]:
    """Images of all containers in `node`."""
    if isinstance(node, dict):
        if isinstance(node.get("image"), str) and "name" in node:
            yield node["image"]
        for value in node.values():
            yield from images_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from images_in(value)


@pytest.mark.parametrize(("pushed", "reference"), [(False, ":t1"), (True, "@" + FACTS["DIGEST"])])
def test_every_bindery_pod_runs_the_images_of_skaffold(pushed: bool, reference: str) -> None:
    config = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
    objects = render({"audit.enabled": True, **handed_over(config, pushed=pushed)})  # hooks and tests, too
    ours = {image for image in images_in(objects) if "bindery/" in image}
    built = {artifact["image"] for artifact in config["build"]["artifacts"]}
    assert ours == {f"registry.test/{image}{reference}" for image in built}

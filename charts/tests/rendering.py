"""The chart rendered by helm: values in, objects out."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "bindery"
KUBERNETES = "1.34.0"
"""The version that charts are rendered for; `kubeVersion` in Chart.yaml says which may be."""
PRESETS = ("none", "kind", "minikube", "ha", "restricted")
"""Values files by their names; `none` is no values at all."""
NAMESPACE = "somewhere"

Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm_program() -> str:
    """Raises AssertionError, which says how to get helm."""
    found = os.environ.get("HELM") or shutil.which("helm")
    assert found, (
        "helm is not on PATH: get version 3.14 or later from your package manager or from Helm's releases page, "
        "or name it in the environment variable HELM"
    )
    return found


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm_program(), *words], capture_output=True, text=True, timeout=60, check=False)


def preset_options(preset: str) -> list[str]:
    return [] if preset == "none" else ["--values", str(CHART / f"values-{preset}.yaml")]


def template(
    values: Object | None = None, *, preset: str = "none", release: str = "bindery", namespace: str = NAMESPACE
) -> Any:
    """`helm template` with `values` over a preset; the finished process."""
    options = [word for key, value in (values or {}).items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
    return helm(
        "template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES,
        *preset_options(preset), *options,
    )  # fmt: skip


def render(values: Object | None = None, *, preset: str = "none", release: str = "bindery") -> list[Object]:
    """Every object that the chart makes, those of hooks and tests, too. `values`: by dotted path."""
    done = template(values, preset=preset, release=release)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[Object]:
    """The objects in YAML that helm made; with libyaml's parser, which is many times as fast as the one in Python."""
    return [one for one in yaml.load_all(text, Loader=LOADER) if one]


@cache
def _preset(preset: str) -> list[Object]:
    return render(preset=preset)


def render_preset(preset: str) -> list[Object]:
    """The same for each test that asks: do not change it."""
    return _preset(preset)


def refusal(values: Object, *, preset: str = "none") -> str:
    """What helm says to values that it must refuse."""
    done = template(values, preset=preset)
    assert done.returncode != 0, f"accepted: {values}"
    return str(done.stderr)


def named(objects: list[Object], kind: str, name: str) -> Object:
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def is_hook(one: Object) -> bool:
    return "helm.sh/hook" in one["metadata"].get("annotations", {})


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name of the workload and its pod template (`metadata` and `spec`), for every workload, job and test pod."""
    for one in objects:
        if one["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]
        elif one["kind"] == "CronJob":
            yield one["metadata"]["name"], one["spec"]["jobTemplate"]["spec"]["template"]
        elif one["kind"] == "Pod":
            yield one["metadata"]["name"], one


def component(template: Object) -> str:
    return str(template["metadata"]["labels"]["app.kubernetes.io/component"])


def by_component(objects: list[Object]) -> dict[str, Object]:
    """A pod template for each component; of the tests the first."""
    found: dict[str, Object] = {}
    for _, template in pod_templates(objects):
        found.setdefault(component(template), template)
    return found


def main_container(template: Object) -> Object:
    first = template["spec"]["containers"][0]
    assert first["name"] == component(template)
    return dict(first)


def environment(template: Object) -> dict[str, str]:
    """Variables with a plain value."""
    return {one["name"]: one["value"] for one in main_container(template)["env"] if "value" in one}


UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(text: str | int) -> float:
    """A quantity of Kubernetes as a number: bytes, or CPUs."""
    digits = str(text).rstrip("kmMGTi")
    return float(digits) * UNITS[str(text).removeprefix(digits)]

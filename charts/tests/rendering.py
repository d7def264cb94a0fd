"""Render the chart with helm: values in, objects out."""

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
"""Kubernetes version of the renderings; `kubeVersion` in Chart.yaml has the supported ones."""
PRESETS = ("none", "kind", "minikube", "ha", "restricted", "tls-auth")
"""Names of the presets in `values-<name>.yaml`; `none`: the defaults of the chart."""
NAMESPACE = "somewhere"

Object = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm_program() -> str:
    """Path of helm. Raises AssertionError with instructions if it is missing."""
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
    """All objects of the chart, including hooks and tests. `values`: by dotted path."""
    done = template(values, preset=preset, release=release)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def documents(text: str) -> list[Object]:
    """Parse helm's YAML with libyaml, which is many times faster than the parser in Python."""
    return [one for one in yaml.load_all(text, Loader=LOADER) if one]


@cache
def _preset(preset: str) -> list[Object]:
    return render(preset=preset)


def render_preset(preset: str) -> list[Object]:
    """The objects of a preset. All tests share them: do not change them."""
    return _preset(preset)


def refusal(values: Object, *, preset: str = "none") -> str:
    """Helm's error message for values that it must refuse."""
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
    """Component -> pod template; for tests the first one."""
    found: dict[str, Object] = {}
    for _, template in pod_templates(objects):
        found.setdefault(component(template), template)
    return found


def main_container(template: Object) -> Object:
    first = template["spec"]["containers"][0]
    assert first["name"] == component(template)
    return dict(first)


def environment(template: Object) -> dict[str, str]:
    """Variables with a literal value."""
    return {one["name"]: one["value"] for one in main_container(template)["env"] if "value" in one}


UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(text: str | int) -> float:
    """A Kubernetes quantity as a number of bytes or CPUs."""
    digits = str(text).rstrip("kmMGTi")
    return float(digits) * UNITS[str(text).removeprefix(digits)]

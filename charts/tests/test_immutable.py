"""Compare the fields that Kubernetes refuses to change in a StatefulSet or Deployment with those first released.

An upgrade that changes such a field fails in every existing cluster, and a renamed claim leaves the data behind. The
golden file may therefore gain entries, but an entry never changes. `python charts/tests/test_immutable.py` adds the
entries of new workloads and refuses to change others; RELEASED holds a digest of each released entry, so that an edit
of the golden file fails too. A new entry needs a new line in RELEASED.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import PRESETS, of_kind, render_preset

GOLDEN = Path(__file__).parent / "golden" / "immutable.yaml"
RELEASED = {
    "ha: Deployment bindery-auditor": "bf59f6b88dfac2e9",
    "ha: Deployment bindery-broker": "bad6a8022e216e68",
    "ha: Deployment bindery-toolbox": "4d5c5108efdc6943",
    "ha: StatefulSet bindery-bookie": "4f9fe88de8b7b945",
    "ha: StatefulSet bindery-zookeeper": "717e9d419cd11b35",
    "kind: Deployment bindery-auditor": "bf59f6b88dfac2e9",
    "kind: Deployment bindery-broker": "bad6a8022e216e68",
    "kind: Deployment bindery-toolbox": "4d5c5108efdc6943",
    "kind: StatefulSet bindery-bookie": "d3c689aa65db0bd9",
    "kind: StatefulSet bindery-zookeeper": "922e7596b22cf4bd",
    "minikube: Deployment bindery-auditor": "bf59f6b88dfac2e9",
    "minikube: Deployment bindery-broker": "bad6a8022e216e68",
    "minikube: Deployment bindery-toolbox": "4d5c5108efdc6943",
    "minikube: StatefulSet bindery-bookie": "d3c689aa65db0bd9",
    "minikube: StatefulSet bindery-zookeeper": "922e7596b22cf4bd",
    "none: Deployment bindery-auditor": "bf59f6b88dfac2e9",
    "none: Deployment bindery-broker": "bad6a8022e216e68",
    "none: Deployment bindery-toolbox": "4d5c5108efdc6943",
    "none: StatefulSet bindery-bookie": "7dd3706b8db9ca04",
    "none: StatefulSet bindery-zookeeper": "fbefac785d06ef3f",
    "restricted: Deployment bindery-auditor": "bf59f6b88dfac2e9",
    "restricted: Deployment bindery-broker": "bad6a8022e216e68",
    "restricted: Deployment bindery-toolbox": "4d5c5108efdc6943",
    "restricted: StatefulSet bindery-bookie": "7dd3706b8db9ca04",
    "restricted: StatefulSet bindery-zookeeper": "fbefac785d06ef3f",
    "tls-auth: Deployment bindery-auditor": "bf59f6b88dfac2e9",
    "tls-auth: Deployment bindery-broker": "bad6a8022e216e68",
    "tls-auth: Deployment bindery-toolbox": "4d5c5108efdc6943",
    "tls-auth: StatefulSet bindery-bookie": "7dd3706b8db9ca04",
    "tls-auth: StatefulSet bindery-zookeeper": "fbefac785d06ef3f",
}
"""Preset and workload -> digest of its entry in the golden file. Lines are added, never changed or removed."""


def immutable(preset: str) -> dict[str, Any]:
    found = {}
    for one in of_kind(render_preset(preset), "StatefulSet", "Deployment"):
        spec = one["spec"]
        fields: dict[str, Any] = {"selector": spec["selector"]["matchLabels"]}
        if one["kind"] == "StatefulSet":
            fields |= {
                "serviceName": spec["serviceName"],
                "podManagementPolicy": spec["podManagementPolicy"],
                "firstOrdinal": spec.get("ordinals", {}).get("start", 0),
                "claims": [
                    {
                        "name": claim["metadata"]["name"],
                        "labels": claim["metadata"]["labels"],
                        "accessModes": claim["spec"]["accessModes"],
                        "size": claim["spec"]["resources"]["requests"]["storage"],
                    }
                    for claim in spec["volumeClaimTemplates"]
                ],
            }
        found[f"{one['kind']} {one['metadata']['name']}"] = fields
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_no_immutable_field_changed(preset: str) -> None:
    assert immutable(preset) == yaml.safe_load(GOLDEN.read_text())[preset]


def digest(entry: Any) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]


def entries(golden: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{preset}: {name}": one for preset, found in golden.items() for name, one in found.items()}


def changed(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    """Entries of `old` that are changed or missing in `new`."""
    after = entries(new)
    return [name for name, one in entries(old).items() if after.get(name) != one]


def test_the_golden_file_itself_does_not_change() -> None:
    found = {name: digest(one) for name, one in entries(yaml.safe_load(GOLDEN.read_text())).items()}
    assert found == RELEASED, "a released entry changed, or a new one has no line in RELEASED"


def test_a_changed_or_removed_entry_is_noticed() -> None:
    golden = yaml.safe_load(GOLDEN.read_text())
    name = "StatefulSet bindery-bookie"
    renamed = {**golden, "ha": {**golden["ha"], name: {**golden["ha"][name], "serviceName": "other"}}}
    assert changed(golden, renamed) == [f"ha: {name}"]
    removed = {**golden, "ha": {key: one for key, one in golden["ha"].items() if key != name}}
    assert changed(golden, removed) == [f"ha: {name}"]
    assert changed(golden, {**golden, "new": golden["ha"]}) == []
    assert digest(renamed["ha"][name]) != RELEASED[f"ha: {name}"]


def main() -> int:
    old = yaml.safe_load(GOLDEN.read_text())
    new = {preset: immutable(preset) for preset in PRESETS}
    if refused := changed(old, new):
        print(f"not written: these released entries would change: {', '.join(refused)}", file=sys.stderr)
        return 1
    GOLDEN.write_text(yaml.safe_dump(new))
    return 0


if __name__ == "__main__":
    sys.exit(main())

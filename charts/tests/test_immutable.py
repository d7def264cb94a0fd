"""What Kubernetes refuses to change in a StatefulSet or Deployment, as it was when it first was released.

An upgrade that changes one of these fails in every cluster there is; renamed claims leave the data behind. So the file
may gain lines and never change one. To write it anew: python charts/tests/test_immutable.py
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import PRESETS, of_kind, render_preset

GOLDEN = Path(__file__).parent / "golden" / "immutable.yaml"


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
def test_nothing_changed_that_kubernetes_refuses_to_change(preset: str) -> None:
    assert immutable(preset) == yaml.safe_load(GOLDEN.read_text())[preset]


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(yaml.safe_dump({preset: immutable(preset) for preset in PRESETS}))

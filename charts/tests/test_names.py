"""Names that YAML could parse as numbers or booleans reach Kubernetes as strings."""

from collections.abc import Iterator
from typing import Any

from rendering import documents, template


def strings_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values that Kubernetes requires to be strings: names, namespaces, labels, classes."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        here = f"{path}.{key}"
        if str(key).lower().endswith(("name", "namespace")) or path.lower().endswith(("labels", "annotations")):
            yield here, inner
        yield from strings_in(inner, here)


def test_a_name_that_looks_like_a_number_stays_a_string() -> None:
    values = {
        "nameOverride": "e1",
        "fullnameOverride": "x",
        "broker.ingress": {"enabled": True, "hosts": ["a.example"], "className": "12"},
        "defaults.priorityClassName": "0x10",
        "bookie.persistence.journal.storageClass": "1e3",
        "zookeeper.persistence.storageClass": "007",
        "defaults.serviceAccount": {"create": False, "name": "12"},
        "metrics.podMonitor.enabled": True,
        "networkPolicy.enabled": True,
    }
    done = template(values, release="123", namespace="456")
    assert done.returncode == 0, done.stderr
    found = [place for one in documents(done.stdout) for place in strings_in(one)]
    assert len(found) > 300
    assert [place for place in found if not isinstance(place[1], (str, dict))] == []

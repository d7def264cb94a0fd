"""Invalid values are refused before the installation, with a message that names the value and the fix."""

from typing import Any

import pytest
import yaml
from rendering import CHART, refusal, render, render_preset, template

TYPOS: dict[str, tuple[dict[str, Any], str]] = {
    "a key at the top": ({"bookies": {"replicas": 3}}, "additional properties 'bookies' not allowed"),
    "a key of a workload": ({"bookie.replica": 3}, "at '/bookie': additional properties 'replica' not allowed"),
    "a setting": ({"broker.config.ledger.ensemblSize": 3}, "at '/broker/config/ledger': additional properties"),
    "a setting that the chart makes": ({"bookie.config.bookieId": "x"}, "at '/bookie/config': additional properties"),
    "a probe's figure": ({"bookie.livenessProbe.periodSecond": 3}, "at '/bookie/livenessProbe': additional properties"),
    "a volume's key": ({"bookie.persistence.journals": {}}, "at '/bookie/persistence': additional properties"),
    "an amount of CPU": ({"bookie.resources.requests.cpu": "abc"}, "at '/bookie/resources/requests/cpu': 'abc'"),
    "an amount of memory": ({"broker.resources.limits.memory": "1GB"}, "at '/broker/resources/limits/memory': '1GB'"),
    "limits": ({"broker.resources.limit": {}}, "at '/broker/resources': additional properties 'limit' not allowed"),
    "text for a number": ({"bookie.replicas": "many"}, "at '/bookie/replicas': got string, want integer"),
    "a number below its bound": ({"bookie.replicas": 0}, "at '/bookie/replicas': minimum: got 0, want 1"),
    "text for a switch": ({"toolbox.enabled": "yes"}, "at '/toolbox/enabled': got string, want boolean"),
    "a map for a list": ({"broker.tolerations": {}}, "at '/broker/tolerations': got object, want array"),
    "another word": ({"bookie.antiAffinity": "strict"}, "value must be one of 'soft', 'hard', 'none'"),
    "a digest without its kind": ({"bookie.image.digest": "abc"}, "at '/bookie/image/digest': 'abc' does not match"),
    "a size in other units": ({"bookie.config.memorySizeMax": "512MB"}, "at '/bookie/config/memorySizeMax': '512MB'"),
    "a setting beyond its bound": ({"broker.config.receiveWaitMsMax": 60000}, "maximum: got 60,000, want 30,000"),
    "a port that is a word": ({"broker.service.nodePort": "http"}, "at '/broker/service/nodePort'"),
    "a server without port": ({"zookeeper.external.servers": ["zk"]}, "at '/zookeeper/external/servers/0': 'zk'"),
    "a volume policy": ({"bookie.persistentVolumeClaimRetentionPolicy.whenDeleted": "Keep"}, "'Retain', 'Delete'"),
}
"""Values that the schema refuses."""

CONTRADICTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "too few bookies": (
        {"bookie.replicas": 2},
        ("bookie.replicas (2)", "broker.config.ledger.ensembleSize (3)", "set bookie.replicas to 3 or more"),
    ),
    "more copies than bookies of a ledger": (
        {"broker.config.ledger.writeQuorum": 4},
        ("ensembleSize (3) is less than writeQuorum (4)", "set ensembleSize to 4 or more"),
    ),
    "more answers than copies": (
        {"broker.config.ledger.writeQuorum": 2, "broker.config.ledger.ackQuorum": 3},
        ("writeQuorum (2) is less than ackQuorum (3)", "set ackQuorum to 2 or less"),
    ),
    "evictions beyond the quorum": (
        {"bookie.pdb.maxUnavailable": 2},
        ("bookie.pdb.maxUnavailable (2) is more than ackQuorum - 1 (1)", "set it to 1"),
    ),
    "bookies that scale by load": (
        {"bookie.autoscaling": {"enabled": True}},
        ("bookie.autoscaling is not supported", "remove the block"),
    ),
    "an even number of servers": (
        {"zookeeper.replicas": 2},
        (
            "zookeeper.replicas (2) is even: a ZooKeeper ensemble of 2 servers",
            "no more failures than one of 1; set it to 1 or 3",
        ),
    ),
    "evictions of the majority": (
        {"zookeeper.replicas": 3, "zookeeper.pdb.maxUnavailable": 2},
        ("zookeeper.pdb.maxUnavailable (2) would leave no majority of zookeeper.replicas (3)", "set it to 1"),
    ),
    "no ZooKeeper": (
        {"zookeeper.enabled": False},
        ("zookeeper.external.servers is empty", "name your ZooKeeper servers"),
    ),
    "two ZooKeepers": (
        {"zookeeper.external.servers": ["zk:2181"]},
        ("zookeeper.external.servers is set while zookeeper.enabled is true",),
    ),
    "caches above the limit": (
        {"bookie.config.memorySizeMax": "1Gi"},
        ("bookie.config.memorySizeMax (1073741824 bytes) is above bookie.resources.limits.memory (536870912 bytes)",),
    ),
    "caches that fill the limit": (
        {"bookie.config.memorySizeMax": "449Mi"},
        ("bookie.resources.limits.memory (536870912 bytes) less 64Mi", "lower memorySizeMax to 469762048"),
    ),
    "requests above their limit": (
        {"broker.resources.requests.memory": "1Gi", "helmTest.resources.limits.memory": "1Mi"},
        (
            "broker.resources.requests.memory (1Gi) is above broker.resources.limits.memory (512Mi)",
            "helmTest.resources.requests.memory (64Mi) is above helmTest.resources.limits.memory (1Mi): Kubernetes",
        ),
    ),
    "no image": ({"bookie.image.repository": ""}, ("bookie.image.repository is empty: set it to bindery/bookie",)),
    "volumes in memory above the limit": (
        {"bookie.persistence.enabled": False, "bookie.persistence.journal.medium": "Memory"},
        ("medium Memory takes up to 2147483648 bytes", "set the limit to 2617245696 or more"),
    ),
    "a heap that fills the limit": (
        {"zookeeper.heapSize": "384Mi"},
        ("zookeeper.heapSize (402653184 bytes) leaves Java no room",),
    ),
    "requests above the limit": (
        {"broker.config.inFlightBytesMax": "1Gi"},
        ("broker.config.inFlightBytesMax (1073741824 bytes) is above half of broker.resources.limits.memory",),
    ),
    "requests that fill more than half of the limit": (
        {"broker.config.inFlightBytesMax": "257Mi"},
        ("is above half of broker.resources.limits.memory (536870912 bytes)", "raise the limit to 538968064"),
    ),
    "too little time to stop": (
        {"bookie.terminationGracePeriodSeconds": 10},
        ("bookie.terminationGracePeriodSeconds (10) is less than its preStop hook", "set it to 30 or more"),
    ),
    "adds that are answered longer than the pod lives": (
        {"bookie.config.server.drainTimeoutS": 300},
        ("bookie.terminationGracePeriodSeconds (60) is less", "drainTimeoutS is 300): set it to 325 or more"),
    ),
    "a broker's stop that is longer than the pod lives": (
        {"broker.config.stopTimeoutS": "119.5"},
        ("broker.terminationGracePeriodSeconds (45) is less", "stopTimeoutS is 119.5): set it to 125 or more"),
    ),
    "an auditor's stop that is longer than the pod lives": (
        {"auditor.config.stopTimeoutS": 26},
        ("auditor.terminationGracePeriodSeconds (30) is less", "set it to 31 or more"),
    ),
    "one account made eight times": (
        {"defaults.serviceAccount.name": "x"},
        (
            "- bookie.serviceAccount, broker.serviceAccount, auditor.serviceAccount, zookeeper.serviceAccount, ",
            'helmTest.serviceAccount, upgradeGate.serviceAccount would each create an account called "x"',
            "set create to false in all of them",
        ),
    ),
    "the gate's account is another's": (
        {"upgradeGate.serviceAccount.name": "bindery-bookie"},
        ('bookie.serviceAccount, upgradeGate.serviceAccount would each create an account called "bindery-bookie"',),
    ),
    "an account that goes with the gate": (
        {"broker.serviceAccount": {"create": False, "name": "bindery-gate"}},
        ('the account "bindery-gate" is created by upgradeGate.serviceAccount', "and broker.serviceAccount use it"),
    ),
    "a share of no request": (
        {"broker.autoscaling.enabled": True, "broker.resources.requests": {"memory": "160Mi", "cpu": None}},
        ("broker.resources.requests.cpu is not set", "set it, for example to 200m"),
    ),
    "fewest above most": (
        {"broker.autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}},
        ("broker.autoscaling.minReplicas (5) is more than maxReplicas (3)",),
    ),
    "evictions of every broker": (
        {"broker.replicas": 2, "broker.pdb.maxUnavailable": 2},
        ("broker.pdb.maxUnavailable (2) lets a node drain take all 2 brokers: set it to 1 or less",),
    ),
    "an Ingress for nobody": (
        {"broker.ingress.enabled": True},
        ("broker.ingress.hosts is empty", "name a host"),
    ),
    "a port of the node that nobody gets": (
        {"broker.service.nodePort": 30080},
        ("broker.service.nodePort is set while broker.service.type is ClusterIP",),
    ),
    "a name that is too long": (
        {"nameOverride": "n" * 40},
        ("the objects' names would begin with", "choose a shorter release name or set fullnameOverride"),
    ),
}
"""Values that are valid by themselves, but not in combination."""


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Every default by its dotted path; empty maps are leaves, too."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) and value else {f"{path}{key}": value}
    return found


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
OF_KUBERNETES = ("resources.", "SecurityContext.", "behavior.", "dashboard.labels.", "image.repository", "image.tag")
"""Parts of the paths of values that may be removed, which also removes their objects."""
GRACE = "terminationGracePeriodSeconds"
"""A workload without this value uses that of `defaults`."""


def test_a_required_default_cannot_be_removed() -> None:
    needed = {
        path: value
        for path, value in leaves(DEFAULTS).items()
        if value not in ("", False, [], {})
        and not any(part in path for part in OF_KUBERNETES)
        and (GRACE not in path or path.startswith("defaults."))
    }
    assert len(needed) >= 60
    said = refusal(dict.fromkeys(needed))
    for path in needed:
        block, _, key = path.rpartition(".")
        place = f"'/{block.replace('.', '/')}'" if block else "''"
        lines = [line for line in said.splitlines() if f"{place}: missing prop" in line]
        assert any(f"'{key}'" in line for line in lines), path


@pytest.mark.parametrize("block", [name for name, value in DEFAULTS.items() if isinstance(value, dict) and value])
def test_a_block_cannot_be_removed(block: str) -> None:
    if block == "global":
        assert template({block: None}).returncode == 0, "other charts share it"
    else:
        assert f"missing property '{block}'" in refusal({block: None})


def test_a_key_without_a_value_means_the_same_as_an_empty_one() -> None:
    empty = [
        path
        for path, value in leaves(DEFAULTS).items()
        if value in ("", False, [], {}) and not any(part in path for part in OF_KUBERNETES)
    ]
    assert len(empty) >= 60
    assert render(dict.fromkeys(empty)) == render_preset("none")


@pytest.mark.parametrize("case", TYPOS)
def test_the_schema_refuses_invalid_values(case: str) -> None:
    values, words = TYPOS[case]
    assert words in refusal(values)


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_the_chart_refuses_contradictory_values(case: str) -> None:
    values, sentences = CONTRADICTIONS[case]
    said = refusal(values)
    for sentence in sentences:
        assert sentence in said


def test_all_contradictions_are_reported_together() -> None:
    said = refusal({"bookie.replicas": 2, "zookeeper.replicas": 4, "broker.ingress.enabled": True})
    assert "These values cannot work:" in said
    assert said.count("\n- ") == 3


@pytest.mark.parametrize(
    "values",
    [
        {"bookie.replicas": 3},
        {"bookie.replicas": 1, "broker.config.ledger": {"ensembleSize": 1, "writeQuorum": 1, "ackQuorum": 1}},
        {"bookie.config.memorySizeMax": "448Mi"},
        {"broker.config.inFlightBytesMax": "256Mi"},
        {"broker.terminationGracePeriodSeconds": 35, "auditor.terminationGracePeriodSeconds": 15},
        {"bookie.terminationGracePeriodSeconds": 25, "bookie.config.server.drainTimeoutS": 0},
        {"bookie.serviceAccount.name": "x", "broker.serviceAccount": {"create": False, "name": "x"}},
        {"audit.enabled": True, "fullnameOverride": "n" * 38},
        {"fullnameOverride": "n" * 40},
        {"bookie.config.memorySizeMax": 268435456},
        {"bookie.resources.limits": {"memory": None}, "bookie.config.memorySizeMax": "4Gi"},
        {"zookeeper.replicas": 5, "zookeeper.pdb.maxUnavailable": 2},
        {"broker.config.ledger.ackQuorum": 3, "bookie.pdb.maxUnavailable": 2},
        {"broker.service.type": "NodePort", "broker.service.nodePort": 30080},
        {"global.somethingOfAnotherChart": 1},
    ],
    ids=str,
)
def test_values_at_their_limits_are_accepted(values: dict[str, Any]) -> None:
    done = template(values)
    assert done.returncode == 0, done.stderr

"""Compare the names of metrics and labels of two brokers, as far as they are Pulsar's.

| rule                                                                                                        |
|-------------------------------------------------------------------------------------------------------------|
| a metric of ours that begins with `pulsar_` has a name that Pulsar's page has, or one of ONLY_LATER           |
| it has only sets of labels that Pulsar's has, unless LABELS_DIFFER gives a reason                            |
| docs/pulsar-metrics.md leaves each metric of Pulsar out that ours lacks, unless MISSING_AT_FIRST has it      |
"""

import re
import urllib.request
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

TOPIC: Final = "public/default/metrics"
LABELS_DIFFER: Final = {
    "pulsar_broker_in_bytes_total": "one sum, without `system_topic`",
    "pulsar_broker_out_bytes_total": "one sum, without `system_subscription`",
    "pulsar_version_info": "there is no `commit`",
}
ONLY_LATER: Final = frozenset(
    ("pulsar_lb_bundles_split_total", "pulsar_lb_unload_broker_total", "pulsar_lb_unload_bundle_total")
)
"""Metrics that Pulsar's page has after the first split or move of a bundle."""
MISSING_AT_FIRST: Final = {"pulsar_storage_backlog_age_seconds": "it is read once per round of maintenance"}
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? \S+(?: \d+)?$")
_LABEL: Final = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')
_LEFT_OUT: Final = "## Left out"

Labels = dict[str, set[frozenset[str]]]
"""Sets of labels by the name of a metric."""


def labels_of(page: str) -> Labels:
    """Return the sets of labels by name."""
    found: Labels = {}
    for line in page.splitlines():
        if match := _SAMPLE.match(line):
            found.setdefault(match[1], set()).add(frozenset(_LABEL.findall(match[2] or "")))
    return found


def read(url: str) -> Labels:
    with urllib.request.urlopen(f"{url}/metrics/", timeout=30) as answer:
        return labels_of(answer.read().decode())


def load(url: str) -> None:
    """Create a topic with a subscription, by Pulsar's admin API."""
    for path in (TOPIC, f"{TOPIC}/subscription/s"):
        request = urllib.request.Request(f"{url}/admin/v2/persistent/{path}", method="PUT")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status < 300


def left_out(document: Path) -> list[str]:
    """Return the patterns of the names that the document leaves out."""
    rows = document.read_text().partition(_LEFT_OUT)[2].splitlines()
    return [name for row in rows if row.startswith("| `") for name in re.findall(r"`([\w*]+)`", row.split(" | ")[0])]


def compare(theirs: Labels, ours: Labels, *, document: Path) -> list[str]:
    """Return what contradicts the rules above."""
    problems = []
    for name, sets in sorted(ours.items()):
        if not name.startswith("pulsar_"):
            continue
        if name not in theirs and name in ONLY_LATER:
            continue
        if name not in theirs:
            problems.append(f"Pulsar has no {name}")
        elif not sets <= theirs[name] and name not in LABELS_DIFFER:
            problems.append(f"{name}: labels {shown(sets)}, Pulsar's are {shown(theirs[name])}")
    patterns = left_out(document)
    problems += [f"{name}: the labels do not differ" for name in LABELS_DIFFER if ours[name] <= theirs[name]]
    for name in sorted(theirs.keys() - ours.keys() - MISSING_AT_FIRST.keys()):
        if name.startswith("pulsar_") and not any(fnmatchcase(name, pattern) for pattern in patterns):
            problems.append(f"the document does not say that {name} is left out")
    return problems


def shown(sets: set[frozenset[str]]) -> str:
    return " or ".join(sorted(",".join(sorted(one)) or "none" for one in sets))

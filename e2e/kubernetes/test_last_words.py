"""A pod that cannot start names the cause and the fix in its last log line and in its termination message."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bindery_e2e.cluster.images import Images
from bindery_e2e.cluster.release import Release
from bindery_e2e.runs.session import installed

WAIT_S = 150.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def release(images: Images, reports: Path) -> Iterator[Release]:
    settings = ["bookie.replicas=3", "upgradeGate.enabled=false"]
    with installed("bindery-e2e-words", settings=settings, folder=reports / "words") as found:
        yield found


def break_it(release: Release, values: dict[str, Any], cause: str, file: Path) -> str:
    """Upgrade with `values`, which name one workload, and wait until one of its pods ends with `cause` in its message
    and this message as its last log line. Returns the message."""
    file.write_text(json.dumps(values))
    (component,) = values
    release.upgrade(values=[file], wait=False, what=cause)
    fitting: list[tuple[str, list[str]]] = []

    def problem() -> str:
        found = release.cluster.last_words(component)
        # The container may be replaced between its status and its log, or its log be gone; the next one ends in the
        # same way.
        fitting.extend(words for words in found.values() if cause in words[0] and words[0] in words[1])
        return "" if fitting else f"messages so far: {found}"

    release.cluster.until(problem, f"a {component} ends and names {cause!r}", timeout_s=WAIT_S)
    message, _ = fitting[0]
    print(message)
    return message


def variables(**values: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


CASES = {
    "wrong value": (
        {"auditor": {"env": variables(AUDITOR_BYTES_PER_S_MIN="1000000000")}},
        "bytes_per_s_min",
        "must not exceed bytes_per_s_max",
    ),
    "unreachable ZooKeeper": (
        {"broker": {"env": variables(BROKER_ZOOKEEPER="nowhere:2181", BROKER_ZOOKEEPER_CONNECT_TIMEOUT_S="5")}},
        "the name nowhere does not resolve",
        "set BROKER_ZOOKEEPER to its servers",
    ),
    "cookie mismatch": (
        {"bookie": {"env": variables(BOOKIE_BOOKIE_ID="somebody-else")}},
        "somebody-else",
        "disks swapped? Put them back",
    ),
    # A fourth bookie, because a bookie that had volumes before would report a cookie mismatch instead.
    "missing volume": (
        {"bookie": {"replicas": 4, "env": variables(BOOKIE_LEDGER_DIR="/missing")}},
        "/missing",
        "mount a writable volume there",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pod_that_cannot_start_reports_cause_and_fix(release: Release, case: str, tmp_path: Path) -> None:
    values, cause, fix = CASES[case]
    message = break_it(release, values, cause, tmp_path / "values.json")
    assert fix in message
    assert len(message.encode()) <= 2048

"""Apache Pulsar's pulsar-admin, unmodified, against Bindery and against Pulsar: the same commands, compared.

Compared are whether a command succeeds, what it prints (JSON field by field: the names of the fields always, the values
unless a difference is allowed), and the reason of a refusal. `commands.py` has commands and allowed differences.
`make interop-admin ARGS=--write` writes the table of docs/pulsar-admin.md.
"""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_metadata.stores.embedded import die_with_parent, find_java

from e2e.interop.jars import JavaMissing, class_path
from e2e.interop.processes import HOST, Process, free_port
from e2e.pulsar_admin import metrics
from e2e.pulsar_admin.commands import (
    COMMANDS,
    EXTRA_FIELDS,
    MESSAGES_BEFORE,
    MISSING,
    MISSING_FIELDS,
    SCHEMAS,
    Difference,
)

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1800)]

HERE: Final = Path(__file__).resolve().parent
DOCUMENT: Final = HERE.parents[1] / "docs" / "pulsar-admin.md"
METRICS_DOCUMENT: Final = HERE.parents[1] / "docs" / "pulsar-metrics.md"
BEGIN: Final = "<!-- commands: written by `make interop-admin ARGS=--write` -->\n"
END: Final = "<!-- end of commands -->"
TOPIC: Final = "persistent://public/default/pulsar-admin"
PARTITIONED: Final = "persistent://public/default/parts"
PARTITION: Final = ".partitions.*"
"""Before the fields of each partition, which are those of a topic."""
SHOWN_MAX: Final = 400
"""Maximum characters of an outcome in the report of a failure; the file of outcomes has all of it."""
START_TIMEOUT_S: Final = 240.0
OPENED: Final = ("java.io", "java.nio", "java.util.zip", "java.lang", "jdk.internal.misc", "jdk.internal.platform")


@dataclass(frozen=True)
class Outcome:
    ok: bool
    out: str
    reason: str


class Admin:
    """pulsar-admin in a JVM (Admin.java), for any number of commands."""

    def __init__(self, *, log: Path) -> None:
        words = [str(find_java()), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        words += ["-cp", class_path(HERE / "pom.xml", [HERE / "Admin.java"]), "Admin"]
        self._log = log.open("ab")
        self._child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=die_with_parent,
        )

    def run(self, url: str, words: list[str]) -> Outcome:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"url": url, "words": words}) + "\n")
        self._child.stdin.flush()
        answer = json.loads(self._child.stdout.readline())
        lines = [line for line in answer["err"].splitlines() if line.startswith("Reason: ")]
        out = answer["out"].strip()
        failed = answer["status"] != 0 or out.startswith("Failed to delete topic")  # that one ends with status 0
        if failed and not lines:
            lines = [(out or answer["err"].strip().partition("\n")[0]).rpartition("Exception: ")[2]]
        return Outcome(not failed, "" if failed else out, lines[-1].removeprefix("Reason: ") if failed else "")

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._log.close()


@dataclass
class Side:
    """One broker: its admin API, and how messages are published."""

    url: str
    cluster: str
    publish_path: str
    schemas: str = ""
    """Folder with the files of SCHEMAS."""

    @property
    def broker(self) -> str:
        return self.url.removeprefix("http://")

    def words(self, command: str) -> list[str]:
        values = {"topic": TOPIC, "parts": PARTITIONED, "cluster": self.cluster, "broker": self.broker}
        values["schemas"] = self.schemas
        for name, value in values.items():
            command = command.replace(f"{{{name}}}", value)
        return command.split()

    def publish(self, topic: str = "pulsar-admin") -> None:
        """Store the messages `one` and `two`, each as an entry, in a topic of public/default."""
        path = self.publish_path.replace("pulsar-admin", topic)
        for text in ("one", "two"):
            body = json.dumps({"payload": text}).encode()
            if "/v1/" not in self.publish_path:
                body = json.dumps({"messages": [{"payload": text}], "producerName": "p"}).encode()
            kind = "application/x-ndjson" if "/v1/" in self.publish_path else "application/json"
            request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": kind})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status in (200, 202)


@pytest.fixture(scope="module")
def pulsar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Pulsar standalone: broker, bookie and metadata store in one JVM."""
    try:
        jars = class_path(HERE / "broker.xml", [])
    except JavaMissing as error:
        pytest.fail(str(error))
    home = tmp_path_factory.mktemp("pulsar")
    web, binary, bookie = free_port(), free_port(), free_port()
    settings = {
        "clusterName": "standalone",
        "bindAddress": HOST,
        "advertisedAddress": HOST,
        "brokerServicePort": binary,
        "webServicePort": web,
        "managedLedgerDefaultEnsembleSize": 1,
        "managedLedgerDefaultWriteQuorum": 1,
        "managedLedgerDefaultAckQuorum": 1,
        "functionsWorkerEnabled": "false",
        "loadBalancerEnabled": "false",
        "brokerDeleteInactiveTopicsEnabled": "false",
        "allowLoopback": "true",
        "journalSyncData": "false",
    }
    conf = home / "standalone.conf"
    conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    drivers = "org.apache.pulsar.metadata.bookkeeper.PulsarMetadata{}Driver"
    command = [
        str(find_java()),
        *("-Xmx384m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true"),
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in (*OPENED, "sun.net")),
        "--add-opens=java.management/sun.management=ALL-UNNAMED",
        "-Dio.netty.tryReflectionSetAccessible=true",
        f"-Dbookkeeper.metadata.bookie.drivers={drivers.format('Bookie')}",
        f"-Dbookkeeper.metadata.client.drivers={drivers.format('Client')}",
        *("-cp", jars, "org.apache.pulsar.PulsarStandaloneStarter", "--config", str(conf), "--no-functions-worker"),
        *("--no-stream-storage", "--metadata-dir", str(home / "metadata"), "--bookkeeper-dir", str(home / "ledgers")),
        *("--bookkeeper-port", str(bookie), "--num-bookies", "1", "--advertised-address", HOST),
    ]
    process = Process("pulsar", command, log=home / "log", port=web)
    process.start()
    side = Side(f"http://{HOST}:{web}", "standalone", "/topics/persistent/public/default/pulsar-admin")
    try:
        _wait_ready(side.url, process)
        yield side
    finally:
        process.kill()


def _wait_ready(url: str, process: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/admin/v2/namespaces/public", timeout=5) as answer:
                if "public/default" in json.load(answer):
                    return
        except (OSError, urllib.error.URLError, ValueError):
            pass
        assert process.is_running, process.words()
        assert time.monotonic() < deadline, process.words()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def ours() -> Iterator[Side]:
    with ThrowawayCluster(bookies=3, brokers=1, auditors=1) as cluster:
        yield Side(cluster.url, "bindery", "/v1/topics/public/default/pulsar-admin/messages")


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    try:
        tool = Admin(log=tmp_path_factory.mktemp("admin") / "log")
    except JavaMissing as error:
        pytest.fail(str(error))
    yield tool
    tool.close()


def test_every_command_does_the_same_or_differs_as_documented(
    admin: Admin,
    pulsar: Side,
    ours: Side,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows, problems = [], []
    folder = tmp_path_factory.mktemp("schemas")
    for name, (kind, definition) in SCHEMAS.items():
        (folder / f"{name}.json").write_text(json.dumps({"type": kind, "schema": definition, "properties": {}}))
    pulsar.schemas = ours.schemas = str(folder)
    outcomes = (tmp_path_factory.mktemp("outcomes") / "outcomes.jsonl").open("w")
    for command, allowed in COMMANDS.items():
        if command == MESSAGES_BEFORE:
            pulsar.publish()
            ours.publish()
        theirs = admin.run(pulsar.url, pulsar.words(command))
        found = admin.run(ours.url, ours.words(command))
        outcomes.write(json.dumps([command, asdict(theirs), asdict(found)]) + "\n")
        outcomes.flush()
        if problem := judge(theirs, found, allowed):
            shown = [str(one)[:SHOWN_MAX] for one in (theirs, found)]
            problems.append(f"{command.strip()}: {problem}\n  pulsar:  {shown[0]}\n  bindery: {shown[1]}")
        rows.append(row(command, allowed))
    outcomes.close()
    assert not problems, "\n".join(problems)
    assert len(COMMANDS) >= 80
    table = "\n".join(("| command | result | difference |", "|---|---|---|", *rows)) + "\n"
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if request.config.getoption("--write"):
        DOCUMENT.write_text(before + BEGIN + table + END + after)
    else:
        assert shown == table, "docs/pulsar-admin.md shows another table: run `make interop-admin ARGS=--write`"


def judge(theirs: Outcome, found: Outcome, allowed: Difference | None) -> str:
    """Return how the outcomes differ otherwise than allowed; empty: they do not."""
    differs = allowed or Difference("")
    if theirs.ok != found.ok:
        return "" if differs.status_differs else "one is refused"
    if differs.status_differs:
        return "the allowed difference is not there"
    if not theirs.ok:
        return "" if differs.text_differs or theirs.reason == found.reason else "another reason"
    if differs.fields_differ:
        return ""
    theirs_json, found_json = as_json(theirs.out), as_json(found.out)
    if isinstance(theirs_json, dict) and isinstance(found_json, dict):
        expected, shown = ({name.removeprefix(PARTITION) for name in fields(one)} for one in (theirs_json, found_json))
        if lacking := expected - shown - MISSING_FIELDS:
            return f"fields are missing: {sorted(lacking)}"
        if extra := shown - expected - EXTRA_FIELDS:
            return f"unexpected fields: {sorted(extra)}"
        return "" if differs.text_differs or theirs_json == found_json else "other values"
    return "" if differs.text_differs or theirs.out == found.out else "another output"


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def fields(value: Any, path: str = "") -> set[str]:
    """Return the paths of the fields of a JSON value. Items of a list, and of maps with free keys, are `*`."""
    if isinstance(value, list):
        return set().union(*(fields(one, f"{path}.*") for one in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found = set()
    for name, one in value.items():
        here = f"{path}.{'*' if path.endswith(('subscriptions', 'cursors')) or ':' in name or '/' in name else name}"
        found |= {here} | fields(one, here)
    return found


def row(command: str, allowed: Difference | None) -> str:
    result = "same" if allowed is None else "not supported" if allowed is MISSING else "differs"
    return f"| `{command.strip()}` | {result} | {'' if allowed is None or allowed is MISSING else allowed.reason} |"


def test_metrics_have_pulsars_names_and_labels(pulsar: Side, ours: Side) -> None:
    for side in (pulsar, ours):
        metrics.load(side.url)
        side.publish("metrics")
    problems = metrics.compare(metrics.read(pulsar.url), metrics.read(ours.url), document=METRICS_DOCUMENT)
    assert not problems, "\n".join(problems)

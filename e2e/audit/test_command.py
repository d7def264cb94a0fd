"""The command against bookies that require authentication: interrupted with Ctrl-C and resumed under spark-submit, and
with and without a token."""

import asyncio
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_client.connection.security import load_security
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_simulation.certificates import CA, certificate, key
from bindery_spark import main as command
from bindery_spark.arguments import EXIT_INTERRUPTED
from bindery_spark.session import prepare

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
BINDERY = [sys.executable, "-m", "bindery"]
READING_S = 300.0
LEDGERS = 3
ENTRIES = 200
SIZE = 1000
TOKEN = "a-token-that-must-stand-nowhere"


async def write(zookeeper: str, token_file: Path | None = None) -> None:
    security = load_security(ca_file=CA, token_file=token_file) if token_file else None
    store = await ZooKeeperStore.connect(zookeeper)
    more = {"security": security} if security else {}
    client = await LedgerClient.connect(store, randomness=random.SystemRandom(), **more)
    for _ in range(LEDGERS):
        handle = await client.create()
        await handle.add_many([os.urandom(SIZE)] * ENTRIES)
        await handle.close()
    await client.close()
    await store.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ThrowawayCluster, Path]]:
    """A cluster whose bookies require TLS and a token."""
    token_file = tmp_path_factory.mktemp("secrets") / "token"
    token_file.write_text(TOKEN + "\n")
    settings = {
        "BOOKIE_AUTH_PROVIDER": "token",
        "BOOKIE_AUTH_SECRETS_FILE": str(token_file),
        "BOOKIE_TLS_REQUIRED": "true",
        "BOOKIE_TLS_CERTIFICATE_FILE": str(certificate("bookie")),
        "BOOKIE_TLS_KEY_FILE": str(key("bookie")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        cluster = ThrowawayCluster(bookies=3, brokers=0, auditors=0)
        with cluster:
            asyncio.run(write(cluster.zookeeper, token_file))
            yield cluster, token_file


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def security(token_file: Path) -> list[str]:
    return ["--ca-file", str(CA), "--token-file", str(token_file)]


@pytest.mark.long_run
def test_an_interrupted_run_is_resumed_under_spark_submit(
    guarded: tuple[ThrowawayCluster, Path], tmp_path: Path
) -> None:
    """The signal also goes to the JVM and the workers, as from a terminal. The resumed run uses the credentials of the
    first one."""
    cluster, token_file = guarded
    out = tmp_path / "runs"
    # The run reads for nine seconds, so it is interrupted before it ends.
    process = subprocess.Popen(
        [
            *BINDERY,
            "audit",
            "run",
            "--zookeeper",
            cluster.zookeeper,
            "--out",
            str(out),
            "--rate",
            "64KiB/s",
            *security(token_file),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    began = time.monotonic()
    while not list(out.glob("*/checkpoint/groups/*.part")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began < READING_S
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=READING_S)
    assert process.returncode == EXIT_INTERRUPTED, words
    (directory,) = out.iterdir()
    assert not (directory / "summary.json").exists()
    again = shlex.split(words.strip().splitlines()[-1].partition("To resume: ")[2])
    assert again[:3] == ["bindery", "audit", "run"], words
    assert again[again.index("--resume") + 1] == directory.name
    resumed = submit(*again[1:], "--json")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    facts = json.loads(resumed.stdout.strip().splitlines()[-1])
    assert (facts["verdict"], facts["run_id"], facts["copies"]) == ("HEALTHY", directory.name, 3 * LEDGERS * ENTRIES)


def submit(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `bindery` with these arguments under spark-submit."""
    environment = dict(os.environ)
    prepare(environment)
    spark_submit = Path(sys.executable).with_name("spark-submit")
    options = ("--master", "local[2]", "--conf", "spark.ui.enabled=false")
    return subprocess.run(
        [str(spark_submit), *options, str(command.__file__), *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.long_run
def test_an_audit_needs_the_token_that_bookies_require(guarded: tuple[ThrowawayCluster, Path], tmp_path: Path) -> None:
    """With a token the audit reads everything, and no file or output contains it. Without one it does not begin."""
    cluster, token_file = guarded
    audit = [*BINDERY, "audit", "run", "--zookeeper", cluster.zookeeper, "--json", "--timeout", "2s"]
    shown = {"BINDERY_CLIENT_CA_FILE": str(CA), "BINDERY_CLIENT_TOKEN_FILE": str(token_file)}
    done = run(*audit, "--out", str(tmp_path / "a"), "--level", "standard", **shown)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["copies"] == 3 * LEDGERS * ENTRIES
    refused = run(*audit, "--out", str(tmp_path / "b"), "--ca-file", str(CA))
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "option token_file or BINDERY_CLIENT_TOKEN_FILE" in refused.stderr
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written
    assert all(TOKEN not in text for each in (done, refused) for text in (each.stdout, each.stderr))

